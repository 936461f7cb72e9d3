"""Files and folders of our own: written whole or not at all, and read with a bound."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ddm.errors import (
    AbsentFileError,
    ArchipelagoError,
    DataError,
    DocumentError,
    FormatError,
    MissingFileError,
)
from ddm.io.modes import open_to_everyone, open_to_group, readable_folder
from ddm.io.untrusted import read_small

# What the operating system reports of a disk without free space, of a quota, and of a file that is too large.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEW_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_atomic(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    overwrite: bool = True,
    is_durable: bool = True,
) -> None:
    """Write `data` in one piece; see `replacing`.

    Raises:
        FileExistsError: `path` exists, and `overwrite` is false.
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    with replacing(path, mode=mode, overwrite=overwrite, is_durable=is_durable) as handle:
        handle.write(data)


def write_for_group(path: Path, data: bytes) -> None:
    """Write `data` in one piece, readable by the group of the folder that holds it.

    Raises:
        SetupError: this user is not a member of that group.
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    _write_opened(path, data, lambda part: open_to_group(part, path.parent))


def write_for_everyone(path: Path, data: bytes) -> None:
    """Write `data` in one piece, readable by every user, and so are the folders that are missing above it.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    readable_folder(path.parent)
    _write_opened(path, data, open_to_everyone)


def _write_opened(path: Path, data: bytes, open_to_readers: Callable[[Path], None]) -> None:
    part = path.with_name(f".{path.name}.{threading.get_native_id()}.new")
    try:
        # Readers get access before the file gets its name, so that nobody finds one that they may not read.
        write_atomic(part, data, mode=0o600)
        open_to_readers(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def replacing(
    path: Path, *, mode: int = 0o644, overwrite: bool = True, is_durable: bool = True
) -> Iterator[BinaryIO]:
    """Yield a file to write and to read that becomes `path` when the block ends without an error.

    After a crash `path` is either the old file or the new one, whole and durable.

    Args:
        path: where to; missing folders are made.
        mode: its permissions, from the first byte on.
        overwrite: whether it may take the place of another file.
        is_durable: whether it must survive a crash of the machine, which costs a write to the disk.

    Raises:
        FileExistsError: `path` exists, and `overwrite` is false.
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The thread's number, because two threads of a process may write the same file.
    part = path.with_name(f".{path.name}.{threading.get_native_id()}.part")
    # A process that was killed may have left its part under the same number.
    part.unlink(missing_ok=True)
    try:
        descriptor = os.open(part, _NEW_FILE_FLAGS, mode)
        with name_full_disk(path), os.fdopen(descriptor, "w+b") as handle:
            yield handle
            handle.flush()
            if is_durable:
                # Before the rename, or a crash could leave the name on a file without its bytes.
                os.fsync(handle.fileno())
        if overwrite:
            part.replace(path)
        else:
            os.link(part, path)  # unlike a rename, fails where a file exists already
    finally:
        part.unlink(missing_ok=True)
    if is_durable:
        sync_folder(path.parent)


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Name `path` in the error of a full disk: of a file that is open already, the system does not say which it is."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, to be filled and passed to `move_into_place`; otherwise it is removed."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def move_into_place(source: Path, target: Path) -> None:
    """Rename a finished file or folder, durably: first all that is in it, then the folders that it leaves and enters.

    Raises:
        OSError: `target` is a folder that is not empty.
    """
    sync_tree(source)
    source.replace(target)
    for folder in {target.parent, source.parent}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the folder's own entries durable."""
    _sync(folder, os.O_DIRECTORY)


def sync_tree(path: Path) -> None:
    """Make a file, or all files and folders below a folder, durable; little work where they are durable already."""
    if not path.is_dir():
        _sync(path, os.O_NOFOLLOW)
    for root, _, names in os.walk(path):
        for name in names:
            _sync(Path(root, name), os.O_NOFOLLOW)
        sync_folder(Path(root))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        with name_full_disk(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, limit: int, *, subject: str | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        MissingFileError: there is no such file.
        UnsafePathError: it is a symbolic link or a special file.
        FormatError: it is longer than `limit`.
    """
    try:
        return read_small(path.parent, path.name, limit, subject=subject)
    except AbsentFileError as error:
        raise MissingFileError(str(path), expected=error.expected, got=error.got) from error
    except DocumentError as error:
        raise FormatError(error.subject, expected=error.expected, got=error.got) from error


FileIdentity = tuple[int, int, int]
"""Inode, time of change and size: two files of one name with the same identity are one and the same."""


def file_identity(path: Path) -> FileIdentity | None:
    """Return the identity of a file of our own, by which a change is noticed without reading it; None for no file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def link_or_copy(source: Path, destination: Path) -> None:
    """Put `source` at `destination` by hard link, or by a durable copy where the file system has none."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        # A copy takes the place of whatever has the name, and never follows a link there.
        with source.open("rb") as reader, replacing(destination) as writer:
            shutil.copyfileobj(reader, writer)


def require_file(path: Path, what: str, remedy: str | None = None) -> Path:
    """Return `path` if it is a file.

    Raises:
        MissingFileError: it is not.
    """
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise MissingFileError(str(path), expected=what, got=got, remedy=remedy)
    return path


def require_folder(path: Path, what: str) -> Path:
    """Return the real path of a folder that an operator named, maybe by a link.

    Raises:
        MissingFileError: there is none.
    """
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise MissingFileError(str(path), expected=what, got=got)
    return path.resolve()


@contextmanager
def decoding(expected: str) -> Iterator[None]:
    """Turn whatever a decoder may raise into a `DataError` without its text, which may quote what it read.

    Args:
        expected: the kind of file.
    """
    try:
        yield
    except ArchipelagoError:
        raise
    except Exception as error:
        # Decoders of damaged files raise anything, such as IndexError or zlib.error.
        got = f"a file that does not read as one ({type(error).__name__})"
        raise DataError(
            "data file",
            expected=expected,
            got=got,
            remedy="Copy the file again from where it came, or save it again in the program that made it.",
        ) from error
