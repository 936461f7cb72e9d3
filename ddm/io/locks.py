"""File locks between processes; each ends with the process that holds it, however that ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddm.errors import BusyError


@contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Hold a folder for one process at a time, by the lock file `.<holder>.lock` in it; waits for nobody.

    Raises:
        BusyError: another process holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(_path(folder, holder), wait=False))
        except BlockingIOError as error:
            raise BusyError(
                str(folder),
                expected=f"no other {holder} at work",
                got=f"a {holder} that holds the lock",
                remedy=f"Stop the {holder} that runs on this folder, or wait for it.",
            ) from error
        yield


@contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of one file, which is made where it is missing.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keep whoever tidies a folder from removing it meanwhile; reading it is enough, also where another user owns it.

    Raises:
        OSError: the folder is gone, or is being removed.
    """
    with _folder_lock(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def unread(folder: Path) -> Iterator[bool]:
    """Tell whether nobody is `reading` a folder, and let nobody begin meanwhile."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_folder_lock(folder, fcntl.LOCK_EX))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def _folder_lock(folder: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path, holder: str) -> bool:
    """Whether a process holds the lock of `locked`; looking creates nothing and lasts microseconds."""
    try:
        descriptor = os.open(_path(folder, holder), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _path(folder: Path, holder: str) -> Path:
    return folder / f".{holder}.lock"
