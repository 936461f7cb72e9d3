"""Messages between a log and its witnesses, as C2SP's `tlog-witness` defines them, and how many must agree; no I/O.

A log sends a witness its checkpoint and a proof that it continues the last one that this witness saw; the witness
answers with a cosignature. A reader who demands cosignatures of witnesses whom it trusts is not shown a history of its
own, unless enough of them help.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ddm.errors import DocumentError, MathError, SignatureError
from ddm.trust.log.checkpoint import SignedCheckpoint, check_cosignature, parse_number
from ddm.trust.log.merkle import consistency_proof
from ddm.trust.log.note import COSIGNATURE, SignedNote, VerifierKey

MAX_ANSWER_BYTES = 16 * 1024
SIZE_TYPE = "text/x.tlog.size"


def encode_request(old_size: int, leaves: Sequence[bytes], signed: SignedCheckpoint) -> bytes:
    """Return the body of `add-checkpoint`.

    Args:
        old_size: of the checkpoint that the witness cosigned last, 0 for none.
        leaves: the hashes of the entries that `signed` is of.
        signed: the checkpoint to cosign.

    Raises:
        MathError: the old size is larger than the checkpoint's.
    """
    if old_size > signed.size:
        raise MathError("old size", expected=f"at most {signed.size}", got=str(old_size))
    # From the empty log, or to the same size, there is nothing to prove.
    proof: list[bytes] = []
    if 0 < old_size < signed.size:
        proof = consistency_proof(leaves, old_size)
    lines = [f"old {old_size}"]
    lines += [b64encode(node).decode("ascii") for node in proof]
    # An empty line separates the proof from the checkpoint.
    head = "\n".join(lines) + "\n\n"
    return head.encode() + signed.encode()


def parse_size(body: bytes, subject: str) -> int:
    """Parse the size with which a witness answers that it saw another checkpoint last.

    Raises:
        DocumentError: not one number and a newline.
    """
    if len(body) > MAX_ANSWER_BYTES or not body.endswith(b"\n"):
        raise DocumentError(
            subject,
            expected="a size and a newline",
            got=f"{len(body)} bytes of another form",
        )
    return parse_number(body[:-1].decode("ascii", "replace"), subject)


def add_cosignatures(
    signed: SignedCheckpoint,
    body: bytes,
    witness: VerifierKey,
    subject: str,
) -> SignedCheckpoint:
    """Return a checkpoint with the cosignatures of a witness from its answer, in place of its earlier ones.

    Args:
        signed: what it was sent.
        body: its answer; signatures of other keys in it are ignored.
        witness: its key.
        subject: what to call it in errors.

    Raises:
        DocumentError: the answer is too long, or does not consist of signature lines.
        SignatureError: none of them is of this witness, or one does not verify.
    """
    if len(body) > MAX_ANSWER_BYTES:
        raise DocumentError(
            subject,
            expected=f"at most {MAX_ANSWER_BYTES} bytes",
            got=f"{len(body)} bytes",
        )
    # The answer holds signature lines alone: they are read as if they were under the checkpoint that was sent.
    answer = SignedNote.parse(signed.note.text.encode() + b"\n" + body, subject)
    if answer.text != signed.note.text:
        raise DocumentError(subject, expected="signature lines", got="an empty line among them")
    check_cosignature(replace(signed, note=answer), witness, subject)
    earlier = signed.note.signatures_by(witness)
    others = [signature for signature in signed.note.signatures if signature not in earlier]
    signatures = (*others, *answer.signatures_by(witness))
    return replace(signed, note=replace(signed.note, signatures=signatures))


@dataclass(frozen=True)
class Witnesses:
    """The witnesses whom a reader trusts.

    Attributes:
        keys: their verifier keys; a key that is listed under two names counts once.
        quorum: how many of them must have cosigned; None for all.

    Raises:
        DocumentError: a key is not a witness's.
        MathError: a quorum that they cannot reach.
    """

    keys: tuple[VerifierKey, ...]
    quorum: int | None = None

    def __post_init__(self) -> None:
        for key in self.keys:
            if key.kind != COSIGNATURE:
                raise DocumentError(
                    f"key of {key.name}",
                    expected="a witness's key, which cosigns",
                    got="a log's key",
                )
        num_witnesses = len(self.distinct_keys)
        if not 1 <= self.num_required <= num_witnesses:
            raise MathError(
                "quorum",
                expected=f"1 to {num_witnesses}, the number of witnesses",
                got=str(self.num_required),
            )

    @property
    def distinct_keys(self) -> tuple[VerifierKey, ...]:
        """Each key once, so that one witness under two names is not counted as two."""
        return tuple({key.public.raw: key for key in self.keys}.values())

    @property
    def num_required(self) -> int:
        """How many of them must have cosigned."""
        if self.quorum is None:
            return len(self.distinct_keys)
        return self.quorum

    def check(
        self, copies: Sequence[SignedCheckpoint], remedy: str | None = None
    ) -> Mapping[str, datetime]:
        """Check that enough of them cosigned a checkpoint; return when each did, by name.

        Args:
            copies: the same checkpoint, with different cosignatures perhaps; at least one.
            remedy: what to do where too few did.

        Raises:
            SignatureError: too few did, or a cosignature of one of them does not verify.
            DocumentError: the time of a cosignature is not one.
        """
        cosigned_at: dict[str, datetime] = {}
        for key in self.distinct_keys:
            cosigned_copies = [copy for copy in copies if copy.note.signatures_by(key)]
            if cosigned_copies:
                # A cosignature that does not verify is an error, not a missing one: somebody made it up.
                latest = max(check_cosignature(copy, key, "checkpoint") for copy in cosigned_copies)
                cosigned_at[key.name] = _to_datetime(latest)
        if len(cosigned_at) < self.num_required:
            names = ", ".join(sorted(cosigned_at))[:200] or "none of them"
            raise SignatureError(
                "checkpoint",
                expected=f"{self.num_required} of {len(self.distinct_keys)} witnesses "
                f"under the checkpoint of {copies[0].size} entries",
                got=f"cosignatures of {names}",
                remedy=remedy,
            )
        return cosigned_at


def _to_datetime(seconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise DocumentError(
            "checkpoint, cosignature",
            expected="a time",
            got=f"{seconds} seconds",
        ) from error
