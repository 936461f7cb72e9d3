"""Arrays in the idx format of MNIST and its relatives, gzipped or not; of images, with labels in a file beside them."""

import gzip
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.rows import BLOCK_BYTES, FileArray, Stored, rows_of
from ddm.io.files import require_file

_GZIP, _IDX = b"\x1f\x8b", b"\0\0\x08"  # unsigned bytes, the only kind that these data sets use
_MAX_DIMS = 4
_AS_ANNOUNCED = "{} rows, as its header says"


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
                raise DataError("data file", expected=_AS_ANNOUNCED.format(shape[0]), got=got)
            yield np.frombuffer(data, np.uint8).reshape(num, *shape[1:])
        if handle.read(1):
            raise DataError("data file", expected=_AS_ANNOUNCED.format(shape[0]), got="bytes after the last")


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


class IdxImages:
    """One idx file of images as a `ddm.images.array_files.Source`; its one column is `labels`, where there are some.

    Raises:
        MissingFileError, DataError: see `read_idx`.
    """

    name: Literal["images"] = "images"
    recipe = ""

    def __init__(self, path: Path) -> None:
        self._path, self._shape, beside = path, idx_shape(path), labels_beside(path)
        self._labels = beside if beside != path and beside.is_file() else None
        self.files: tuple[Path, ...] = (path,)
        self.row: tuple[np.dtype[np.generic], tuple[int, ...]] = np.dtype(np.uint8), self._shape[1:]

    def __len__(self) -> int:
        return self._shape[0]

    def in_place(self) -> Stored | None:
        """Return the array; None of one that is packed."""
        header = 4 + 4 * len(self._shape)
        with self._path.open("rb") as handle:
            if handle.read(2) == _GZIP:
                return None
            found = handle.seek(0, os.SEEK_END)
        if (more := found - header - prod(self._shape)) > 0:
            raise DataError("data file", expected=_AS_ANNOUNCED.format(self._shape[0]), got=f"{more} bytes more")
        return FileArray(self._path, self.row[0], self._shape, header)

    def unpacked(self) -> Iterator[NDArray[np.generic]]:
        """Yield all rows in blocks."""
        return idx_blocks(self._path)

    @property
    def columns(self) -> frozenset[str]:
        """The labels, or nothing."""
        return frozenset({"labels"} if self._labels else ())

    def column(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        """Return the labels."""
        shape = self.column_shape(name)
        if self._labels is None or prod(shape) > len(self) * max_bytes:
            raise DataError(name, expected=f"at most {len(self) * max_bytes} bytes", got=str(prod(shape)))
        return read_idx(self._labels)

    def column_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the labels."""
        if name != "labels" or self._labels is None:
            got = "an idx file, with labels only" if self._labels else "an idx file, without labels beside it"
            raise DataError("data file", expected=f"an npz with the array {name}", got=got)
        return idx_shape(self._labels)


def labels_beside(path: Path) -> Path:
    """Return where the labels of an idx file lie: ``train-labels-idx1-ubyte`` of ``train-images-idx3-ubyte``."""
    return path.with_name(path.name.replace("images-idx3", "labels-idx1"))
