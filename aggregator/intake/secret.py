"""Draws what screening tests an expert with from a secret of the aggregator, so that no silo can foresee it.

    keys/screening.secret   32 random bytes, made when first needed; readable by the operator alone

Every draw depends on the secret and on what it is for, such as a submission's digest. So a submission meets the same
tests after a restart, and a changed one meets others. Without the file a new secret is made: what was measured before
stays as it was, and later submissions meet other draws.
"""

import hashlib
import hmac
import secrets
from contextlib import suppress

import numpy as np

from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.io.files import read_bounded, write_atomic

SECRET_NAME = "screening.secret"
SECRET_BYTES = 32


def load_screening_secret(federation: Federation) -> bytes:
    """Read the federation's secret, and make it where there is none.

    Raises:
        SetupError: the file does not hold a secret.
    """
    path = federation.keys / SECRET_NAME
    if not path.exists():
        with suppress(FileExistsError):  # another process made it at the same time
            write_atomic(path, secrets.token_bytes(SECRET_BYTES), mode=0o600, overwrite=False)
    secret = read_bounded(path, SECRET_BYTES)
    if len(secret) != SECRET_BYTES:
        got = f"{len(secret)} bytes"
        remedy = "Restore it from backup, or remove it: a new one is made, for submissions that come later."
        raise SetupError(
            f"keys/{SECRET_NAME}", expected=f"{SECRET_BYTES} bytes", got=got, remedy=remedy
        )
    return secret


def secret_stream(secret: bytes, *purpose: str) -> np.random.Generator:
    """Return random numbers that depend on the secret and on each word of their purpose, and on nothing else."""
    # Each word goes with its length, so that no two lists of words are the same bytes.
    words = b"".join(len(word.encode()).to_bytes(8) + word.encode() for word in purpose)
    key = hmac.new(secret, words, hashlib.sha256).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64)))
