"""Looks, before long work begins, whether its folders can be written and the disk has room for what it will write."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ddm.errors import DiskError

_TRIAL_BYTES = 4096


def check_writable(folders: Iterable[Path]) -> None:
    """Write a small file without a name into every folder: permissions alone do not tell of a read-only disk.

    Raises:
        DiskError: names the first folder that refuses, and why.
    """
    for folder in folders:
        try:
            descriptor = _opened(folder)
            try:
                os.write(descriptor, bytes(_TRIAL_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DiskError(
                str(folder),
                expected="a folder that this user can write to",
                got=error.strerror or type(error).__name__,
            ) from error


def _opened(folder: Path) -> int:
    """Open a new file that a crash cannot leave behind; where the file system knows none, one that loses its name."""
    with suppress(OSError, AttributeError):
        return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    trial = folder / ".trial.part"
    descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    trial.unlink(missing_ok=True)
    return descriptor


def require_room(needed_bytes: Mapping[Path, int], purpose: str) -> None:
    """Compare what will be written with the free space; folders on one file system share it.

    Args:
        needed_bytes: how much is to come, by an existing folder.
        purpose: what it is for, after "for".

    Raises:
        DiskError: names folder, needed and free bytes.
    """
    by_disk: dict[int, list[Path]] = defaultdict(list)
    for folder in needed_bytes:
        by_disk[folder.stat().st_dev].append(folder)
    for folders in by_disk.values():
        needed, free = sum(needed_bytes[folder] for folder in folders), free_bytes(folders[0])
        if needed > free:
            subject = " and ".join(map(str, folders))
            expected = f"at least {needed} bytes free on the disk for {purpose}"
            raise DiskError(subject, expected=expected, got=f"{free} bytes free")


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write to the file system of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
