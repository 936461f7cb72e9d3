"""Where tests write, and what they make there once for all the processes of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ddm.io.locks import lock_file

MEMORY = Path("/dev/shm")
# Four times what a run of all tests leaves behind.
_NEEDED_BYTES = 4 * 1024**3


def has_room_for_tests(folder: Path) -> bool:
    """Whether tests can write in a folder, and execute what they write there."""
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return False
    return (
        os.access(folder, os.W_OK)
        and not flags & os.ST_NOEXEC
        and shutil.disk_usage(folder).free >= _NEEDED_BYTES
    )


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Fill a folder that the processes of a run share; whoever comes while another fills it waits for that one.

    Args:
        folder: what an earlier call made is there, or nothing.
        make: makes and fills the folder that it is given.

    Returns:
        The folder. Nobody changes what is in it.
    """
    complete = folder.with_name(f"{folder.name}-is-complete")
    with lock_file(folder.with_name(f"{folder.name}-lock")):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            complete.touch()
    return folder
