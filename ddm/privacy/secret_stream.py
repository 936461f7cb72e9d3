"""The random source of one private training: a secret of the operating system's, expanded by ChaCha20.

What step n draws is a function of the secret and n, so a training that was killed draws the same noise again and not a
second one, and what resumes is the same to the byte. Without the secret the stream cannot be told from random bytes.
The secret is written once, for its owner alone, and goes with the folder of the training.
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from ddm.errors import MissingFileError

SECRET_BYTES = 32
Purpose = Literal["sampling", "noise", "draws", "name"]


def make_secret(path: Path) -> None:
    """Write a new secret, mode 0600, durably, where there is none; a half-written one never has this name."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            writer.write(secrets.token_bytes(SECRET_BYTES))
            writer.flush()
            os.fsync(writer.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_secret(path: Path) -> bytes:
    """Read the secret.

    Raises:
        MissingFileError: there is none, or not a whole one.
    """
    secret = b""
    if path.is_file():
        secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise MissingFileError(
            path.name,
            expected=f"the secret of a private training, {SECRET_BYTES} bytes",
            got=f"{len(secret)} bytes",
            remedy="Remove the folder of this training; it begins again, with another secret.",
        )
    return secret


class SecretStream:
    """Uniform bytes that depend on the secret, what they are for, a step and a unit alone."""

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        step: int = 0,
        unit: int = 0,
    ) -> None:
        self._key = _key(secret, purpose, step, unit)
        # The key is used for nothing else, so its nonce and counter may begin at zero.
        nonce = bytes(16)
        cipher = Cipher(algorithms.ChaCha20(self._key, nonce), mode=None)
        self._cipher = cipher.encryptor()

    def octets(self, num: int) -> bytes:
        """Return the next `num` bytes."""
        return self._cipher.update(bytes(num))


def secret_generator(secret: bytes, step: int, unit: int) -> np.random.Generator:
    """Return numpy's generator for what a unit's images go through at a step: times, noises, crops; hidden by nothing.

    They depend on the secret so that they are independent of the order in which units are numbered.
    """
    # Philox takes a key of 128 bits.
    key_bytes = _key(secret, "draws", step, unit)[:16]
    key = np.frombuffer(key_bytes, dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def name_of_secret(secret: bytes) -> str:
    """Return a digest that names a secret without revealing it."""
    return _key(secret, "name", 0, 0).hex()


def _key(
    secret: bytes,
    purpose: Purpose,
    step: int,
    unit: int,
) -> bytes:
    message = step.to_bytes(8, "big") + unit.to_bytes(8, "big")
    return hashlib.blake2b(
        message, digest_size=32, key=secret, person=purpose.encode().ljust(16, b"\0")
    ).digest()
