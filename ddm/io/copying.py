"""Copies folders: one that somebody else filled to a place of our own, bounded; and our own small documents."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ddm.errors import FormatError
from ddm.io.files import naming, sync_tree, write_atomic
from ddm.io.untrusted import open_below, scan

_COPY_BYTES = 1 << 20


def copy_tree_bounded(source: Path, destination: Path, *, max_bytes: int, most: int = 300) -> None:
    """Copy the regular files of a hostile folder durably, following no link and stopping at `max_bytes` in all.

    The copies are files of their own, which nobody who can write to `source` can write to: a rename or a hard link
    would leave open whatever was open. The kernel moves the bytes, shares the blocks where the file system can, and
    holes stay holes, so that this costs neither memory nor, at best, time.

    Raises:
        UnsafePathError: a link, a special file, or more than `most` files and folders.
        FormatError: more than `max_bytes`, or a file that became shorter meanwhile.
    """
    files, left = scan(source, most=most), max_bytes
    destination.mkdir(parents=True, exist_ok=True)
    for name in files:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = open_below(source.parent, f"{source.name}/{name}", name)
        with opened as (reader, size), naming(target), target.open("xb") as writer:
            left -= size
            if left < 0:
                got = f"{max_bytes - left} bytes up to {name}"
                raise FormatError(
                    source.name, expected=f"at most {max_bytes} bytes in all", got=got
                )
            os.ftruncate(writer.fileno(), size)
            for start, end in _data_ranges(reader.fileno(), size):
                _copy_range(reader.fileno(), writer.fileno(), start, end, name)
            os.fsync(writer.fileno())
    sync_tree(destination)


def copy_documents(source: Path, destination: Path) -> None:
    """Copy the files of a folder of our own, which are small, to a new folder. An error names the file that failed.

    Raises:
        OSError: a file could not be read or written; `shutil.copytree` would join the errors of all of them.
    """
    destination.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            write_atomic(destination / path.relative_to(source), path.read_bytes())


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
                copied = os.pwrite(
                    writer, os.pread(reader, min(end - start, _COPY_BYTES), start), start
                )
        except OSError as error:
            if not in_kernel or error.errno not in (
                errno.EXDEV,
                errno.ENOSYS,
                errno.EOPNOTSUPP,
                errno.EINVAL,
            ):
                raise
            in_kernel = False  # between two file systems, or one that cannot
            continue
        if copied == 0:
            raise FormatError(
                subject, expected=f"{end} bytes", got=f"a file that became shorter, of {start}"
            )
        start += copied
