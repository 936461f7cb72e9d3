"""Some rows of arrays of images, such as those of the parts of a data set that are used."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.array_files import ImageArrays
from ddm.images.rows import Rows, StoredArray
from ddm.images.types import Shape, Values, ValueType
from ddm.protocol.base import sha256_hex


class SelectedRows:
    """Some rows of other arrays, in ascending order, as `ImageArrays`.

    Args:
        source: the other arrays.
        row_N: the number of each row, int64, ascending.
    """

    def __init__(self, source: ImageArrays, row_N: NDArray[np.int64]) -> None:
        self._source = source
        self._row_N = row_N
        self.name = source.name
        self.row = source.row
        self.files = source.files

    def __len__(self) -> int:
        return len(self._row_N)

    @property
    def recipe(self) -> str:
        """Names the rows, besides what the rows of the other arrays depend on."""
        return f"{self._source.recipe} rows {sha256_hex(self._row_N.astype('<i8').tobytes())}"

    def in_place(self) -> StoredArray | None:
        """Return the rows, if the other arrays can be read in place."""
        array = self._source.in_place()
        if array is None:
            return None
        return _SelectedArray(array, self._row_N)

    def unpacked(self) -> Iterator[Values]:
        """Yield the rows in blocks."""
        first = 0
        for block in self._source.unpacked():
            # The numbers ascend, so that those of one block stand together.
            start, end = np.searchsorted(self._row_N, (first, first + len(block)))
            if start < end:
                yield block[self._row_N[start:end] - first]
            first += len(block)

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns."""
        return self._source.columns

    def column(self, name: str, max_bytes: int) -> Values:
        """Return one entry for each of the rows."""
        num_images = len(self._source)
        column = self._source.column(name, max_bytes)
        if len(column) != num_images:
            expected = f"{num_images} entries, one for each image"
            raise DataError(name, expected=expected, got=f"{len(column)}")
        return column[self._row_N]

    def column_shape(self, name: str) -> Shape:
        """Return the shape of a column, with as many entries as there are rows."""
        shape = self._source.column_shape(name)
        if shape[:1] == (len(self._source),):
            return (len(self), *shape[1:])
        return shape


@dataclass(frozen=True)
class _SelectedArray:
    array: StoredArray
    row_N: NDArray[np.int64]

    @property
    def shape(self) -> Shape:
        return (len(self.row_N), *self.array.shape[1:])

    @property
    def dtype(self) -> ValueType:
        return self.array.dtype

    def read(self, rows: Rows) -> Values:
        if isinstance(rows, range):
            chosen = self.row_N[rows.start : rows.stop]
        else:
            chosen = self.row_N[rows]
        return self.array.read(chosen)
