"""Signed notes and verifier keys, as the C2SP specification `signed-note` defines them; no I/O.

A note is a text with one signature a line under it. A verifier ignores signatures of keys that it does not know; one
of a key that it knows must verify.
"""

import hashlib
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ddm.errors import DocumentError, SignatureError
from ddm.protocol.base import REWRITTEN_FILE_REMEDY, change_on_the_way
from ddm.trust.keys import PublicKey, SigningKey

# The kinds of keys in `signed-note`: a log's, and a witness's.
ED25519 = 0x01
COSIGNATURE = 0x04
MAX_NOTE_BYTES = 128 * 1024  # Sixteen signatures of up to 5 kB, with room to spare.
MAX_SIGNATURES = 32
MAX_NAME = 255
MAX_VKEY = 400
_ID_BYTES = 4
_PUBLIC_KEY_BYTES = 32
_DASH = "\u2014"


@dataclass(frozen=True)
class VerifierKey:
    """A key that signs notes, with its name.

    Attributes:
        name: the name of the log or the witness.
        public: the Ed25519 key.
        kind: `ED25519` for a log, `COSIGNATURE` for a witness.
    """

    name: str
    public: PublicKey
    kind: int = ED25519

    def __post_init__(self) -> None:
        _check_name(self.name, "verifier key")

    @property
    def key_id(self) -> bytes:
        """``SHA-256(name || 0x0A || kind || public key)[:4]``."""
        digest = hashlib.sha256(self.name.encode() + b"\n" + self._kind_and_key()).digest()
        return digest[:_ID_BYTES]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``name+hash+base64``.

        Raises:
            DocumentError: another form, another kind of key, or a hash that is not the key's.
        """
        # Base64 may contain plus signs too, a name may not.
        parts: list[str] = []
        if len(text) <= MAX_VKEY:
            parts = text.split("+", 2)
        if len(parts) != 3 or not re.fullmatch("[0-9a-f]{8}", parts[1]):
            raise DocumentError(
                "verifier key",
                expected="NAME+HASH+KEY, with 8 hex digits and base64",
                got=f"{len(text)} characters of another form",
            )
        name, key_hash, encoded_key = parts
        data = decode_base64(encoded_key, "verifier key")
        if len(data) != 1 + _PUBLIC_KEY_BYTES or data[0] not in (ED25519, COSIGNATURE):
            kind = data[0] if data else "unknown"
            raise DocumentError(
                "verifier key",
                expected="an Ed25519 key of a log or a witness",
                got=f"{len(data)} bytes of kind {kind}",
            )
        key = cls(name, PublicKey(data[1:]), data[0])
        # Four bytes are not protection; they show a key that was copied wrongly.
        if key.key_id.hex() != key_hash:
            raise DocumentError(
                "verifier key",
                expected=f"the hash of this key, {key.key_id.hex()}",
                got=key_hash,
            )
        return key

    def __str__(self) -> str:
        encoded_key = b64encode(self._kind_and_key()).decode("ascii")
        return f"{self.name}+{self.key_id.hex()}+{encoded_key}"

    def _kind_and_key(self) -> bytes:
        return bytes([self.kind]) + self.public.raw


@dataclass(frozen=True)
class NoteSignature:
    """One signature line: who signed, by name and key id, and the signature's bytes."""

    name: str
    key_id: bytes
    signature: bytes

    def __str__(self) -> str:
        encoded = b64encode(self.key_id + self.signature).decode("ascii")
        return f"{_DASH} {self.name} {encoded}\n"


