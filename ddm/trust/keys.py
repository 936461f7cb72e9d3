"""Ed25519 keys: generated where they are used, encrypted on disk, identified by fingerprint."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from securesystemslib.signer import Key, SSlibKey

from ddm.errors import DocumentError, SetupError, SignatureError
from ddm.io.files import read_bounded, write_atomic
from ddm.trust.key_files import MAX_KEY_FILE_BYTES, encrypt_private_key, open_private_key

_PREFIX = "ed25519:"


@dataclass(frozen=True)
class PublicKey:
    """The public half of an Ed25519 key.

    Attributes:
        raw: 32 bytes, as in RFC 8032.
    """

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``ed25519:`` and 64 lowercase hex digits.

        Raises:
            DocumentError: another format.
        """
        # One form only, since keys are compared as texts in documents.
        if not re.fullmatch(_PREFIX + "[0-9a-f]{64}", text):
            raise DocumentError(
                "public key",
                expected="ed25519: and 64 lowercase hex digits",
                got=repr(text[:80]),
            )
        return cls(bytes.fromhex(text.removeprefix(_PREFIX)))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a ``.pub`` file: the key on one line.

        Raises:
            MissingFileError: there is no such file.
            DocumentError: it does not hold a public key.
        """
        data = read_bounded(path.resolve(), MAX_KEY_FILE_BYTES, subject=path.name)
        return cls.parse(data.decode("ascii", "replace").strip())

    def save(self, path: Path) -> None:
        """Write the key as `load` reads it."""
        write_atomic(path, f"{self}\n".encode())

    def __str__(self) -> str:
        return _PREFIX + self.raw.hex()

    @property
    def fingerprint(self) -> str:
        """The lowercase sha256 hex of the 32 bytes."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def short(self) -> str:
        """The fingerprint in groups of four, for people who compare two of them."""
        return group_fingerprint(self.fingerprint)

    def verify(self, signature: bytes, data: bytes) -> None:
        """Check that `signature` over `data` was made by this key.

        Raises:
            SignatureError: it was not.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except (InvalidSignature, ValueError) as error:
            raise SignatureError(
                "signature",
                expected=f"a valid signature by key {self.short[:19]}",
                got="an invalid signature",
            ) from error

    def tuf_key(self) -> Key:
        """Return this key as TUF metadata lists it, under its default key id."""
        return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(self.raw))


class SigningKey:
    """A private Ed25519 key; stored only as encrypted PKCS8."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> Self:
        """Generate a key from the operating system's random source."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path, passphrase: bytes) -> Self:
        """Open the key file at `path`.

        Raises:
            MissingFileError: there is no such file.
            PassphraseError: the passphrase does not open it.
            SetupError: it is not an encrypted Ed25519 key.
        """
        private = open_private_key(path, passphrase)
        if not isinstance(private, Ed25519PrivateKey):
            raise SetupError(path.name, expected="an Ed25519 key", got="a key of another algorithm")
        return cls(private)

    def derive(self, name: str) -> Self:
        """Return a key derived from this one and a name (HKDF-SHA256, RFC 5869); it reveals nothing of this one."""
        info = f"archipelago/{name}".encode()
        derivation = HKDF(hashes.SHA256(), 32, salt=None, info=info)
        secret = derivation.derive(self._private.private_bytes_raw())
        return type(self)(Ed25519PrivateKey.from_private_bytes(secret))

    def save(self, path: Path, passphrase: bytes) -> None:
        """Write the key atomically, encrypted, readable by its owner only; an existing file is never overwritten.

        Raises:
            PassphraseError: the passphrase is empty.
            SetupError: there is a file already.
        """
        data = encrypt_private_key(self._private, passphrase)
        # Overwriting a key would make everything that only it can sign impossible for ever.
        try:
            write_atomic(path, data, mode=0o600, overwrite=False)
        except FileExistsError as error:
            raise SetupError(
                path.name,
                expected="no file of this name",
                got="an existing file",
                remedy="A key is never overwritten. Choose another folder, or move the old key away.",
            ) from error

    @property
    def public(self) -> PublicKey:
        """The public half, which may travel."""
        return PublicKey(self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`: 64 bytes, deterministic."""
        return self._private.sign(data)


def group_fingerprint(fingerprint: str) -> str:
    """Lay out a fingerprint in groups of four hex digits."""
    return " ".join(fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4))


def parse_fingerprint(text: str) -> str:
    """Parse a sha256 fingerprint as people type it: in either case, with or without blanks and colons.

    Raises:
        SetupError: not 64 hex digits.
    """
    plain = re.sub(r"[\s:]", "", text).lower()
    # All 64 digits: a beginning that fits is cheap to find for another key.
    if not re.fullmatch("[0-9a-f]{64}", plain):
        raise SetupError("fingerprint", expected="64 hex digits", got=repr(text[:80]))
    return plain
