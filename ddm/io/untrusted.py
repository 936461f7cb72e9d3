"""Folders that somebody else filled: the one walker, which follows no link, and the one opener of a file in them."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddm.errors import AbsentFileError, DigestError, DocumentError, UnsafePathError
from ddm.io.paths import MAX_DEPTH, is_safe_name

MAX_FILES = 10_000
_CHUNK_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A folder on the way to a file need only be passed through, not listed.
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_OTHER_KINDS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


@dataclass(frozen=True)
class Entry:
    """One regular file.

    Attributes:
        path: where it lies.
        bytes: its length when the folder was walked.
    """

    path: Path
    bytes: int


def scan(folder: Path, *, most: int = MAX_FILES) -> Mapping[str, Entry]:
    """List every file below `folder` by its relative path, sorted, before reading any of them.

    Raises:
        UnsafePathError: see `walk`.
    """
    return dict(sorted(walk(folder, most=most)))


def walk(folder: Path, *, most: int = MAX_FILES) -> Iterator[tuple[str, Entry]]:
    """Yield every regular file below `folder` with its relative path; a hostile folder is left at the first bad entry.

    Args:
        folder: no link; where an operator names it, see `ddm.io.files.require_folder`.
        most: how many files and folders it may hold.

    Raises:
        UnsafePathError: no folder, a link, a special file, a hidden or odd name, folders too deep, or too many entries.
        OSError: a folder that this process may not read.
    """
    num_seen = 0
    with _opened_folder(folder, folder.name) as top:
        for name, info in _walk(top, "", folder.name):
            num_seen += 1
            if num_seen > most:
                raise UnsafePathError(
                    folder.name,
                    expected=f"at most {most} files and folders",
                    got=f"more than {most}",
                )
            if stat.S_ISREG(info.st_mode):
                yield name, Entry(folder / name, info.st_size)


def _walk(folder: int, prefix: str, subject: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file, and every folder before it is opened."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if not is_safe_name(entry.name) or prefix.count("/") > MAX_DEPTH:
                # The name itself, which somebody else chose, is not repeated.
                raise UnsafePathError(
                    subject, expected="plain names", got="a name that is hidden, unsafe or too deep"
                )
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
                got = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a special file"
                raise UnsafePathError(name, expected="a regular file or a folder", got=got)
            yield name, info
            if stat.S_ISDIR(info.st_mode):
                with _opened_folder(entry.name, name, folder) as below:
                    yield from _walk(below, f"{name}/", name)


@contextmanager
def _opened_folder(path: Path | str, subject: str, within: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path, _FOLDER | os.O_NOFOLLOW, dir_fd=within)
    except FileNotFoundError as error:
        raise UnsafePathError(subject, expected="a folder", got="nothing there") from error
    except OSError as error:
        if error.errno not in _OTHER_KINDS:
            raise
        raise UnsafePathError(
            subject, expected="a folder", got="a symbolic link or a file"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path, subject: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file that is no link itself, wherever its folder is; otherwise as `open_below`."""
    with open_below(path.parent, path.name, subject) as opened:
        yield opened


@contextmanager
def open_below(
    folder: Path, relative: str, subject: str, *, make: bool = False
) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file without following a link in any step below `folder`; yield it with its length in bytes.

    Args:
        folder: where to start; it may be a link itself.
        relative: a path below it, parts separated by ``/``.
        subject: what to call the file in an error.
        make: open it for writing too; what is missing of file and folders is made.

    Raises:
        AbsentFileError: it is not there.
        UnsafePathError: it, or a folder on the way, is a link or something special; or a part of its path is ``..``.
        OSError: it cannot be made, because the disk is full perhaps.
    """
    descriptor = _descriptor_below(folder, relative, subject, make)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise UnsafePathError(subject, expected="a regular file", got="a folder or a special file")
    with os.fdopen(descriptor, "r+b" if make else "rb") as handle:
        yield handle, info.st_size


def _descriptor_below(folder: Path, relative: str, subject: str, make: bool) -> int:
    *parents, name = relative.split("/")
    if ".." in (*parents, name):
        raise UnsafePathError(subject, expected="a path below its folder", got="a path with `..`")
    at = -1
    try:
        at = os.open(folder, _STEP)
        for parent in parents:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=at)
            below = os.open(parent, _STEP | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        # Non-blocking, or a named pipe would hang the open.
        flags = (
            (os.O_RDWR | os.O_CREAT if make else os.O_RDONLY)
            | os.O_NOFOLLOW
            | os.O_NONBLOCK
            | os.O_CLOEXEC
        )
        return os.open(name or ".", flags, 0o644, dir_fd=at)
    except FileNotFoundError as error:
        raise AbsentFileError(subject, expected="a file", got="nothing there") from error
    except OSError as error:
        if make and error.errno not in _OTHER_KINDS:
            raise
        got = f"a file that does not open ({error.strerror})"
        raise UnsafePathError(subject, expected="a regular file", got=got) from error
    finally:
        if at >= 0:
            os.close(at)


def read_small(folder: Path, relative: str, limit: int, *, subject: str | None = None) -> bytes:
    """Read a file below `folder` that must not be longer than `limit` bytes.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: see `open_below`.
        DocumentError: it is longer.
    """
    subject = subject or relative
    with open_below(folder, relative, subject) as (handle, size):
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise DocumentError(
            subject, expected=f"at most {limit} bytes", got=f"{max(size, len(data))} bytes"
        )
    return data


def check_digest(folder: Path, relative: str, length: int, digest: str) -> None:
    """Check a file below `folder` against what was signed, as a stream, never reading more than its signed length.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: see `open_below`.
        DigestError: another length or other bytes.
    """
    with open_below(folder, relative, relative) as (handle, size):
        if size != length:
            raise DigestError(relative, expected=f"{length} bytes", got=f"{size} bytes")
        sha256, left = hashlib.sha256(), length
        while left and (chunk := handle.read(min(left, _CHUNK_BYTES))):
            sha256.update(chunk)
            left -= len(chunk)
    if sha256.hexdigest() != digest:
        raise DigestError(
            relative, expected=f"sha256 {digest[:16]}...", got=f"{sha256.hexdigest()[:16]}..."
        )
