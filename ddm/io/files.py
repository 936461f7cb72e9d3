"""How files are written and read safely: atomically, bounded, one process at a time."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ddm.errors import BusyError, FormatError, MissingFileError, UnsafePathError
from ddm.io.paths import MAX_DEPTH, is_safe_name

_COPY_BYTES = 1 << 20


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` so that after a crash the file is either the old one or the new one, whole.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's own entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file below `folder`, and the entries of every folder, durable; what is so already costs little."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root, name), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(root))


def read_bounded(path: Path, limit: int, *, subject: str | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        MissingFileError: there is no such file.
        UnsafePathError: it is a symbolic link or a special file.
        FormatError: it is longer than `limit`.
    """
    subject = subject or path.name
    with _open_regular(path, subject) as handle:
        data = handle.read(limit + 1)
    if len(data) > limit:
        raise FormatError(subject, expected=f"at most {limit} bytes", got="more")
    return data


def _open_regular(path: Path, subject: str) -> BinaryIO:
    """Open a file that somebody else may have put there: no link is followed, no named pipe is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise MissingFileError(str(path), expected="a file", got="nothing there") from error
    except OSError as error:
        raise UnsafePathError(subject, expected="a regular file", got="a link or an unreadable file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePathError(subject, expected="a regular file", got="something else")
    return os.fdopen(descriptor, "rb")


def list_files(folder: Path, *, most: int = 10_000) -> dict[str, Path]:
    """List every regular file below `folder` by its relative path, sorted; links and special files are refused.

    A hostile folder is left at the first entry beyond `most`, however many follow.

    Raises:
        UnsafePathError: no folder, a symbolic link, a special file, an odd name, or more than `most` files and folders.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise UnsafePathError(folder.name, expected="a folder", got="a link, a file or nothing")
    found: dict[str, Path] = {}
    folders, left = [folder], most
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path, left = Path(entry.path), left - 1
                if left < 0:
                    raise UnsafePathError(folder.name, expected=f"at most {most} files and folders", got="more")
                relative = path.relative_to(folder)
                if not is_safe_name(entry.name) or len(relative.parts) > MAX_DEPTH + 1:
                    raise UnsafePathError(folder.name, expected="plain names", got="a hidden, odd or deep one")
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    found[relative.as_posix()] = path
                else:
                    name = relative.as_posix()
                    raise UnsafePathError(name, expected="a regular file or a folder", got="a link or a special file")
    return dict(sorted(found.items()))


def link_or_copy(source: Path, destination: Path) -> None:
    """Put `source` at `destination` by hard link, or by a durable copy where the file system has none."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
        with destination.open("rb") as handle:
            os.fsync(handle.fileno())


def require_file(path: Path, what: str, remedy: str | None = None) -> Path:
    """Return `path` if it is a file.

    Raises:
        MissingFileError: it is not.
    """
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise MissingFileError(str(path), expected=what, got=got, remedy=remedy)
    return path


@contextmanager
def locked(folder: Path, holder: str) -> Iterator[None]:
    """Hold the folder for one process at a time; the lock ends with the process, however it ends.

    Raises:
        BusyError: another process holds it.
    """
    path = folder / f".{holder}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(
                str(folder),
                expected=f"no other {holder} at work",
                got="one that holds the lock",
                remedy=f"Stop the {holder} that runs on this folder, or wait for it.",
            ) from error
        yield
    finally:
        os.close(descriptor)


def copy_tree_bounded(source: Path, destination: Path, *, max_bytes: int, most: int = 300) -> None:
    """Copy the regular files of a hostile folder durably, following no link and stopping at `max_bytes` in all.

    The copies are files of their own, which nobody who can write to `source` can write to: a rename or a hard link
    would leave open whatever was open. The kernel moves the bytes, shares the blocks where the file system can, and
    holes stay holes, so that this costs neither memory nor, at best, time.

    Raises:
        UnsafePathError: a link, a special file, or more than `most` files and folders.
        FormatError: more than `max_bytes`, or a file that became shorter meanwhile.
    """
    files, left = list_files(source, most=most), max_bytes
    destination.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _open_regular(path, name) as reader, target.open("xb") as writer:
            size = os.fstat(reader.fileno()).st_size
            left -= size
            if left < 0:
                raise FormatError(source.name, expected=f"at most {max_bytes} bytes in all", got="more")
            os.ftruncate(writer.fileno(), size)
            for start, end in _data_ranges(reader.fileno(), size):
                _copy_range(reader.fileno(), writer.fileno(), start, end, name)
            os.fsync(writer.fileno())
    sync_tree(destination)


def _data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file's first `size` bytes that are no holes."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole follows
                return
            raise
        if start < end:
            yield start, end


def _copy_range(reader: int, writer: int, start: int, end: int, subject: str) -> None:
    in_kernel = hasattr(os, "copy_file_range")
    while start < end:
        try:
            if in_kernel:
                copied = os.copy_file_range(reader, writer, end - start, start, start)
            else:
                copied = os.pwrite(writer, os.pread(reader, min(end - start, _COPY_BYTES), start), start)
        except OSError as error:
            if not in_kernel or error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            in_kernel = False  # between two file systems, or one that cannot
            continue
        if copied == 0:
            raise FormatError(subject, expected=f"{end} bytes", got="a file that became shorter")
        start += copied
