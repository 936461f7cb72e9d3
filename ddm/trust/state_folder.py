"""The folder in which a reader remembers what it has verified: its place, and its lock.

A state folder has one folder for each pinned root, named by the root's fingerprint. Three stores keep a file in it:
`ddm.trust.version_store`, `ddm.trust.silo_key_store` and `ddm.trust.log.checkpoint_store`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.errors import DiskError, SetupError
from ddm.io.files import DISK_FULL_ERRNOS
from ddm.io.locks import lock_file
from ddm.io.own_folder import make_own_folder, require_own_folder


def default_state_folder() -> Path:
    """Return the default folder: below ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification says that a relative path in the variable is to be ignored.
    if not base.is_absolute():
        base = Path.home() / ".local" / "state"
    return base / "archipelago"


@contextmanager
def locked_state_folder(folder: Path, consequence: str) -> Iterator[None]:
    """Hold the lock of one root's folder while a store is written; the folder is created if it is missing.

    Two verifications at the same time are not a mistake, so that each waits for the other.

    Args:
        folder: that of `ddm.trust.version_store.VersionStore`.
        consequence: what cannot be noticed without this store, for the remedy.

    Raises:
        UnsafePathError: another user could change what is remembered.
        DiskError: the disk is full.
        SetupError: the folder cannot be written for another reason.
    """
    try:
        # For this user alone: anybody who can write here, or rename this folder, can make a rollback pass. Another user
        # may have made either of the two before.
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_own_folder(folder.parent)
        make_own_folder(folder)
        with lock_file(folder / ".lock"):
            yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise DiskError(
                str(folder),
                expected="room on the disk",
                got=str(error.strerror),
                remedy="Free disk space, or name another folder with --state; "
                f"without this memory {consequence}.",
            ) from error
        raise SetupError(
            str(folder),
            expected="a writable folder",
            got=str(error.strerror),
            remedy=f"Name another folder with --state; without this memory {consequence}.",
        ) from error
