"""Folders in which only one user can write: makes them, and refuses all others.

Anybody who can write in a folder can put a link in the place of a file, and anybody who can write above it can put
another folder in its place. So in a place that several users share every folder on the way counts, as for the keys of
ssh (`StrictModes`). Root is trusted.
"""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ddm.errors import SetupError, UnsafePathError

_ROOT = 0
_PRIVATE_MODE = 0o700
_OTHERS = 0o077
_MAX_LINKS = 40


def make_own_path(folder: Path) -> None:
    """Make a folder as `make_own_folder` does, with what is missing above it, where nobody else writes above it either.

    Raises:
        UnsafePathError: another user could put something into it, or another folder in its place.
    """
    folder = folder.absolute()
    # From the top, each checked before the next is made in it: `mkdir -p` would follow a stranger's link and make
    # folders where that leads.
    for part in reversed(folder.parents):
        _make(part)
        danger = find_danger(part, os.geteuid())
        if danger is not None:
            _refuse(folder, danger)
    make_own_folder(folder)


def make_own_folder(folder: Path) -> None:
    """Make a folder that only this user enters, or close one of this user's; those above it are not looked at.

    Raises:
        UnsafePathError: it is a link, another user's, or another user could put something into it.
    """
    _make(folder)
    require_own_folder(folder)
    if folder.stat().st_mode & _OTHERS:
        folder.chmod(_PRIVATE_MODE)


def require_own_folder(folder: Path) -> None:
    """Refuse a folder in which another user can write; those above it are not checked.

    Raises:
        UnsafePathError: it is a link, another user's, or another user could put something into it.
    """
    info = folder.lstat()
    if stat.S_ISLNK(info.st_mode):
        _refuse(folder, "a link")
    elif not stat.S_ISDIR(info.st_mode):
        _refuse(folder, "a file")
    elif info.st_uid != os.geteuid():
        _refuse(folder, f"a folder of user {info.st_uid}")
    elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(folder, _open_mode(info))


def require_own_path(folder: Path) -> None:
    """Refuse a folder into which another user could put something, or in whose place another folder.

    Raises:
        UnsafePathError: names who could.
        OSError: it is not there.
    """
    danger = find_danger(folder.absolute(), os.geteuid())
    if danger is not None:
        _refuse(folder, danger)


def require_owner(folder: Path, program: str) -> None:
    """Refuse to write as another user than the folder's owner, who could not read the files.

    Args:
        folder: that of a service.
        program: named in the remedy.

    Raises:
        SetupError: names both users.
    """
    owner = folder.stat().st_uid
    user = os.geteuid()
    if owner == user:
        return
    raise SetupError(
        str(folder),
        expected=f"a command of {_describe_user(owner)}, who owns the folder",
        got=f"one of {_describe_user(user)}, whose files the owner could not read",
        remedy=f"Run the command as the owner; root can do so with: runuser -u OWNER -- {program} ...",
    )


def _describe_user(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


def find_danger(folder: Path, user: int) -> str | None:
    """Return who else could write at a path of this user, or above it; None if nobody could.

    Args:
        folder: an absolute path, which may lead over links.
        user: the number of the user whose place it is.

    Raises:
        OSError: a part of the path is not there, or may not be entered.
    """
    for part in _steps(folder):
        danger = _danger_of(part.lstat(), user)
        if danger is not None:
            return f"{part}: {danger}"
    return None


def _make(folder: Path) -> None:
    if not os.path.lexists(folder):
        # Somebody may make it meanwhile, and is refused.
        with suppress(FileExistsError):
            folder.mkdir(mode=_PRIVATE_MODE)


def _refuse(folder: Path, danger: str) -> NoReturn:
    raise UnsafePathError(
        str(folder),
        expected="a folder in which only this user can write",
        got=danger,
        remedy="Take the folder that is named from others (chown, chmod go-w), or use another place. Remove a folder "
        "in which others could write: what is in it may be theirs.",
    )


def _steps(path: Path) -> Iterator[Path]:
    """Yield every folder and link that is passed on the way to a path, and the path itself."""
    names_left = list(reversed(path.parts[1:]))
    current = Path(path.anchor)
    num_links = 0
    yield current
    while names_left:
        name = names_left.pop()
        if name == "..":
            # No link is left in the path so far, so that this is the folder above.
            current = current.parent
            continue
        step = current / name
        yield step
        if not step.is_symlink():
            current = step
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise UnsafePathError(path.name, expected="a folder", got="links in a circle")
        target = step.readlink()
        names = target.parts
        if target.is_absolute():
            current = Path(target.anchor)
            names = names[1:]
        names_left += reversed(names)


def _danger_of(info: os.stat_result, user: int) -> str | None:
    """Return how others than a user and root can change what a folder on the way contains, or where a link leads."""
    if info.st_uid not in (_ROOT, user):
        return f"it belongs to user {info.st_uid}"
    # Nobody changes a link but its owner, whatever its mode says. In a sticky folder, such as /tmp, nobody but their
    # owner renames or removes entries, and each entry is looked at by itself.
    if stat.S_ISLNK(info.st_mode) or info.st_mode & stat.S_ISVTX:
        return None
    is_open = info.st_mode & stat.S_IWOTH
    is_open_to_group = info.st_mode & stat.S_IWGRP and not _is_private_group(info.st_gid, user)
    if is_open or is_open_to_group:
        return _open_mode(info)
    return None


def _open_mode(info: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(info.st_mode):03o}, so that others may write there"


def _is_private_group(group: int, user: int) -> bool:
    """Whether a group is a user's own, which many systems give everybody, with a umask that lets it write."""
    try:
        account = pwd.getpwuid(user)
        members = grp.getgrgid(group)
    except KeyError:
        return False
    is_own = account.pw_gid == group and members.gr_name == account.pw_name
    return is_own and set(members.gr_mem) <= {account.pw_name}
