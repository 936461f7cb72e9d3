"""Arrays in the idx format of MNIST and its relatives, gzipped or not: images, and labels in a file beside them."""

import gzip
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, cast

import numpy as np

from ddm.errors import DataError
from ddm.images.npz import EncodedArray, Header
from ddm.images.types import Values
from ddm.io.files import decoding, require_file
from ddm.system.memory import machine_bytes

_GZIP = b"\x1f\x8b"
_MAX_DIMS = 4
_KIND = "an idx file"
# The third byte of the file states the type, as http://yann.lecun.com/exdb/mnist lists them; all are big endian.
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|t10k)-images-idx")


def is_idx_head(head: bytes) -> bool:
    """Whether the first bytes of a file, unpacked, are those of an idx array."""
    if len(head) < 4 or head[:2] != b"\0\0":
        return False
    type_code = head[2]
    num_dims = head[3]
    return type_code in _DTYPES and 1 <= num_dims <= _MAX_DIMS


def is_idx(path: Path) -> bool:
    """Whether a file holds an idx array, as far as its first bytes show."""
    try:
        with _unpacked(path) as handle:
            return is_idx_head(handle.read(4))
    except (gzip.BadGzipFile, EOFError):
        return False


def split_of_idx(name: str) -> str | None:
    """Return the split that a file's name states, as those of MNIST do, whose test images begin with ``t10k``."""
    match = _SPLIT.search(name)
    if match is None:
        return None
    if match[1] == "t10k":
        return "test"
    return match[1]


def labels_beside(path: Path) -> Path:
    """Return where the labels of an idx file lie: ``train-labels-idx1-ubyte`` of ``train-images-idx3-ubyte``."""
    return path.with_name(path.name.replace("images-idx3", "labels-idx1"))


def idx_array(path: Path) -> EncodedArray:
    """Open an idx file.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no idx file, or one that is not packed and has fewer or more bytes than its header says.
    """
    require_file(path, _KIND)
    with decoding(_KIND), _unpacked(path) as handle:
        magic = handle.read(4)
        if not is_idx_head(magic):
            raise DataError(
                "data file",
                expected=_KIND,
                got="a file with another header",
                remedy=(
                    "Name an idx file, or images in another form that the documentation lists "
                    "(docs/reference/image-formats.md)."
                ),
            )
        num_dims = magic[3]
        shape = struct.unpack(f">{num_dims}I", handle.read(4 * num_dims))
    header = Header(
        np.dtype(_DTYPES[magic[2]]),
        shape,
        by_columns=False,
        # The values follow four bytes of magic number and four for the length of each axis.
        offset=4 + 4 * num_dims,
    )
    open_values = partial(_open_values, path, header.offset)
    if _is_packed(path):
        return EncodedArray(path, header, open_values)
    surplus = path.stat().st_size - header.offset - header.num_bytes
    if surplus:
        if surplus > 0:
            got = f"{surplus} bytes more"
        else:
            got = f"{-surplus} bytes fewer"
        raise DataError(
            "data file",
            expected=f"{shape[0]} rows, as its header says",
            got=got,
            remedy="Copy the file again from where it came, or save it again in the program that made it.",
        )
    return EncodedArray(path, header, open_values, header.offset)


def read_idx(path: Path) -> Values:
    """Read an idx file, whose size is known from its header before anything is unpacked.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such a file, larger than memory, or with fewer or more bytes than its header says.
    """
    array = idx_array(path)
    memory_bytes = machine_bytes()
    num_bytes = prod(array.shape) * array.dtype.itemsize
    if num_bytes > memory_bytes:
        raise DataError(
            "data file",
            expected=f"at most {memory_bytes} bytes, unpacked",
            got=f"{num_bytes}",
            remedy="Give fewer or smaller images at a time.",
        )
    return array.whole()


def _is_packed(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(len(_GZIP)) == _GZIP


def _unpacked(path: Path) -> IO[bytes]:
    """Open a file, or what is packed in it."""
    if _is_packed(path):
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb")


@contextmanager
def _open_values(path: Path, offset: int) -> Iterator[IO[bytes]]:
    with _unpacked(path) as handle:
        handle.read(offset)
        yield handle
