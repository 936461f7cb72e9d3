"""Copies folders: one that somebody else filled to a place of our own, bounded; and our own small documents."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ddm.errors import FormatError
from ddm.io.files import name_full_disk, sync_tree, write_atomic
from ddm.io.untrusted import list_files, open_below

_COPY_BYTES = 1 << 20
# What `copy_file_range` fails with between two file systems, or on one that cannot do it.
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def copy_tree_bounded(
    source: Path, destination: Path, *, max_bytes: int, max_entries: int = 300
) -> None:
    """Copy the regular files of a hostile folder durably, following no link and stopping at `max_bytes` in all.

    The copies are files of their own, which nobody who can write to `source` can write to: after a rename or with a
    hard link, anybody who had a file open could continue writing to it. The kernel moves the bytes, shares the blocks
    where the file system can, and holes stay holes, so that this costs neither memory nor, at best, time.

    Raises:
        UnsafePathError: a link, a special file, or more than `max_entries` files and folders.
        FormatError: more than `max_bytes`, or a file that became shorter meanwhile.
    """
    names = list_files(source, max_entries=max_entries)
    num_bytes = 0
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = open_below(source.parent, f"{source.name}/{name}", name)
        with opened as (reader, size), name_full_disk(target), target.open("xb") as writer:
            # Counted from the open file: the sizes of the list may have changed since.
            num_bytes += size
            if num_bytes > max_bytes:
                expected = f"at most {max_bytes} bytes in all"
                got = f"{num_bytes} bytes up to {name}"
                raise FormatError(source.name, expected=expected, got=got)
            # The length comes first: what is not written below is then a hole.
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
    """Yield the parts of a file's first `size` bytes that are not holes."""
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
        num_left = end - start
        try:
            if in_kernel:
                num_copied = os.copy_file_range(reader, writer, num_left, start, start)
            else:
                data = os.pread(reader, min(num_left, _COPY_BYTES), start)
                num_copied = os.pwrite(writer, data, start)
        except OSError as error:
            if in_kernel and error.errno in _NO_KERNEL_COPY:
                in_kernel = False
                continue
            raise
        if num_copied == 0:
            got = f"a file that became shorter, of {start}"
            raise FormatError(subject, expected=f"{end} bytes", got=got)
        start += num_copied
