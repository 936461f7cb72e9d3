"""Brings one file from a host: bounded in bytes and time, resumed where it broke off, compared with what is signed."""

import hashlib
import io
import os
import time
from collections.abc import Callable
from typing import BinaryIO

from ddm.errors import DigestError, DocumentError, TransportError
from ddm.fetching.hosts import CHUNK_BYTES, FetchLimits, Host, InterruptedTransfer, SentFile
from ddm.trust.rules import SignedFile

OnBytes = Callable[[int], None]
"""Called with the number of bytes that have come since the last call; less than 0 where bytes were thrown away."""


class _TooLong(Exception):
    """More bytes than may come."""


class PartialFile:
    """What has come of a file, and the digest of it so far.

    Args:
        handle: an open file; what is in it came before.
        max_bytes: what does not fit is refused.
        on_bytes: see `OnBytes`.
    """

    def __init__(
        self, handle: BinaryIO, max_bytes: int, on_bytes: OnBytes = lambda count: None
    ) -> None:
        self._handle = handle
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0
        handle.seek(0)
        while chunk := handle.read(CHUNK_BYTES):
            self._count(chunk)
        if self.num_bytes > max_bytes:
            self.restart()

    @property
    def digest(self) -> str:
        """The sha256 of what has come."""
        return self._sha256.hexdigest()

    def add(self, chunk: bytes) -> None:
        """Append bytes.

        Raises:
            _TooLong: they do not fit; nothing of them was written.
        """
        if self.num_bytes + len(chunk) > self._max_bytes:
            raise _TooLong
        self._handle.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        """Throw everything away."""
        self._handle.seek(0)
        self._handle.truncate()
        self._sha256 = hashlib.sha256()
        self._on_bytes(-self.num_bytes)
        self.num_bytes = 0

    def _count(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        self.num_bytes += len(chunk)
        self._on_bytes(len(chunk))


def read_file(host: Host, path: str, max_bytes: int, limits: FetchLimits) -> bytes:
    """Read a small file of a host, whose length nobody has signed.

    Raises:
        DocumentError: it is longer than `max_bytes`.
        AbsentFileError, TransportError: see `Host.open`; or it broke off too often.
    """
    buffer = io.BytesIO()
    partial = PartialFile(buffer, max_bytes)
    try:
        _transfer(host, path, partial, None, limits)
    except _TooLong as error:
        raise DocumentError(
            path, expected=f"at most {max_bytes} bytes", got=f"more from {host}"
        ) from error
    return buffer.getvalue()


def fetch_file(
    host: Host,
    path: str,
    signed: SignedFile,
    handle: BinaryIO,
    limits: FetchLimits,
    on_bytes: OnBytes = lambda count: None,
) -> None:
    """Complete a file with what a host sends; afterwards it has the signed bytes.

    Args:
        host: where it is.
        path: its path there.
        signed: its signed length and digest.
        handle: open for reading and writing; what is in it came before, from whichever host.
        limits: how long the host may take.
        on_bytes: called for what is in the file already as well.

    Raises:
        DigestError: another length or other bytes; what came was thrown away.
        AbsentFileError, TransportError: see `Host.open`; or it broke off too often. What came is kept.
        OSError: the disk is full.
    """
    partial = PartialFile(handle, signed.bytes, on_bytes)
    was_resumed = partial.num_bytes > 0
    _fetch_signed(host, path, partial, signed, limits)
    if partial.digest != signed.digest and was_resumed:
        # The first part may be of another host, which sent what it liked: it alone must not spoil the file.
        partial.restart()
        _fetch_signed(host, path, partial, signed, limits)
    if partial.digest != signed.digest:
        digest = partial.digest
        partial.restart()
        raise DigestError(
            path,
            expected=f"sha256 {signed.digest[:16]}...",
            got=f"sha256 {digest[:16]}... from {host}",
            remedy="This host sends other bytes than were signed. Fetch the release from another host, or ask its "
            "publisher.",
        )
    handle.flush()
    os.fsync(handle.fileno())


def _fetch_signed(
    host: Host, path: str, partial: PartialFile, signed: SignedFile, limits: FetchLimits
) -> None:
    if partial.num_bytes == signed.bytes:
        return
    try:
        _transfer(host, path, partial, signed.bytes, limits)
    except _TooLong as error:
        partial.restart()
        raise _wrong_length(path, signed.bytes, f"more from {host}") from error


def _wrong_length(path: str, num_bytes: int, got: str) -> DigestError:
    return DigestError(
        path,
        expected=f"{num_bytes} bytes, as signed",
        got=got,
        remedy="This host has another file than the one that was signed. Fetch the release from another host, or ask "
        "its publisher.",
    )


def _transfer(
    host: Host, path: str, partial: PartialFile, exact_bytes: int | None, limits: FetchLimits
) -> None:
    """Bring what is missing of a file, in as many attempts as are allowed."""
    num_attempts = 0
    while True:
        num_before = partial.num_bytes
        try:
            _attempt(host, path, partial, exact_bytes)
            return
        except InterruptedTransfer as error:
            # On a bad line a large file may break off often, as long as it gets on.
            if partial.num_bytes - num_before >= limits.progress_bytes:
                num_attempts = 0
            num_attempts += 1
            if num_attempts >= limits.max_attempts:
                raise TransportError(
                    path,
                    expected=f"the file from {host}, in {limits.max_attempts} attempts",
                    got=str(error),
                    remedy=(
                        "What has arrived is kept. Check the address and the network, then run "
                        "the same command again: it continues."
                    ),
                ) from error
        time.sleep(limits.pause_s * 2 ** (num_attempts - 1))


def _attempt(host: Host, path: str, partial: PartialFile, exact_bytes: int | None) -> None:
    with host.open(path, partial.num_bytes) as sent:
        # Before its first byte: what is too long or too short is not fetched at all.
        if exact_bytes is not None and sent.total_bytes not in (None, exact_bytes):
            raise _wrong_length(path, exact_bytes, f"{sent.total_bytes} bytes from {host}")
        _receive(sent, partial)
        expected_bytes = exact_bytes
        if expected_bytes is None:
            expected_bytes = sent.total_bytes
        if expected_bytes is not None and partial.num_bytes < expected_bytes:
            raise InterruptedTransfer(f"{partial.num_bytes} of {expected_bytes} bytes")


def _receive(sent: SentFile, partial: PartialFile) -> None:
    if sent.start != partial.num_bytes:
        partial.restart()
    for chunk in sent.chunks:
        partial.add(chunk)
