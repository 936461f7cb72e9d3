"""Checkpoints: the signed size and root hash of a log, and the cosignatures of witnesses on them; no I/O.

Formats of C2SP: `tlog-checkpoint` and `tlog-cosignature` (the Ed25519 kind).
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ddm.errors import DocumentError, SignatureError, TrustError
from ddm.trust.keys import SigningKey
from ddm.trust.log.merkle import HASH_BYTES, MAX_SIZE
from ddm.trust.log.note import (
    COSIGNATURE,
    ED25519,
    NoteSignature,
    SignedNote,
    VerifierKey,
    decode_base64,
    sign_note,
)

_TIME_BYTES = 8
_SIGNATURE_BYTES = 64
# `tlog-cosignature` wants times that fit into a signed 64-bit integer.
_MAX_TIME = 2**63 - 1


@dataclass(frozen=True)
class Checkpoint:
    """The state of a log at one time.

    Attributes:
        origin: the log's name.
        size: how many entries it has.
        root: the root hash over them.
    """

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        """The three lines that are signed."""
        return f"{self.origin}\n{self.size}\n{b64encode(self.root).decode('ascii')}\n"

    @classmethod
    def parse(cls, text: str, subject: str) -> Self:
        """Parse the text of a note.

        Raises:
            DocumentError: a malformed line, or not three: extension lines, which no monitor can check, are refused.
        """
        lines = text.split("\n")
        # The text ends with a newline, so that a fourth, empty part follows the last line.
        if len(lines) != 4 or not lines[0] or lines[3]:
            raise DocumentError(
                subject,
                expected="three lines: origin, size, root hash",
                got=f"{len(lines) - 1} lines",
            )
        size = parse_number(lines[1], subject)
        root = decode_base64(lines[2], subject)
        if len(root) != HASH_BYTES:
            raise DocumentError(
                subject,
                expected=f"a root hash of {HASH_BYTES} bytes",
                got=f"{len(root)} bytes",
            )
        return cls(lines[0], size, root)


@dataclass(frozen=True)
class SignedCheckpoint:
    """A checkpoint whose signature by its log was verified.

    Attributes:
        checkpoint: its content.
        note: all of it, with the signatures of others too.
    """

    checkpoint: Checkpoint
    note: SignedNote

    @property
    def size(self) -> int:
        """How many entries the log has."""
        return self.checkpoint.size

    @property
    def root(self) -> bytes:
        """The root hash over them."""
        return self.checkpoint.root

    def encode(self) -> bytes:
        """Return the signed bytes, which prove what the log said."""
        return self.note.encode()


def parse_number(text: str, subject: str) -> int:
    """Parse a decimal number without leading zeros, so that one number has one text.

    Raises:
        DocumentError: anything else, or a number that is too large.
    """
    if not re.fullmatch("0|[1-9][0-9]{0,15}", text) or int(text) > MAX_SIZE:
        expected = f"a number of at most {MAX_SIZE}, without leading zeros"
        raise DocumentError(
            subject, expected=expected, got=f"{len(text)} characters that are not such a number"
        )
    return int(text)


def sign_checkpoint(checkpoint: Checkpoint, key: SigningKey) -> SignedCheckpoint:
    """Sign as the log; the same checkpoint and key give the same bytes."""
    return SignedCheckpoint(checkpoint, sign_note(checkpoint.text, checkpoint.origin, key))


def open_checkpoint(data: bytes, keys: Sequence[VerifierKey], subject: str) -> SignedCheckpoint:
    """Parse a checkpoint, whose log must have signed it.

    Args:
        data: the bytes as received.
        keys: those that may sign for the log.
        subject: what to call it in errors.

    Raises:
        DocumentError: it does not parse.
        SignatureError: none of these keys signed it, or a signature of one of them is invalid.
        TrustError: it is signed by the key of this log, and names another one.
    """
    note = SignedNote.parse(data, subject)
    log_keys = [key for key in keys if key.kind == ED25519]
    note.check(log_keys, subject)
    checkpoint = Checkpoint.parse(note.text, subject)
    # The name in the text is what is signed; that in the signature line is not.
    if checkpoint.origin not in {key.name for key in log_keys}:
        raise TrustError(
            subject,
            expected=f"a checkpoint of {log_keys[0].name}",
            got="a checkpoint of another log",
        )
    return SignedCheckpoint(checkpoint, note)


def check_cosignature(signed: SignedCheckpoint, witness: VerifierKey, subject: str) -> int:
    """Check that a witness cosigned a checkpoint; return when, in seconds since the epoch.

    Raises:
        SignatureError: it did not, or its signature is invalid.
    """
    cosignatures: list[NoteSignature] = []
    # A key of the other kind signs other bytes: a log's own signature never counts as a witness's.
    if witness.kind == COSIGNATURE:
        cosignatures = signed.note.signatures_by(witness)
    if not cosignatures:
        raise SignatureError(
            subject,
            expected=f"a cosignature by {witness.name}",
            got=f"{len(signed.note.signatures)} signatures, none by this witness",
        )
    # Every one of them must verify, so that nobody can add a second one with an invented time.
    return max(
        _verify_cosignature(cosignature, signed.note.text, witness, subject)
        for cosignature in cosignatures
    )


def _verify_cosignature(
    cosignature: NoteSignature,
    text: str,
    witness: VerifierKey,
    subject: str,
) -> int:
    """Verify one cosignature, which is the time in eight bytes and a signature over time and text."""
    time = int.from_bytes(cosignature.signature[:_TIME_BYTES], "big")
    signature = cosignature.signature[_TIME_BYTES:]
    try:
        if len(signature) != _SIGNATURE_BYTES or time > _MAX_TIME:
            raise SignatureError(subject)
        witness.public.verify(signature, _cosigned_bytes(time, text))
    except SignatureError as error:
        raise SignatureError(
            subject,
            expected=f"a valid cosignature by {witness.name}",
            got="a cosignature that does not verify",
        ) from error
    return time


def cosign(
    signed: SignedCheckpoint,
    name: str,
    key: SigningKey,
    time: int,
) -> SignedCheckpoint:
    """Add the cosignature of a witness, who has checked that the log only grew since the last one."""
    witness = VerifierKey(name, key.public, COSIGNATURE)
    # The time is signed too, so that an old cosignature does not pass for a recent one.
    signature = key.sign(_cosigned_bytes(time, signed.note.text))
    cosignature = NoteSignature(name, witness.key_id, time.to_bytes(_TIME_BYTES, "big") + signature)
    note = replace(signed.note, signatures=(*signed.note.signatures, cosignature))
    return replace(signed, note=note)


def _cosigned_bytes(time: int, text: str) -> bytes:
    """Return what a witness signs; the header keeps it from being taken for a log's signature over the text."""
    return f"cosignature/v1\ntime {time}\n{text}".encode()
