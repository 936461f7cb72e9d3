"""Holds the folder of a reader's memory while it is written: one process at a time, in a folder for this user alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import DiskError, SetupError
from ddm.io.files import DISK_FULL_ERRNOS
from ddm.io.locks import lock_file


@contextmanager
def remembering(folder: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock of a memory's folder, which is made where it is missing.

    Two verifications at once are no mistake: each waits for the other.

    Args:
        folder: that of `ddm.trust.state.Memory`.
        otherwise: what cannot be noticed without this memory.

    Raises:
        DiskError: the disk is full.
        SetupError: the folder cannot be written for another reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock_file(folder / ".lock"):
            yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            remedy = f"Free disk space, or name another folder with --state; without this memory {otherwise}."
            raise DiskError(
                str(folder), expected="room on the disk", got=str(error.strerror), remedy=remedy
            ) from error
        remedy = f"Name another folder with --state; without this memory {otherwise}."
        expected, got = "a writable folder", str(error.strerror)
        raise SetupError(str(folder), expected=expected, got=got, remedy=remedy) from error
