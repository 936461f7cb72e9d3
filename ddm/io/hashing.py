"""A tensor file read from its first byte to its last, once: what is hashed is what is used."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ddm.errors import DigestError, TensorFileError

_BLOCK_BYTES = 1 << 20


class Once:
    """A file that is hashed while it is read, if somebody listed its digest.

    Args:
        handle: the file, at its beginning.
        size: its length when it was opened; no more is ever read.
        digest: the sha256 that was signed or listed for it.
    """

    def __init__(self, handle: BinaryIO, size: int, digest: str | None) -> None:
        self._handle, self.size, self._digest = handle, size, digest
        self._sha256 = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        """Read some bytes; fewer where the file ends."""
        data = self._handle.read(num_bytes)
        self._hash(data)
        return data

    def readinto(self, view: memoryview, subject: str) -> None:
        """Read as many bytes as `view` holds.

        Raises:
            TensorFileError: the file became shorter.
        """
        if (num := self._handle.readinto(view)) != len(view):  # type: ignore[attr-defined]
            raise TensorFileError(
                subject, expected=f"{len(view)} more bytes, as when it was opened", got=f"{num}"
            )
        self._hash(view)

    def _hash(self, data: bytes | memoryview) -> None:
        if self._digest is not None:
            self._sha256.update(data)

    @contextmanager
    def verified(self, subject: str) -> Iterator[None]:
        """Report other bytes than the listed ones as that, and as nothing else that may be wrong with them.

        Raises:
            DigestError: the whole file is not the one listed.
            TensorFileError: it is, and the block under this found something wrong with it.
        """
        try:
            yield
        except TensorFileError:
            self._compare(subject)
            raise
        self._compare(subject)

    def _compare(self, subject: str) -> None:
        if self._digest is None:
            return
        left = self.size - self._handle.tell()
        while left > 0 and (chunk := self._handle.read(min(left, _BLOCK_BYTES))):
            self._sha256.update(chunk)
            left -= len(chunk)
        if (found := self._sha256.hexdigest()) != self._digest:
            raise DigestError(
                subject, expected=f"sha256 {self._digest[:16]}...", got=f"{found[:16]}..."
            )
