"""Images wherever they lie, in memory or in files: read by rows or by blocks, converted to float32 as they are read.

Importing this, and reading what is stored, takes no torch: processes that decode read arrays too.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.types import Shape, Values, ValueType

if TYPE_CHECKING:
    from torch import Tensor

# Shape legend: N images, B images that are read at once.

BLOCK_BYTES = 1 << 23  # of float32 values, in one block of a pass over all images
Rows = range | NDArray[np.int64]
"""The numbers of rows: some that follow each other, or any."""
Convert = Callable[[Values, Rows], "Tensor"]
"""Turns stored rows into float32 on the CPU; their numbers are for error messages."""


class Images(Protocol):
    """N images of one shape, float32 on the CPU once they are read. A tensor is the simplest of them.

    `images[start:stop]` reads a block and `images[index_B]`, int64, reads rows in the order of the index.
    """

    @property
    def shape(self) -> Shape:
        """(N, ...)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: "slice | Tensor", /) -> "Tensor": ...


class StoredArray(Protocol):
    """An array that is read by rows, in the type that it is stored in."""

    @property
    def shape(self) -> Shape:
        """(N, ...)."""
        ...

    @property
    def dtype(self) -> ValueType:
        """The type in which the values are stored."""
        ...

    def read(self, rows: Rows) -> Values:
        """Return the rows in this order, in memory of their own; the numbers are in [0, N)."""
        ...


@dataclass(frozen=True)
class FileArray:
    """An array in C order somewhere in a file, read at its place and never mapped, so that memory holds what was asked.

    Args:
        path: the file.
        dtype: the dtype of its values, without objects.
        shape: the shape of the array.
        offset: where it begins, in bytes.

    Raises:
        DataError: the file is shorter than the array.
        OSError: no such file, or not for this user.
    """

    path: Path
    dtype: ValueType
    shape: Shape
    offset: int
    _descriptor: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        object.__setattr__(self, "_descriptor", descriptor)
        # Closed with the last reference, because no reader knows whether it is the last one.
        weakref.finalize(self, os.close, descriptor)
        size = os.fstat(descriptor).st_size
        needed_bytes = self.offset + prod(self.shape) * self.dtype.itemsize
        if size < needed_bytes:
            raise DataError(
                "data file",
                expected=f"{needed_bytes} bytes, as its header says",
                got=f"{size} bytes",
                remedy="Copy the file again from where it came, or save it again in the program that made it.",
            )

    def read(self, rows: Rows) -> Values:
        """Return rows; see `StoredArray`."""
        row_shape = self.shape[1:]
        values = np.empty((len(rows), *row_shape), self.dtype)
        if isinstance(rows, range):
            self._fill(values, rows.start)
        else:
            for place, row in enumerate(rows.tolist()):
                place_of_row = values[place : place + 1]
                self._fill(place_of_row, row)
        return values

    def _fill(self, values: Values, first_row: int) -> None:
        buffer = values.reshape(-1).view(np.uint8).data
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        start = self.offset + first_row * row_bytes
        num_read = 0
        # One call reads 2 GB at most.
        while num_read < len(buffer):
            missing = buffer[num_read:]
            num = os.preadv(self._descriptor, [missing], start + num_read)
            if not num:
                raise DataError(
                    "data file",
                    expected="the bytes that its header says",
                    got="a file that was cut short in the meantime",
                    remedy="Copy the file again from where it came, or save it again in the program that made it.",
                )
            num_read += num


@dataclass(frozen=True)
class JoinedArrays:
    """Arrays of one type and one shape of row, one after the other.

    Args:
        parts: at least one.

    Raises:
        DataError: parts that differ.
    """

    parts: tuple[StoredArray, ...]

    def __post_init__(self) -> None:
        kinds = {(part.dtype.str, part.shape[1:]) for part in self.parts}
        if len(kinds) != 1:
            got = ", ".join(f"{dtype} {shape}" for dtype, shape in sorted(kinds)[:3])
            raise DataError(
                "data files",
                expected="rows of one type and one shape in all of them",
                got=got,
                remedy="Give images of one type and one shape; others belong in another data set.",
            )

    @property
    def shape(self) -> Shape:
        """(N, ...) of all parts."""
        num_rows = sum(part.shape[0] for part in self.parts)
        return (num_rows, *self.parts[0].shape[1:])

    @property
    def dtype(self) -> ValueType:
        """The type of all parts."""
        return self.parts[0].dtype

    def read(self, rows: Rows) -> Values:
        """Return rows; see `StoredArray`."""
        shape = (len(rows), *self.shape[1:])
        values = np.empty(shape, self.dtype)
        first = 0
        for part in self.parts:
            end = first + part.shape[0]
            if isinstance(rows, range):
                start = max(rows.start, first)
                stop = min(rows.stop, end)
                if start < stop:
                    rows_of_part = range(start - first, stop - first)
                    places_of_part = slice(start - rows.start, stop - rows.start)
                    values[places_of_part] = part.read(rows_of_part)
            else:
                is_in_part = (rows >= first) & (rows < end)
                places = np.flatnonzero(is_in_part)
                if len(places):
                    values[places] = part.read(rows[places] - first)
            first = end
        return values


