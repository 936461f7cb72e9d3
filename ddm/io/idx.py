"""Arrays in the idx format of MNIST and its relatives, gzipped or not, into images of the plan's shape and range."""

import gzip
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from ddm.errors import DataError
from ddm.io.files import require_file
from ddm.io.fitting import check_row, fit
from ddm.io.images import BLOCK_BYTES, rows_of
from ddm.protocol.plan import DataSpec

if TYPE_CHECKING:
    from torch import Tensor

_GZIP, _IDX = b"\x1f\x8b", b"\0\0\x08"  # unsigned bytes, the only kind that these data sets use
_MAX_DIMS = 4


def is_idx(path: Path) -> bool:
    """Whether a file holds an idx array of bytes, as far as its first bytes tell."""
    try:
        with _unpacked(path) as handle:
            return handle.read(3) == _IDX
    except (gzip.BadGzipFile, EOFError):
        return False


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file, or what is packed in it."""
    with path.open("rb") as handle:
        packed = handle.read(2) == _GZIP
        handle.seek(0)
        if not packed:
            yield handle
            return
        with gzip.open(handle) as unpacked:
            yield unpacked


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, whose size is known from its header before anything is unpacked.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not such a file, larger than memory, or with fewer or more bytes than its header says.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with _opened(path) as (handle, shape):
        size = prod(shape)
        if size > memory:
            raise DataError("data file", expected=f"at most {memory} bytes, unpacked", got=f"{size}")
        data = handle.read(size + 1)
    if len(data) != size:
        raise DataError("data file", expected=f"{size} bytes, as its header says", got="fewer or more")
    return np.frombuffer(data, np.uint8).reshape(shape)


def idx_shape(path: Path) -> tuple[int, ...]:
    """Return the shape of the array, as its header says.

    Raises:
        MissingFileError, DataError: see `read_idx`.
    """
    with _opened(path) as (_, shape):
        return shape


def idx_blocks(path: Path) -> Iterator[np.ndarray]:
    """Yield the rows of an idx file in blocks, in bounded memory.

    Raises:
        MissingFileError, DataError: see `read_idx`.
    """
    with _opened(path) as (handle, shape):
        row, most = prod(shape[1:]), rows_of(BLOCK_BYTES, shape[1:], 1)
        for start in range(0, shape[0], most):
            num = min(most, shape[0] - start)
            data = handle.read(num * row)
            if len(data) != num * row:
                got = f"{start + len(data) // row}"
                raise DataError("data file", expected=f"{shape[0]} rows, as its header says", got=got)
            yield np.frombuffer(data, np.uint8).reshape(num, *shape[1:])
        if handle.read(1):
            raise DataError("data file", expected=f"{shape[0]} rows, as its header says", got="bytes after the last")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes] | gzip.GzipFile, tuple[int, ...]]]:
    """Yield what is behind the header, and the shape that it states."""
    require_file(path, "an idx file")
    wanted = "an idx file of unsigned bytes"
    try:
        with _unpacked(path) as handle:
            magic = handle.read(4)
            if magic[:3] != _IDX or not 1 <= magic[3] <= _MAX_DIMS:
                raise DataError("data file", expected=wanted, got="a file that begins otherwise")
            yield handle, struct.unpack(f">{magic[3]}I", handle.read(4 * magic[3]))
    except (EOFError, struct.error, gzip.BadGzipFile) as error:
        raise DataError("data file", expected=wanted, got="a file that is cut short or damaged") from error


def read_idx_images(path: Path, spec: DataSpec) -> "Tensor":
    """Read images (N, H, W) or (N, C, H, W); bytes are spread over the plan's range.

    Raises:
        MissingFileError, DataError: see `read_idx`; or images of another shape.
    """
    array = read_idx(path)
    if not len(array):
        raise DataError("images", expected="at least one", got="an empty array")
    check_row(array.dtype, array.shape[1:], spec)
    return fit(array, range(len(array)), spec=spec)


def labels_beside(path: Path) -> Path:
    """Return where the labels of an idx file lie: ``train-labels-idx1-ubyte`` of ``train-images-idx3-ubyte``."""
    return path.with_name(path.name.replace("images-idx3", "labels-idx1"))
