"""Safe names: one spelling on every file system, and no way out of the folder that a path is relative to."""

import re

from ddm.errors import UnsafePathError

MAX_PATH_LENGTH = 512
MAX_DEPTH = 8

# No leading dot, no blank, no backslash, no colon, nothing outside ASCII: one spelling on every file system.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

_DESKTOP_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")


def is_safe_name(name: str) -> bool:
    """Whether `name` can be one part of a path: not hidden, not `..`, no separator, plain ASCII."""
    return _NAME.fullmatch(name) is not None


def is_desktop_file(name: str) -> bool:
    """Whether `name` is of a file that macOS or Windows put into every folder that a person looks at."""
    # `._NAME` holds the attributes of NAME where macOS copies it to a disk that cannot.
    return name in _DESKTOP_FILES or name.startswith("._")


def check_path(path: str, subject: str) -> None:
    """Refuse a listed path that could leave its folder or mean two things.

    Args:
        path: as listed, relative, parts separated by ``/``.
        subject: the file that lists it.

    Raises:
        UnsafePathError: absolute, `..`, hidden, backslash, too long, too deep, or not plain ASCII.
    """
    parts = path.split("/")
    if len(path) > MAX_PATH_LENGTH or len(parts) > MAX_DEPTH or not all(map(is_safe_name, parts)):
        raise UnsafePathError(subject, expected="plain relative paths", got=ascii(path[:120]))
