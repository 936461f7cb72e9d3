"""What a host is: it sends the files of a release, from any byte on. A folder of this machine is one as well."""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddm.errors import AbsentFileError, UnsafePathError

CHUNK_BYTES = 1 << 18


class InterruptedTransfer(Exception):
    """A file did not come to its end, for a reason that may pass: the transfer may be tried again from where it is."""


@dataclass(frozen=True)
class FetchLimits:
    """How long a host may take. What it may send is bounded by the signed lengths.

    Attributes:
        window_s: seconds in each of which at least `window_bytes` must come, until a file is complete.
        window_bytes: see `window_s`.
        max_attempts: how often in a row a transfer may break off before `progress_bytes` have come.
        progress_bytes: see `max_attempts`.
        pause_s: seconds before the second attempt; each later pause is twice as long.
    """

    window_s: float = 30.0
    window_bytes: int = 1 << 15
    max_attempts: int = 4
    progress_bytes: int = 1 << 20
    pause_s: float = 1.0


@dataclass(frozen=True)
class SentFile:
    """A file as a host sends it; nothing in it is trusted.

    Attributes:
        start: the number of the first byte that comes; 0 from a host that cannot begin elsewhere.
        total_bytes: the length of the whole file, as the host states it; None where it does not.
        chunks: its bytes from `start` on, in pieces. Raises `InterruptedTransfer`.
    """

    start: int
    total_bytes: int | None
    chunks: Iterator[bytes]


class Host(Protocol):
    """Where a release is."""

    def open(self, path: str, start: int) -> AbstractContextManager[SentFile]:
        """Open a file of the release.

        Args:
            path: relative to the release's folder, of plain names (`ddm.io.paths.check_path`).
            start: the number of the first byte that is wanted.

        Raises:
            AbsentFileError: the host has no such file.
            TransportError: it refuses, or sends the reader elsewhere.
            InterruptedTransfer: it does not answer, perhaps for a while only.
        """
        ...

    def __str__(self) -> str:
        """What to call it in messages."""
        ...


@dataclass(frozen=True)
class FolderHost:
    """A folder with a release in it, among other files and behind links, such as those of the Hub's own cache."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    @contextmanager
    def open(self, path: str, start: int) -> Iterator[SentFile]:
        """See `Host`; links are followed, as the bytes are compared with what is signed."""
        try:
            # Non-blocking, or a named pipe would make the open wait for ever.
            descriptor = os.open(self.folder / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AbsentFileError(
                path,
                expected=f"a file of the release in {self}",
                got="no such file",
                remedy="Name the folder that holds metadata/ and targets/.",
            ) from error
        with os.fdopen(descriptor, "rb") as handle:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                got = "a folder or a special file"
                raise UnsafePathError(path, expected="a regular file", got=got)
            handle.seek(start)
            yield SentFile(start, info.st_size, iter(lambda: handle.read(CHUNK_BYTES), b""))
