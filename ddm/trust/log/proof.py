"""The proofs that travel with a release or a plan: a C2SP `tlog-proof`, and proofs of consistency; no I/O.

An inclusion proof shows that a manifest or plan is in the log, so that it cannot be shown to one reader alone. A
consistency proof shows that the log only grew since a reader's last visit.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ddm.errors import DocumentError
from ddm.protocol.base import Document, Model, PositiveInt
from ddm.trust.log.checkpoint import SignedCheckpoint, open_checkpoint, parse_number
from ddm.trust.log.merkle import (
    HASH_BYTES,
    MAX_PROOF_HASHES,
    check_inclusion,
    consistency_proof,
    leaf_hash,
)
from ddm.trust.log.note import MAX_NOTE_BYTES, VerifierKey, decode_base64

PROOF_HEADER = "c2sp.org/tlog-proof@v1"
MAX_PROOF_BYTES = MAX_NOTE_BYTES + 8192
MAX_CONSISTENCY_BYTES = 2 * 1024 * 1024
# A checkpoint is given out with each release and plan, and readers come back within the newest thousand.
MAX_CONSISTENCY_PROOFS = 1024
_Hash = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9+/]{43}=$")]


@dataclass(frozen=True)
class InclusionProof:
    """A proof that some entry is in a log; neither its signature nor its hashes are verified yet.

    Attributes:
        index: the entry's index in the log, from 0.
        hashes: from the entry's sibling up to a child of the root.
        checkpoint: the signed checkpoint, as received.
    """

    index: int
    hashes: tuple[bytes, ...]
    checkpoint: bytes

    @classmethod
    def parse(cls, data: bytes, subject: str) -> Self:
        """Parse a ``.tlog-proof`` file; one with extra data, which nothing authenticates, is refused.

        Raises:
            DocumentError: too long, of another form, or of more than 64 hashes.
        """
        if len(data) > MAX_PROOF_BYTES:
            raise DocumentError(
                subject,
                expected=f"at most {MAX_PROOF_BYTES} bytes",
                got=f"{len(data)} bytes",
            )
        # The first empty line ends the proof; the checkpoint after it has an empty line of its own.
        head, separator, checkpoint = data.partition(b"\n\n")
        lines = head.split(b"\n")
        has_known_length = 2 <= len(lines) <= 2 + MAX_PROOF_HASHES
        if not separator or not has_known_length or lines[0] != PROOF_HEADER.encode():
            raise DocumentError(
                subject,
                expected=f"{PROOF_HEADER}, an index, at most {MAX_PROOF_HASHES} hashes, "
                "an empty line and a checkpoint",
                got=f"{len(lines)} lines of another form",
            )
        index_line, *hash_lines = [line.decode("ascii", "replace") for line in lines[1:]]
        if not index_line.startswith("index "):
            raise DocumentError(subject, expected="the entry's index", got="a line without one")
        index = parse_number(index_line.removeprefix("index "), subject)
        return cls(index, tuple(_parse_hash(line, subject) for line in hash_lines), checkpoint)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        lines = [PROOF_HEADER, f"index {self.index}"]
        lines += [_encode_hash(digest) for digest in self.hashes]
        return "\n".join(lines).encode() + b"\n\n" + self.checkpoint

    def check(self, entry: bytes, keys: Sequence[VerifierKey], subject: str) -> SignedCheckpoint:
        """Check that the entry is in the log that signed the checkpoint, which is returned.

        Raises:
            SignatureError: the checkpoint is not signed by these keys.
            DocumentError: the checkpoint does not parse.
            FormatError: the index or the number of hashes does not fit the checkpoint's size.
            TrustError: the log has another entry at this index.
        """
        # The signature first: size and root hash mean something only once the log has signed them.
        signed = open_checkpoint(self.checkpoint, keys, f"{subject}, checkpoint")
        check_inclusion(
            leaf_hash(entry),
            self.index,
            signed.size,
            signed.root,
            self.hashes,
            subject,
        )
        return signed


class ConsistencyProof(Model):
    """A proof that the log of `size` entries is the beginning of the log that a checkpoint beside it describes."""

    size: PositiveInt
    hashes: Annotated[tuple[_Hash, ...], Field(max_length=MAX_PROOF_HASHES)]

    def decode(self) -> list[bytes]:
        """Return the hashes.

        Raises:
            DocumentError: one of them is not canonical base64.
        """
        return [_parse_hash(text, "consistency proof") for text in self.hashes]


class ConsistencyProofs(Document):
    """Proofs that start at the checkpoints that were given out earlier, by size: `log-consistency.json`."""

    format: Literal["archipelago/log-consistency/1"] = "archipelago/log-consistency/1"
    proofs: Annotated[tuple[ConsistencyProof, ...], Field(max_length=MAX_CONSISTENCY_PROOFS)] = ()

    @model_validator(mode="after")
    def _ordered(self) -> "ConsistencyProofs":
        # One encoding for one set of proofs, and one answer for each size.
        sizes = [proof.size for proof in self.proofs]
        if sizes != sorted(set(sizes)):
            raise ValueError("proofs must be sorted by size, each size once")
        return self

    @classmethod
    def from_sizes(cls, leaves: Sequence[bytes], sizes: Sequence[int]) -> Self:
        """Prove that the log had these sizes before: at most the newest 1,024 of them."""
        # A proof from size 0 would state nothing: every log begins with the empty one.
        possible_sizes = sorted({size for size in sizes if 1 <= size <= len(leaves)})
        proofs = []
        for size in possible_sizes[-MAX_CONSISTENCY_PROOFS:]:
            hashes = tuple(_encode_hash(node) for node in consistency_proof(leaves, size))
            proofs.append(ConsistencyProof(size=size, hashes=hashes))
        return cls(proofs=tuple(proofs))

    def starting_at(self, size: int) -> list[bytes] | None:
        """Return the proof from this size, None if there is none."""
        for proof in self.proofs:
            if proof.size == size:
                return proof.decode()
        return None


def checkpoint_in(data: bytes, subject: str) -> bytes:
    """Return the checkpoint of a file that is one, or that is a ``.tlog-proof``, which ends with one.

    Raises:
        DocumentError: it begins as a proof, and is none.
    """
    if data.startswith(PROOF_HEADER.encode() + b"\n"):
        return InclusionProof.parse(data, subject).checkpoint
    return data


def _encode_hash(digest: bytes) -> str:
    return b64encode(digest).decode("ascii")


def _parse_hash(text: str, subject: str) -> bytes:
    digest = decode_base64(text, subject)
    if len(digest) != HASH_BYTES:
        raise DocumentError(
            subject,
            expected=f"hashes of {HASH_BYTES} bytes",
            got=f"{len(digest)} bytes",
        )
    return digest
