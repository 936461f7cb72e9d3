"""Holds the folder of a reader's memory while it is written: one process at a time, in a folder for this user alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import SetupError
from ddm.io.locks import lock_file


@contextmanager
def remembering(folder: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock of a memory's folder, which is made where it is missing.

    Two verifications at once are no mistake: each waits for the other.

    Args:
        folder: that of `ddm.trust.state.Memory`.
        otherwise: what cannot be noticed without this memory.

    Raises:
        SetupError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock_file(folder / ".lock"):
            yield
    except OSError as error:
        remedy = f"Name another folder with --state; without this memory {otherwise}."
        expected, got = "a writable folder", str(error.strerror)
        raise SetupError(str(folder), expected=expected, got=got, remedy=remedy) from error
