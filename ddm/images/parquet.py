"""Columns of Parquet files, streamed: pictures as tensors or lists of numbers, and what belongs to each."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.rows import BLOCK_BYTES, rows_of
from ddm.io.files import decoding, require_file

_KIND = "a Parquet file"
_MOST_ROWS = 4096  # in one batch of rows
_BUFFER_BYTES = 1 << 20
_METADATA = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": 1 << 22}


class ParquetTable:
    """The rows of one or several Parquet files, in the order of the files.

    Args:
        files: at least one, with the same columns.

    Raises:
        MissingFileError: nothing at a path.
        DataError: a file that is no Parquet.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files, self.num_rows = tuple(files), 0
        names: set[str] | None = None
        for path in self.files:
            require_file(path, "a Parquet file")
            with decoding(_KIND), _opened(path) as file:
                self.num_rows += int(file.metadata.num_rows)
                here = set(file.schema_arrow.names)
                names = here if names is None else names & here
        self.names = frozenset(names or ())

    def row_type(self, name: str) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
        """Return type and shape of one picture: a tensor's own shape, of lists that of the first row.

        Raises:
            DataError: a column of anything but numbers in tensors or lists.
        """
        import pyarrow as pa

        with decoding(_KIND), _opened(self.files[0]) as file:
            kind = file.schema_arrow.field(name).type
            if isinstance(kind, pa.FixedShapeTensorType):
                return _numpy_type(kind.value_type, name), tuple(kind.shape)
            shape, values = _first_row(file, name), kind
            while _is_list(values):
                values = values.value_type
            return _numpy_type(values, name), shape

    def pictures(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield the pictures of one column in blocks, shape (B, ...).

        Raises:
            DataError: a file that is damaged, or a row, by number, that is empty or of another shape than the first.
        """
        dtype, shape = self.row_type(name)
        first = 0
        for batch in self._batches(name, rows_of(BLOCK_BYTES, shape, dtype.itemsize)):
            with decoding(_KIND):
                yield _pictures(batch, dtype, shape, first)
            first += len(batch)

    def cells(self, name: str, max_bytes: int) -> NDArray[np.generic]:
        """Return a column of text or numbers, one entry a row.

        Args:
            name: of the column.
            max_bytes: most that one cell of text may have.

        Raises:
            DataError: a file that is damaged, a cell that is too long or empty, or a column of something else.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        found: list[NDArray[np.generic]] = []
        first = 0
        for batch in self._batches(name, _MOST_ROWS):
            with decoding(_KIND):
                kind = batch.type
                if pa.types.is_dictionary(kind):
                    batch, kind = batch.dictionary_decode(), kind.value_type
                text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
                if not (text or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                    raise DataError(name, expected="a column of text or numbers", got=str(kind))
                if text:
                    batch = pc.fill_null(batch, "")  # missing, which every reader of a column tells from text
                    if (longest := pc.max(pc.binary_length(batch)).as_py() or 0) > max_bytes:
                        raise DataError(name, expected=f"at most {max_bytes} bytes each", got=f"a cell of {longest}")
                    found.append(np.array(batch.to_pylist(), dtype=np.str_))
                else:
                    if batch.null_count and pa.types.is_integer(kind):
                        row = first + batch.is_null().index(True).as_py()
                        raise DataError(name, expected="a number in every row", got=f"none in row {row}")
                    found.append(np.asarray(batch.to_numpy(zero_copy_only=False)))
            first += len(batch)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _batches(self, name: str, num: int) -> Iterator[Any]:
        for path in self.files:
            with decoding(_KIND), _opened(path) as file:
                for batch in file.iter_batches(num, columns=[name], use_threads=False):
                    yield batch.column(0)


def _opened(path: Path) -> Any:
    import pyarrow.parquet as pq

    # Buffered, so that of a row group no more is in memory than what is decoded.
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, memory_map=False, **_METADATA)


def _numpy_type(kind: Any, name: str) -> np.dtype[np.generic]:
    import pyarrow as pa

    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(name, expected="tensors or lists of numbers", got=str(kind))
    found: np.dtype[np.generic] = np.dtype(kind.to_pandas_dtype())
    return found


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _first_row(file: Any, name: str) -> tuple[int, ...]:
    """Return the shape of the first row of nested lists."""
    cell = next((batch.column(0) for batch in file.iter_batches(1, columns=[name], use_threads=False)), None)
    shape: list[int] = []
    while cell is not None and len(cell) and _is_list(cell.type):
        cell = cell.flatten()
        shape.append(len(cell) // (prod(shape) or 1))
    return tuple(shape)


def _pictures(column: Any, dtype: np.dtype[np.generic], shape: tuple[int, ...], first: int) -> NDArray[np.generic]:
    import pyarrow as pa

    if isinstance(column.type, pa.FixedShapeTensorType):
        _no_gaps(column, first)
        if column.type.permutation not in (None, list(range(len(shape)))):
            raise DataError("images", expected="tensors in C order", got="tensors in another order")
        column = column.storage
    num, values = len(column), column
    for depth, side in enumerate(shape if _is_list(column.type) else ()):
        if not _is_list(values.type):
            break  # a tensor's storage is flat
        _no_gaps(values, first, prod(shape[:depth]) or 1)
        if not pa.types.is_fixed_size_list(values.type):
            lengths_B = np.asarray(values.value_lengths())
            if (wrong_B := np.flatnonzero(lengths_B != side)).size:
                row = first + int(wrong_B[0]) // (prod(shape[:depth]) or 1)
                got = f"a list of {int(lengths_B[wrong_B[0]])} in row {row}"
                raise DataError("images", expected=f"lists of {side}, as in the first row", got=got)
        values = values.flatten()
    if _numpy_type(values.type, "images") != dtype:
        raise DataError("images", expected=f"{dtype}, as in the first row", got=f"{values.type} in row {first}")
    if values.null_count:
        row = first + values.is_null().index(True).as_py() // (prod(shape) or 1)
        raise DataError("images", expected="numbers", got=f"a missing value in row {row}")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(num, *shape)


def _no_gaps(column: Any, first: int, each: int = 1) -> None:
    if column.null_count:
        row = first + column.is_null().index(True).as_py() // each
        raise DataError("images", expected="an image in every row", got=f"none in row {row}")
