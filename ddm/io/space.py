"""Checks, before long work begins, that its folders can be written and that the disks have enough free space."""

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ddm.errors import DiskError

_TRIAL_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_writable(folders: Iterable[Path]) -> None:
    """Write a small file without a name into every folder: permissions alone do not show that a disk is read-only.

    Raises:
        DiskError: names the first folder that refuses, and why.
    """
    for folder in folders:
        try:
            descriptor = _open_unnamed_file(folder)
            try:
                os.write(descriptor, bytes(_TRIAL_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _FULL:
                raise DiskError(
                    str(folder),
                    expected=f"room for {_TRIAL_BYTES} bytes",
                    got=os.strerror(error.errno),
                ) from error
            raise DiskError(
                str(folder),
                expected="a folder that this user can write to",
                got=error.strerror or type(error).__name__,
                remedy=(
                    "Let this user write to the folder (chown, chmod u+w), or name another one; then run the "
                    "command again."
                ),
            ) from error


def _open_unnamed_file(folder: Path) -> int:
    """Open a new file that a crash cannot leave behind; on other file systems, one whose name is removed at once."""
    with suppress(OSError, AttributeError):
        return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    trial = folder / ".trial.part"
    descriptor = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    trial.unlink(missing_ok=True)
    return descriptor


def require_free_space(needed_bytes: Mapping[Path, int], purpose: str) -> None:
    """Compare what will be written with the free space; folders on one file system share it.

    Args:
        needed_bytes: how much is to come, by an existing folder.
        purpose: what it is for, after "for".

    Raises:
        DiskError: names folder, needed and free bytes.
    """
    # Two folders that each fit on a disk may not fit on it together.
    by_disk: dict[int, list[Path]] = defaultdict(list)
    for folder in needed_bytes:
        by_disk[folder.stat().st_dev].append(folder)
    for folders in by_disk.values():
        num_needed = sum(needed_bytes[folder] for folder in folders)
        num_free = free_bytes(folders[0])
        if num_needed > num_free:
            subject = " and ".join(map(str, folders))
            expected = f"at least {num_needed} bytes free on the disk for {purpose}"
            raise DiskError(subject, expected=expected, got=f"{num_free} bytes free")


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write to the file system of a folder."""
    file_system = os.statvfs(folder)
    # Not f_bfree, which counts what only root may write.
    return file_system.f_bavail * file_system.f_frsize
