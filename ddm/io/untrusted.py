"""Reads folders that somebody else filled: the one walker, which follows no link, and the one opener of a file."""

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
from ddm.io.paths import MAX_DEPTH, is_desktop_file, is_safe_name

MAX_FILES = 10_000
_CHUNK_BYTES = 1 << 20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
# A folder on the way to a file need only be passed through, not listed.
_PARENT_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Non-blocking, or a named pipe would make the open wait for ever.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What an open fails with where a link, a file or something special is in the place of another kind.
_WRONG_KIND_ERRNOS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


@dataclass(frozen=True)
class ListedFile:
    """One regular file.

    Attributes:
        path: its path, below that of the folder.
        bytes: its length when the folder was walked.
    """

    path: Path
    bytes: int


def list_files(
    folder: Path, *, max_entries: int = MAX_FILES, skip_desktop_files: bool = False
) -> Mapping[str, ListedFile]:
    """List every file below `folder` by its relative path, sorted, before reading any of them.

    Raises:
        UnsafePathError: see `walk`.
    """
    files = walk(folder, max_entries=max_entries, skip_desktop_files=skip_desktop_files)
    return dict(sorted(files))


def walk(
    folder: Path, *, max_entries: int = MAX_FILES, skip_desktop_files: bool = False
) -> Iterator[tuple[str, ListedFile]]:
    """Yield every regular file below `folder` with its relative path; the first bad entry ends the walk.

    Args:
        folder: no link; where an operator names it, see `ddm.io.files.require_folder`.
        max_entries: how many files and folders it may hold.
        skip_desktop_files: leave out files that macOS and Windows make, such as `.DS_Store`, without opening them.

    Raises:
        UnsafePathError: no folder, a link, a special file, a hidden or odd name, folders too deep, or too many entries.
        OSError: a folder that this process may not read.
    """
    num_entries = 0
    with _open_folder(folder, folder.name) as top:
        for name, info in _walk_entries(top, "", folder.name, skip_desktop_files):
            # Counted while walking: a list of a hostile folder with millions of entries would fill the memory.
            num_entries += 1
            if num_entries > max_entries:
                raise UnsafePathError(
                    folder.name,
                    expected=f"at most {max_entries} files and folders",
                    got=f"more than {max_entries}",
                )
            is_skipped = skip_desktop_files and is_desktop_file(name.rpartition("/")[2])
            if stat.S_ISREG(info.st_mode) and not is_skipped:
                yield name, ListedFile(folder / name, info.st_size)


def _walk_entries(
    folder: int, prefix: str, subject: str, skip_desktop_files: bool
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file, and every folder before it is opened."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            is_desktop = skip_desktop_files and is_desktop_file(entry.name)
            # A folder or a link of such a name is nothing that a desktop makes.
            if is_desktop and entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False)
                continue
            if not is_safe_name(entry.name) or prefix.count("/") > MAX_DEPTH:
                # The name itself, which somebody else chose, is not repeated.
                raise UnsafePathError(
                    subject,
                    expected="plain names",
                    got="a name that is hidden, unsafe or too deep",
                    remedy=(
                        "List everything in this folder, such as by `ls -AR`, and remove what its publisher did not "
                        "put there; or fetch it again into an empty folder."
                    ),
                )
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
                got = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a special file"
                raise UnsafePathError(name, expected="a regular file or a folder", got=got)
            yield name, info
            if stat.S_ISDIR(info.st_mode):
                # By descriptor and name, not by path: a folder above may be replaced by a link meanwhile.
                with _open_folder(entry.name, name, folder) as below:
                    yield from _walk_entries(below, f"{name}/", name, skip_desktop_files)


@contextmanager
def _open_folder(path: Path | str, subject: str, within: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path, _FOLDER_FLAGS, dir_fd=within)
    except FileNotFoundError as error:
        raise UnsafePathError(subject, expected="a folder", got="nothing there") from error
    except OSError as error:
        if error.errno not in _WRONG_KIND_ERRNOS:
            raise
        got = "a symbolic link or a file"
        raise UnsafePathError(subject, expected="a folder", got=got) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path, subject: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file that is not a link itself, wherever its folder is; otherwise as `open_below`."""
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
    descriptor = _open_file_below(folder, relative, subject, make)
    # What was opened is examined, not the path: between a check of the path and the open it could be exchanged.
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise UnsafePathError(subject, expected="a regular file", got="a folder or a special file")
    with os.fdopen(descriptor, "r+b" if make else "rb") as handle:
        yield handle, info.st_size


def _open_file_below(folder: Path, relative: str, subject: str, make: bool) -> int:
    *parents, name = relative.split("/")
    if ".." in (*parents, name):
        raise UnsafePathError(subject, expected="a path below its folder", got="a path with `..`")
    # One folder after another, since O_NOFOLLOW concerns only the last part of a path.
    current = -1
    try:
        current = os.open(folder, _PARENT_FLAGS)
        for parent in parents:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=current)
            below = os.open(parent, _PARENT_FLAGS | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        access = os.O_RDWR | os.O_CREAT if make else os.O_RDONLY
        # Without a name this opens the folder itself, which the caller refuses because it is not a regular file.
        return os.open(name or ".", access | _FILE_FLAGS, 0o644, dir_fd=current)
    except FileNotFoundError as error:
        raise AbsentFileError(subject, expected="a file", got="nothing there") from error
    except OSError as error:
        if make and error.errno not in _WRONG_KIND_ERRNOS:
            raise
        got = f"a file that does not open ({error.strerror})"
        raise UnsafePathError(subject, expected="a regular file", got=got) from error
    finally:
        if current >= 0:
            os.close(current)


def read_small(folder: Path, relative: str, limit: int, *, subject: str | None = None) -> bytes:
    """Read a file below `folder` that must not be longer than `limit` bytes.

    Raises:
        AbsentFileError: it is gone.
        UnsafePathError: see `open_below`.
        DocumentError: it is longer.
    """
    subject = subject or relative
    with open_below(folder, relative, subject) as (handle, size):
        # One byte more shows that the file is too long, even if it grew since its length was taken.
        data = handle.read(limit + 1)
    if len(data) > limit:
        num_bytes = max(size, len(data))
        raise DocumentError(subject, expected=f"at most {limit} bytes", got=f"{num_bytes} bytes")
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
        actual_digest = _hash_prefix(handle, length)
    if actual_digest != digest:
        expected = f"sha256 {digest[:16]}..."
        raise DigestError(relative, expected=expected, got=f"{actual_digest[:16]}...")


def _hash_prefix(handle: BinaryIO, length: int) -> str:
    """Hash the first `length` bytes; a file that grew meanwhile cannot keep the reader busy."""
    sha256 = hashlib.sha256()
    num_left = length
    while num_left > 0:
        chunk = handle.read(min(num_left, _CHUNK_BYTES))
        if not chunk:
            break
        sha256.update(chunk)
        num_left -= len(chunk)
    return sha256.hexdigest()
