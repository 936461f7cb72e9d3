"""Who may read what a silo or an aggregator writes: its owner alone, whatever umask the program was started with.

`keep_private` comes first in both programs. From then on everything that they and their children create is private,
also what a library writes. What others must read is opened by name: `open_to_group` for the half of a site that runs as
another user, `open_to_everyone` for what is published.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddm.errors import SetupError

_UMASK = 0o077
_WRITING_OF_OTHERS = 0o022


class _Modes(NamedTuple):
    folder: int
    file: int


_PRIVATE = _Modes(folder=0o700, file=0o600)
_GROUP = _Modes(folder=0o750, file=0o640)
_PUBLIC = _Modes(folder=0o755, file=0o644)
# Write permission of the group and every permission of others.
_CLOSED_TO_OTHERS = 0o027


def keep_private() -> None:
    """Let only the owner read and write whatever this process and its children create from now on."""
    os.umask(_UMASK)


def keep_writing_private() -> None:
    """Let only the owner write what this process and its children create from now on; who reads it stays as it was."""
    # Anybody who could write to a reader's memory or to the folder above it could put another memory there.
    os.umask(os.umask(_UMASK) | _WRITING_OF_OTHERS)


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner enters, or close one that is there."""
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE.folder)
    _set_mode(folder, _PRIVATE)


def readable_folder(folder: Path) -> None:
    """Make a folder that every user may enter and list, with what is missing above it; one that is there stays."""
    missing = []
    for part in (folder, *folder.parents):
        if part.exists():
            break
        missing.append(part)
    for part in reversed(missing):
        part.mkdir(exist_ok=True)
        _set_mode(part, _PUBLIC)


def group_folder(folder: Path, like: Path | None = None) -> None:
    """Make a folder that its owner writes and a group reads, or give these permissions to one that is there.

    Args:
        folder: the folder alone, without what is in it.
        like: the folder whose group may read it; `folder`'s own group when None.

    Raises:
        SetupError: this user is not a member of that group.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE.folder)
    # The group first: the folder is never open to a group that is not the one meant.
    _set_group(folder, like or folder)
    _set_mode(folder, _GROUP)


def close_to_others(folder: Path) -> None:
    """Remove every permission of others, and the group's to write; the rest stays as an operator set it."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _CLOSED_TO_OTHERS:
        folder.chmod(mode & ~_CLOSED_TO_OTHERS)


def open_to_group(path: Path, like: Path) -> None:
    """Let the group of the folder `like` read a file, or a folder and all below it; others get nothing.

    Raises:
        SetupError: this user is not a member of that group.
    """
    for part in _tree(path):
        _set_group(part, like)
        _set_mode(part, _GROUP)


def open_to_everyone(path: Path) -> None:
    """Let every user read a file, or a folder and all below it; only the owner writes."""
    for part in _tree(path):
        _set_mode(part, _PUBLIC)


def _tree(path: Path) -> Iterator[Path]:
    """Yield all files and folders below a path, each folder after what is in it, and links nowhere."""
    if path.is_symlink():
        return
    for root, _, names in os.walk(path, topdown=False):
        files = [Path(root, name) for name in names]
        # chmod and chown would change what a link points to.
        yield from (file for file in files if not file.is_symlink())
        yield Path(root)
    if not path.is_dir():
        yield path


def _set_group(path: Path, like: Path) -> None:
    group = like.stat().st_gid
    if path.stat().st_gid == group:
        return
    try:
        os.chown(path, -1, group)
    except PermissionError as error:
        raise SetupError(
            str(path),
            expected=f"a user in group {group}, the group of {like}",
            got=f"user {os.geteuid()}, who is not in it",
            remedy="Add the user to the group (usermod --append --groups), then start the program again.",
        ) from error


def _set_mode(path: Path, modes: _Modes) -> None:
    """Set the permissions; a folder keeps its set-group-ID bit, by which its contents get its group."""
    before = stat.S_IMODE(path.stat().st_mode)
    after = modes.file
    if path.is_dir():
        after = modes.folder | before & stat.S_ISGID
    # chmod fails for a folder of another user, whose permissions may be right already.
    if before != after:
        path.chmod(after)
