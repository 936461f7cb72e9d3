"""File locks between processes; each ends with the process that holds it, however that ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddm.errors import BusyError


@contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Lock a folder for one process at a time, by the lock file `.<holder>.lock` in it; never waits.

    Raises:
        BusyError: another process holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(_lock_path(folder, holder), wait=False))
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
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    # flock belongs to the open file, which a child must not inherit: it would keep the lock after we end.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        # The lock file stays: if it were removed, two processes could each lock a different file of this name.
        os.close(descriptor)


@contextmanager
def hold_for_reading(folder: Path) -> Iterator[None]:
    """Keep a process that cleans up (`lock_if_unread`) from removing a folder meanwhile.

    Permission to read the folder is enough, also where another user owns it.

    Raises:
        OSError: the folder is gone, or is being removed.
    """
    with _folder_lock(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def lock_if_unread(folder: Path) -> Iterator[bool]:
    """Yield whether nobody reads a folder (`hold_for_reading`), and let nobody begin meanwhile."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_folder_lock(folder, fcntl.LOCK_EX))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def _folder_lock(folder: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path, holder: str) -> bool:
    """Whether a process holds the lock of `locked`; looking creates nothing and lasts microseconds."""
    try:
        descriptor = os.open(_lock_path(folder, holder), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two processes that look at once do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_path(folder: Path, holder: str) -> Path:
    return folder / f".{holder}.lock"
