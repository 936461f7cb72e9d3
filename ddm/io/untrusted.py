"""What lies in a folder somebody else filled: a walk that follows nothing, and reads that cannot be tricked."""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddm.errors import AbsentFileError, DigestError, DocumentError, MissingFileError, UnsafePathError
from ddm.io.paths import MAX_DEPTH, is_safe_name

MAX_FILES = 10_000
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One regular file.

    Attributes:
        path: where it lies.
        bytes: its length when the folder was walked.
    """

    path: Path
    bytes: int


def scan(folder: Path) -> Mapping[str, Entry]:
    """List every file below `folder` by its relative path, before reading any of them.

    Args:
        folder: named by the operator, so it may itself be a link.

    Raises:
        MissingFileError: there is no such folder.
        UnsafePathError: a link, a special file, a hidden or odd name, or too many files.
    """
    if not folder.is_dir():
        got = "something else" if folder.exists() else "nothing there"
        raise MissingFileError(str(folder), expected="a folder", got=got)
    found: dict[str, Entry] = {}
    for num_seen, (name, entry) in enumerate(_walk(folder.resolve(), "", 1), start=1):
        if num_seen > MAX_FILES:
            raise UnsafePathError(folder.name, expected=f"at most {MAX_FILES} files and folders", got="more")
        if entry:
            found[name] = entry
    return dict(sorted(found.items()))


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Entry | None]]:
    """Yield every file with its entry, and every folder, before it is opened, with none."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if not is_safe_name(entry.name) or depth > MAX_DEPTH + 1:
                raise UnsafePathError(ascii(name)[1:-1], expected="a plain name", got="a hidden, odd or deep one")
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                yield name, None
                yield from _walk(folder / entry.name, f"{name}/", depth + 1)
            elif stat.S_ISREG(info.st_mode):
                yield name, Entry(folder / entry.name, info.st_size)
            else:
                got = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a special file"
                raise UnsafePathError(name, expected="a regular file or a folder", got=got)


@contextmanager
def open_regular(path: Path, subject: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file without following a link; yield it with its length in bytes.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: it is a link or a special file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise AbsentFileError(subject, expected="a file", got="nothing there") from error
    except OSError as error:
        got = f"one that does not open ({error.strerror})"
        raise UnsafePathError(subject, expected="a regular file", got=got) from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise UnsafePathError(subject, expected="a regular file", got="a folder or a special file")
    with os.fdopen(descriptor, "rb") as handle:
        yield handle, info.st_size


def read_small(path: Path, subject: str, limit: int) -> bytes:
    """Read a file that must not be longer than `limit` bytes.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: it is a link or a special file.
        DocumentError: it is longer.
    """
    with open_regular(path, subject) as (handle, _):
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise DocumentError(subject, expected=f"at most {limit} bytes", got="more")
    return data


def check_digest(path: Path, subject: str, length: int, digest: str) -> None:
    """Check a file against what was signed, as a stream, never reading more than its signed length.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: it is a link or a special file.
        DigestError: another length or other bytes.
    """
    with open_regular(path, subject) as (handle, size):
        if size != length:
            raise DigestError(subject, expected=f"{length} bytes", got=f"{size} bytes")
        sha256, left = hashlib.sha256(), length
        while left and (chunk := handle.read(min(left, _CHUNK_BYTES))):
            sha256.update(chunk)
            left -= len(chunk)
    if sha256.hexdigest() != digest:
        raise DigestError(subject, expected=f"sha256 {digest[:16]}...", got=f"{sha256.hexdigest()[:16]}...")
