"""An opened file or folder of many images: rows of one type and shape, and columns with one entry for each.

Both classes are `ddm.images.array_files.ImageArrays`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from ddm.errors import DataError
from ddm.images.column_names import find_column, known_columns
from ddm.images.npz import EncodedArray
from ddm.images.parquet import MAX_COLUMN_BYTES, ParquetTable
from ddm.images.rows import JoinedArrays, StoredArray
from ddm.images.types import Shape, Values

Name = Literal["images", "latents"]
NEEDS_TRANSFORM = "They are read one by one, as pictures, by a plan with a table [transform]."


class ArraySource:
    """Arrays one after the other, with columns of which each is one array for all of them, or one for each.

    Args:
        name: what the arrays hold.
        arrays: at least one, all of one type and one shape of row.
        columns: how the arrays of each column are opened: when it is asked for, since others may be anything.
        files: the files that hold the rows.

    Raises:
        DataError: arrays that differ.
    """

    recipe = ""

    def __init__(
        self,
        name: Name,
        arrays: Sequence[EncodedArray],
        columns: Mapping[str, Callable[[], Sequence[EncodedArray]]],
        files: tuple[Path, ...],
    ) -> None:
        self.name = name
        self.files = files
        self._arrays = arrays
        self._columns = columns
        if any(not array.shape for array in arrays):
            raise DataError(
                "data file",
                expected="an array of images",
                got="a single number",
                remedy="Save an array with one row for each image.",
            )
        kinds = {(array.dtype.str, array.shape[1:]) for array in arrays}
        if len(kinds) != 1:
            # A few of them suffice in a message.
            first_kinds = sorted(kinds)[:3]
            raise DataError(
                "data files",
                expected="rows of one type and one shape in all of them",
                got=", ".join(f"{dtype} {shape}" for dtype, shape in first_kinds),
                remedy="Give images of one type and one shape; others belong in another data set.",
            )
        first_array = arrays[0]
        self.row = first_array.dtype, first_array.shape[1:]

    def __len__(self) -> int:
        return sum(array.shape[0] for array in self._arrays)

    def in_place(self) -> StoredArray | None:
        """Return the arrays to be read by rows; None where one of them cannot be read in place."""
        parts: list[StoredArray] = []
        for array in self._arrays:
            part = array.in_place()
            # Rows are only read in place if all of them are: a block may be of several parts.
            if part is None:
                return None
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return JoinedArrays(tuple(parts))

    def unpacked(self) -> Iterator[Values]:
        """Yield all rows in blocks."""
        for array in self._arrays:
            yield from array.blocks()

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns."""
        return known_columns(self._columns)

    def column(self, name: str, max_bytes: int) -> Values:
        """Return one entry for each row; see `ImageArrays`.

        Raises:
            DataError: no such column, or one that does not belong to the rows.
        """
        arrays = self._open_column(name)
        num_bytes = sum(prod(array.shape) * array.dtype.itemsize for array in arrays)
        column_max_bytes = min(len(self) * max_bytes, MAX_COLUMN_BYTES)
        if num_bytes > column_max_bytes:
            raise DataError(
                name,
                expected=f"at most {column_max_bytes} bytes",
                got=f"{num_bytes}",
                remedy="Give shorter entries: a column holds a name, a number or a text for each image.",
            )
        parts = [array.whole() for array in arrays]
        # A copy is only needed to join several.
        if len(parts) == 1:
            column = parts[0]
        else:
            column = np.concatenate(parts)
        return column.reshape(self.column_shape(name))

    def column_shape(self, name: str) -> Shape:
        """Return the shape of a column; labels of shape (N, 1), as MedMNIST keeps them, count as (N,)."""
        arrays = self._open_column(name)
        num_rows = sum(array.shape[0] for array in arrays)
        row_shape = arrays[0].shape[1:]
        if row_shape == (1,):
            return (num_rows,)
        return (num_rows, *row_shape)

    def _open_column(self, name: str) -> Sequence[EncodedArray]:
        column = find_column(name, self._columns)
        if column is None:
            raise DataError(
                "data",
                expected=f"a column called {name} beside the images",
                got=f"{len(self._columns)} columns with other names",
                remedy="Add this column to the file that holds the images.",
            )
        arrays = self._columns[column]()
        if any(not array.shape for array in arrays):
            raise DataError(
                name,
                expected="an entry for each image",
                got="a single value",
                remedy="Give the images a column of this kind, with one entry for each of them, in their order.",
            )
        # Joined, entries of one part would otherwise come beside images of another.
        if len(arrays) > 1:
            num_entries = [array.shape[0] for array in arrays]
            num_images = [array.shape[0] for array in self._arrays]
            if num_entries != num_images:
                expected = "as many entries in the column of each part as the part has images"
                raise DataError(name, expected=expected, got="other numbers")
            kinds = {(array.dtype.kind, array.shape[1:]) for array in arrays}
            if len(kinds) > 1:
                raise DataError(
                    name,
                    expected="one type and one shape in all parts",
                    got="several",
                    remedy="Give the column one type and one shape in all files.",
                )
        return arrays


class ParquetSource:
    """One Parquet file of tensors or lists of numbers, or several.

    Raises:
        DataError: no column of images, or one of encoded pictures.
    """

    recipe = ""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._table = ParquetTable(files)
        self.files = files
        self.name: Name = "images"
        column = self._table.image_column
        if column is None and self._table.latent_column is not None:
            self.name = "latents"
            column = self._table.latent_column
        if column is None:
            got = f"{len(self._table.names)} columns with other names"
            raise DataError(
                "data file",
                expected="a column called image",
                got=got,
                remedy="Name the column with the images `image`, and save the file again.",
            )
        if self._table.is_encoded(column):
            raise DataError(
                "images",
                expected="arrays of one shape",
                got="encoded pictures",
                remedy=NEEDS_TRANSFORM,
            )
        self._column = column
        self.row = self._table.row_type(column)

    def __len__(self) -> int:
        return self._table.num_rows

    def in_place(self) -> StoredArray | None:
        """Return None: pages are packed."""
        return None

    def unpacked(self) -> Iterator[Values]:
        """Yield all rows in blocks."""
        return self._table.pictures(self._column)

    @property
    def columns(self) -> frozenset[str]:
        """The names of all columns."""
        return known_columns(self._table.names)

    def column(self, name: str, max_bytes: int) -> Values:
        """Return one entry for each row.

        Raises:
            DataError: no such column, or one of anything but text and numbers.
        """
        column = find_column(name, self._table.names)
        if column is None:
            got = f"{len(self._table.names)} columns with other names"
            raise DataError(
                "data file",
                expected=f"a column called {name}",
                got=got,
                remedy="Add this column to the file that holds the images.",
            )
        return self._table.cells(column, max_bytes)

    def column_shape(self, name: str) -> Shape:
        """Return the shape of a column, one entry for each row as in every table."""
        return (len(self),)