class _LazyImages:
    """What is read row by row and looks like a tensor in the two ways that `Images` names."""

    shape: Shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: "slice | Tensor", /) -> "Tensor":
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise TypeError("expected rows that follow each other, got a slice with a step")
            return self._rows(range(start, max(start, stop)))
        numbers = rows.numpy()
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            raise TypeError(
                f"expected int64 row numbers (B,), got {rows.dtype} {tuple(rows.shape)}"
            )
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"row numbers outside 0 to {len(self) - 1}")
        steps = np.diff(numbers)
        # Rows that follow each other are read in one piece.
        if len(numbers) > 1 and bool((steps == 1).all()):
            first = int(numbers[0])
            last = int(numbers[-1])
            return self._rows(range(first, last + 1))
        return self._rows(numbers)

    def _rows(self, rows: Rows) -> "Tensor":
        raise NotImplementedError


class StoredImages(_LazyImages):
    """Images in an array that is stored in whatever type, converted whenever they are read.

    Args:
        array: where they are.
        convert: turns rows of it into images.
        shape: the shape of one image, once it is converted.
    """

    def __init__(
        self,
        array: StoredArray,
        convert: Convert,
        shape: Sequence[int],
    ) -> None:
        self.array = array
        self.convert = convert
        self.shape = (array.shape[0], *shape)

    def _rows(self, rows: Rows) -> "Tensor":
        stored = self.array.read(rows)
        return self.convert(stored, rows)


class DerivedImages(_LazyImages):
    """Images that are computed from others whenever they are read.

    Args:
        images: the others, one for each.
        convert: turns some of the others into these.
        shape: the shape of one of these.
    """

    def __init__(
        self,
        images: Images,
        convert: "Callable[[Tensor], Tensor]",
        shape: Sequence[int],
    ) -> None:
        self.images = images
        self.convert = convert
        self.shape = (len(images), *shape)

    def _rows(self, rows: Rows) -> "Tensor":
        images = self.images[_indices(rows)]
        return self.convert(images)


class ScaledImages(_LazyImages):
    """Images of which each value x is ``(x - shift) / scale`` of others'.

    Args:
        images: the others.
        shift: in units of theirs.
        scale: above 0.
    """

    def __init__(
        self,
        images: Images,
        shift: float,
        scale: float,
    ) -> None:
        self.images = images
        self.shift = shift
        self.scale = scale
        self.shape = images.shape

    def _rows(self, rows: Rows) -> "Tensor":
        images = self.images[_indices(rows)]
        return (images - self.shift) / self.scale


class SelectedImages(_LazyImages):
    """Some of other images, in an order of their own.

    Args:
        images: the others.
        chosen_N: the number of each, int64.
    """

    def __init__(self, images: Images, chosen_N: "Tensor") -> None:
        self.images = images
        self.chosen_N = chosen_N
        self.shape = (len(chosen_N), *images.shape[1:])

    def _rows(self, rows: Rows) -> "Tensor":
        import torch

        if isinstance(rows, range):
            return self.images[self.chosen_N[rows.start : rows.stop]]
        # By numpy, as torch would start threads in the one that draws.
        chosen = self.chosen_N.numpy()[rows]
        return self.images[torch.from_numpy(chosen)]


def select(images: Images, chosen: "Tensor") -> Images:
    """Return the chosen images, ascending and each once: of a tensor a copy, else a view; of all of them themselves."""
    from torch import Tensor

    if len(chosen) == len(images):
        return images
    if isinstance(images, Tensor):
        return images[chosen]
    return SelectedImages(images, chosen)


def blocks(images: Images, *, size: int | None = None) -> "Iterator[tuple[int, Tensor]]":
    """Yield all images in order, in blocks, with the number of each block's first.

    Args:
        images: any.
        size: the size of a block; by default what `BLOCK_BYTES` hold.
    """
    size = size or rows_of(BLOCK_BYTES, images.shape[1:])
    for start in range(0, len(images), size):
        end = start + size
        yield start, images[start:end]


def rows_of(
    num_bytes: int,
    shape: Sequence[int],
    itemsize: int = 4,
) -> int:
    """Return how many rows of a shape this many bytes hold, at least 1."""
    row_bytes = max(1, prod(shape) * itemsize)
    return max(1, num_bytes // row_bytes)


def feed(update: Callable[[memoryview], object], images: Images) -> None:
    """Hand a hash the bytes of all images, or of any other tensor, in C order, block by block."""
    from torch import Tensor

    all_blocks: Iterable[Tensor]
    if isinstance(images, Tensor):
        all_blocks = [images]
    else:
        all_blocks = (block for _, block in blocks(images))
    for block in all_blocks:
        values = np.ascontiguousarray(block.detach().cpu().numpy())
        update(values.reshape(-1).view(np.uint8).data)


def write_rows(
    handle: "Writable",
    shape: Sequence[int],
    dtype: ValueType,
    rows: Iterable[object],
) -> None:
    """Write an npy file from blocks of rows, in C order.

    Args:
        handle: an empty file.
        shape: the shape of the whole array.
        dtype: the dtype of its values.
        rows: blocks, in order, each convertible to an array.

    Raises:
        DataError: more or fewer rows than the shape says.
    """
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    np.lib.format.write_array_header_1_0(handle, header)
    num_announced = shape[0]
    num_written = 0
    for block in rows:
        array = np.ascontiguousarray(block, dtype)
        values_as_bytes = array.reshape(-1).view(np.uint8)
        handle.write(values_as_bytes.data)
        num_written += len(array)
    if num_written != num_announced:
        raise DataError("rows", expected=f"{num_announced}, as announced", got=f"{num_written}")


class Writable(Protocol):
    """A file that bytes are written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of it."""
        ...


def _indices(rows: Rows) -> "slice | Tensor":
    import torch

    if isinstance(rows, range):
        return slice(rows.start, rows.stop)
    return torch.from_numpy(rows)