@dataclass(frozen=True)
class SignedNote:
    """A text and its signatures, none of them verified yet.

    Attributes:
        text: ends with a newline; this is what is signed.
        signatures: at least one.
    """

    text: str
    signatures: tuple[NoteSignature, ...]

    @classmethod
    def parse(cls, data: bytes, subject: str) -> Self:
        """Parse a note within bounds.

        Raises:
            DocumentError: too long, not UTF-8, a control character, no signature or too many, a malformed line.
        """
        # The text may contain empty lines; the signatures follow the last one.
        text, _, signature_block = _decode(data, subject).rpartition("\n\n")
        num_lines = signature_block.count("\n")
        lines: list[str] = []
        if num_lines <= MAX_SIGNATURES:
            lines = signature_block.splitlines()
        if not text or not lines or not signature_block.endswith("\n"):
            raise DocumentError(
                subject,
                expected=f"a text, an empty line, and 1 to {MAX_SIGNATURES} signature lines",
                got=f"{num_lines} lines after the last one",
            )
        return cls(text + "\n", tuple(_parse_signature(line, subject) for line in lines))

    def encode(self) -> bytes:
        """Return the note's bytes."""
        return (self.text + "\n" + "".join(map(str, self.signatures))).encode()

    def signatures_by(self, key: VerifierKey) -> list[NoteSignature]:
        """Return the signatures that name this key; none of them is verified yet."""
        return [
            signature
            for signature in self.signatures
            if signature.name == key.name and signature.key_id == key.key_id
        ]

    def check(self, keys: Sequence[VerifierKey], subject: str) -> None:
        """Check that one of these keys signed, and that no signature of any of them is invalid.

        Raises:
            SignatureError: no signature by these keys, or an invalid one.
        """
        num_verified = 0
        for key in keys:
            for signature in self.signatures_by(key):
                try:
                    key.public.verify(signature.signature, self.text.encode())
                except SignatureError as error:
                    raise SignatureError(
                        subject,
                        expected=f"a valid signature by {key.name}",
                        got="a signature that does not verify",
                    ) from error
                num_verified += 1
        # Without this an empty list of keys would accept every note.
        if num_verified == 0:
            names = " or ".join(f"{key.name} {key.key_id.hex()}" for key in keys)
            raise SignatureError(
                subject,
                expected=f"a signature by {names or 'a known key'}",
                got=f"{len(self.signatures)} signatures by other keys",
            )


def sign_note(text: str, name: str, key: SigningKey) -> SignedNote:
    """Sign a text as `name`."""
    key_id = VerifierKey(name, key.public).key_id
    signature = NoteSignature(name, key_id, key.sign(text.encode()))
    return SignedNote(text, (signature,))


def decode_base64(text: str, subject: str) -> bytes:
    """Decode standard base64 with padding, of which each value has one form.

    Raises:
        DocumentError: anything else.
    """
    try:
        data = b64decode(text.encode("ascii"), validate=True)
    except (Base64Error, ValueError) as error:
        raise DocumentError(
            subject,
            expected="base64",
            got=f"{len(text)} characters that are not",
        ) from error
    if b64encode(data).decode("ascii") != text:
        raise DocumentError(
            subject,
            expected="canonical base64",
            got="another encoding of the same bytes",
        )
    return data


def _decode(data: bytes, subject: str) -> str:
    if len(data) > MAX_NOTE_BYTES:
        raise DocumentError(
            subject,
            expected=f"at most {MAX_NOTE_BYTES} bytes",
            got=f"{len(data)} bytes",
        )
    change = change_on_the_way(data)
    if change is not None:
        raise DocumentError(
            subject,
            expected="the bytes that its signer wrote",
            got=change,
            remedy=REWRITTEN_FILE_REMEDY,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(
            subject,
            expected="UTF-8 text",
            got=f"an invalid byte at {error.start}",
        ) from error
    # Stricter than the specification, and so that Python's other line ends cannot hide in a line.
    if not all(line.isprintable() for line in text.split("\n")):
        raise DocumentError(
            subject,
            expected="printable text and newlines",
            got="a control character",
        )
    return text


def _parse_signature(line: str, subject: str) -> NoteSignature:
    subject = f"{subject}, signature line"
    parts = line.split(" ")
    if len(parts) != 3 or parts[0] != _DASH:
        raise DocumentError(
            subject,
            expected="a dash, a name and base64",
            got=f"{len(parts)} words",
        )
    _, name, encoded = parts
    _check_name(name, subject)
    data = decode_base64(encoded, subject)
    if len(data) <= _ID_BYTES:
        raise DocumentError(
            subject,
            expected=f"more than {_ID_BYTES} bytes",
            got=f"{len(data)} bytes",
        )
    return NoteSignature(name, data[:_ID_BYTES], data[_ID_BYTES:])


def _check_name(name: str, subject: str) -> None:
    # A plus sign separates the parts of a verifier key, a blank those of a signature line.
    if (
        not 1 <= len(name) <= MAX_NAME
        or "+" in name
        or any(character.isspace() for character in name)
        or not name.isprintable()
    ):
        raise DocumentError(
            subject,
            expected=f"a name of 1 to {MAX_NAME} characters without blanks and plus signs",
            got=f"{len(name)} characters of another form",
        )
