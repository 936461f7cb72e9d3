"""Columns of Parquet files, streamed within bounds: pictures as tensors or lists of numbers, and text and numbers.

Files of Hugging Face's `datasets` say in their schema which column holds images, and what numbers of classes mean.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.column_names import as_text
from ddm.images.parquet_footer import MAX_ENTRIES, RowGroup, read_footer
from ddm.images.parquet_pages import check_pages
from ddm.images.reasons import ImageError, Reason
from ddm.images.rows import BLOCK_BYTES, rows_of
from ddm.images.types import Shape, Values, ValueType
from ddm.io.files import decoding, require_file

MAX_COLUMN_BYTES = 1 << 30
"""The most that one column may take in memory, where each entry has the room of the longest."""

_KIND = "a Parquet file"
_MAX_BATCH_ROWS = 4096
_CHARACTER_BYTES = 4  # in NumPy's arrays of text
_BUFFER_BYTES = 1 << 20
# A list takes its whole memory when its length is read, two gigabytes for four million columns, whatever follows.
_METADATA = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": MAX_ENTRIES}
_HUGGING_FACE = b"huggingface"
_IMAGE_NAMES = frozenset({"image", "images", "img", "pixel_values"})
_LATENT_NAMES = frozenset({"latent", "latents"})
# Lists of any length hide how large one row is. Up to this many values a row group may be as it likes; beyond that,
# real pictures take more than a byte for every 4096 values.
_MAX_VALUES = 1 << 27
_MAX_VALUES_PER_BYTE = 4096


class ParquetTable:
    """The rows of one or several Parquet files, in the order of the files.

    Args:
        files: at least one, with the same columns.

    Raises:
        MissingFileError: nothing at a path.
        DataError: a file that is no Parquet.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.num_rows = 0
        names: set[str] | None = None
        for path in self.files:
            require_file(path, _KIND)
            with decoding(_KIND):
                # Before pyarrow opens the file: it would allocate whatever lists the footer announces.
                row_groups = read_footer(path)
            with decoding(_KIND), _opened(path) as file:
                self.num_rows += sum(group.num_rows for group in row_groups)
                listed_names = file.schema_arrow.names
                columns = set(listed_names)
                if len(columns) != len(listed_names):
                    raise ImageError(Reason.AMBIGUOUS, "two columns of one name")
                # What all files have.
                if names is None:
                    names = columns
                names &= columns
        self.names = frozenset(names or ())

    @property
    def image_column(self) -> str | None:
        """The column of images, by its name, or else by its type in Hugging Face's schema; None without one.

        Raises:
            ImageError: several columns that may be it.
        """
        candidates = [name for name in self.names if name.lower() in _IMAGE_NAMES]
        if not candidates and not self.latent_column:
            for name, feature in self._features().items():
                if name in self.names and feature.get("_type") == "Image":
                    candidates.append(name)
        return _only_column(candidates, "images")

    @property
    def latent_column(self) -> str | None:
        """The column of latents; None without one."""
        candidates = [name for name in self.names if name.lower() in _LATENT_NAMES]
        return _only_column(candidates, "latents")

    def is_encoded(self, name: str) -> bool:
        """Whether a column holds the content of image files: bytes, or bytes with the path that they came from."""
        import pyarrow as pa

        kind = self._type(name)
        if _is_binary(kind):
            return True
        if not pa.types.is_struct(kind):
            return False
        # pyarrow answers -1 where there is no such field.
        return bool(kind.get_field_index("bytes") >= 0)

    def row_type(self, name: str) -> tuple[ValueType, Shape]:
        """Return type and shape of one picture: a tensor's own shape, of lists that of the first row.

        Raises:
            DataError: a column of anything but numbers in tensors or lists.
        """
        import pyarrow as pa

        with decoding(_KIND):
            kind = self._type(name)
            if isinstance(kind, pa.FixedShapeTensorType):
                return _numpy_type(kind.value_type), tuple(kind.shape)
            values = kind
            while _is_list(values):
                values = values.value_type
            dtype = _numpy_type(values)
            first_batch = next(self._batches([name], 1), None)
            if first_batch is None:
                return dtype, ()
            return dtype, _shape_of_first(first_batch.column(0))

    def pictures(self, name: str) -> Iterator[Values]:
        """Yield the pictures of one column in blocks, shape (B, ...).

        Raises:
            DataError: a file that is damaged, or a row, by number, that is empty or of another shape than the first.
        """
        dtype, shape = self.row_type(name)
        num_rows = rows_of(BLOCK_BYTES, shape, dtype.itemsize)
        first = 0
        for batch in self._batches([name], num_rows):
            with decoding(_KIND):
                yield _pictures(batch.column(0), dtype, shape, first)
            first += len(batch)

    def rows(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Yield rows one by one, the cells of some columns as scalars of pyarrow, which have copied nothing yet."""
        for batch in self._batches(names, 1):
            row = {}
            for name in names:
                row[name] = batch.column(name)[0]
            yield row

    def cells(self, name: str, max_bytes: int) -> Values:
        """Return a column of text or numbers, one entry a row; of classes with names in the schema, their names.

        Args:
            name: the name of the column.
            max_bytes: most that one cell of text may have.

        Raises:
            DataError: a file that is damaged, a cell that is too long or empty, or a column of something else.
        """
        if self.is_text(name):
            # A missing text becomes an empty one, which every reader of a column takes for missing.
            texts = [text or "" for (text,) in self.texts([name], max_bytes)]
            return _text_array(name, texts)
        kind = _value_type(self._type(name))
        classes = self.class_names(name)
        if not _is_number(kind):
            raise DataError(
                name,
                expected="a column of text or numbers",
                got=str(kind),
                remedy="Save the column as texts or numbers, and not as another type.",
            )
        numbers = self._numbers(name, is_class=classes is not None)
        if classes is None:
            return numbers
        class_texts = []
        for number in numbers:
            class_text = class_name(int(number), classes)
            # No class is an empty text, as a missing text is above.
            class_texts.append(class_text or "")
        return _text_array(name, class_texts)

    def _numbers(self, name: str, *, is_class: bool) -> Values:
        """Return a column of numbers; a missing class is -1, and another missing whole number is refused."""
        import pyarrow as pa

        blocks: list[Values] = []
        first = 0
        for batch in self._batches([name], _MAX_BATCH_ROWS):
            with decoding(_KIND):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                if pa.types.is_boolean(column.type):
                    column = column.cast(pa.int64())
                if is_class:
                    # As Hugging Face's own files number a missing class.
                    column = column.fill_null(-1)
                elif column.null_count and pa.types.is_integer(column.type):
                    # Missing numbers in floating point become NaN; whole numbers have none.
                    row = first + _first_missing(column)
                    raise DataError(
                        name,
                        expected="a number in every row",
                        got=f"none in row {row}",
                        remedy="Give every row its value, or leave the row out.",
                    )
                block = column.to_numpy(zero_copy_only=False)
                blocks.append(np.asarray(block))
            first += len(batch)
        if not blocks:
            blocks.append(np.empty(0, np.int64))
        return np.concatenate(blocks)

    def is_text(self, name: str) -> bool:
        """Whether a column holds text, as such, in bytes, or as numbers of the entries of a list of texts."""
        kind = _value_type(self._type(name))
        return _is_text(kind)

    def texts(self, names: Sequence[str], max_bytes: int) -> Iterator[tuple[str | None, ...]]:
        """Yield the rows of some columns as text; None where a cell holds nothing.

        Whole numbers in floating point are written without a fraction, truth as 1 and 0.

        Args:
            names: the names of the columns.
            max_bytes: most that one cell may have.

        Raises:
            DataError: a file that is damaged, more text than the bounds allow, or a column of something else.
        """
        # As a dictionary, so that a text that many rows repeat is in memory once, until its length has been looked at.
        text_names = [name for name in names if self.is_text(name)]
        for batch in self._batches(names, _MAX_BATCH_ROWS, text_names):
            columns = []
            with decoding(_KIND):
                for name in names:
                    texts = _texts(batch.column(name), name, max_bytes)
                    columns.append(texts)
            yield from zip(*columns, strict=True)

    def class_names(self, name: str) -> list[str] | None:
        """Return the names of the classes that a column numbers, as Hugging Face's schema lists them.

        Raises:
            ImageError: a list that is not a list of names, or files that differ.
        """
        feature = self._features().get(name, {})
        if feature.get("_type") != "ClassLabel":
            return None
        names = feature.get("names")
        # Older files state their number alone.
        if names is None:
            return None
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise ImageError(
                Reason.DAMAGED, "class names in the metadata of Hugging Face that are not text"
            )
        return names

    def _features(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what Hugging Face's schema says about each column."""
        features: dict[str, Mapping[str, Any]] | None = None
        for path in self.files:
            with decoding(_KIND), _opened(path) as file:
                metadata = file.schema_arrow.metadata or {}
            features_of_file = _parse_features(metadata.get(_HUGGING_FACE))
            if features is not None and features != features_of_file:
                raise ImageError(Reason.AMBIGUOUS, "files with different metadata of Hugging Face")
            features = features_of_file
        return features or {}

    def _type(self, name: str) -> Any:
        """Return the type of a column, which must be the same in all files."""
        kinds = []
        for path in self.files:
            with decoding(_KIND), _opened(path) as file:
                column = file.schema_arrow.field(name)
                kinds.append(column.type)
        first_kind = kinds[0]
        if any(kind != first_kind for kind in kinds):
            raise ImageError(Reason.AMBIGUOUS, "a column of another type in some of the files")
        return first_kind

    def _batches(
        self,
        names: Sequence[str],
        num: int,
        dictionaries: Sequence[str] = (),
    ) -> Iterator[Any]:
        """Yield some rows of some columns at a time; what a row group takes in memory is looked at first."""
        for path in self.files:
            with decoding(_KIND), _opened(path, dictionaries) as file:
                row_groups = read_footer(path)
                leaves = _leaves_of(file, row_groups, names)
                for number, group in enumerate(row_groups):
                    if group.num_rows == 0:
                        continue
                    _check_row_group(path, group, leaves)
                    yield from file.iter_batches(
                        num,
                        columns=list(names),
                        row_groups=[number],
                        use_threads=False,
                    )


def class_name(number: int, classes: Sequence[str]) -> str | None:
    """Return the name of a class; None for -1, which means no class in Hugging Face's files.

    Raises:
        ImageError: a number that has no name.
    """
    if number == -1:
        return None
    if not 0 <= number < len(classes):
        raise ImageError(Reason.DAMAGED, "a label that has no name in the metadata of Hugging Face")
    return classes[number]


def _text_array(name: str, texts: Sequence[str]) -> Values:
    """Return texts as an array, in which each has the room of the longest."""
    max_length = max(map(len, texts), default=0)
    num_bytes = _CHARACTER_BYTES * max_length * len(texts)
    if num_bytes > MAX_COLUMN_BYTES:
        raise DataError(
            name,
            expected=f"at most {MAX_COLUMN_BYTES} bytes",
            got=f"{len(texts)} entries of {max_length} characters each",
            remedy="Give shorter entries, or divide the data set.",
        )
    return np.array(texts, dtype=np.str_)


def _texts(
    column: Any,
    name: str,
    max_bytes: int,
) -> list[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = _value_type(column.type)
    if _is_text(kind):
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        lengths = pc.binary_length(column.dictionary)
        # None of an empty dictionary.
        longest = pc.max(lengths).as_py() or 0
        if longest > max_bytes:
            raise DataError(
                name,
                expected=f"at most {max_bytes} bytes a cell",
                got=f"a cell of {longest}",
                remedy="Give shorter entries.",
            )
        # The entries that these rows name: a list of them may be much longer than a batch.
        numbers = pc.unique(column.indices).drop_null()
        used_entries = column.dictionary.take(numbers)
        # The cast refuses bytes that are not UTF-8.
        texts = pc.cast(used_entries, pa.large_string())
        text_of_number = dict(zip(numbers.to_pylist(), texts.to_pylist(), strict=True))
        # The number of a missing cell is None, which names no text.
        indices = column.indices.to_pylist()
        return [text_of_number.get(number) for number in indices]
    if not (_is_number(kind) or pa.types.is_null(kind)):
        raise DataError(
            name,
            expected="a column of text or numbers",
            got=str(kind),
            remedy="Save the column as texts or numbers, and not as another type.",
        )
    return [as_text(cell) for cell in column.to_pylist()]


def _parse_features(metadata: bytes | None) -> dict[str, Mapping[str, Any]]:
    if metadata is None:
        return {}
    try:
        document = json.loads(metadata)
        parsed: dict[str, Mapping[str, Any]] = {}
        for name, feature in document["info"]["features"].items():
            if isinstance(feature, dict):
                parsed[name] = feature
        return parsed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ImageError(Reason.DAMAGED, "metadata of Hugging Face that do not parse") from None


def _only_column(names: Sequence[str], meaning: str) -> str | None:
    if len(names) > 1:
        raise ImageError(Reason.AMBIGUOUS, f"several columns that may be the {meaning}: keep one")
    if not names:
        return None
    return names[0]


def _opened(path: Path, dictionaries: Sequence[str] = ()) -> Any:
    import pyarrow.parquet as pq

    # Buffered, so that of a row group no more is in memory than what is decoded.
    return pq.ParquetFile(
        path,
        read_dictionary=list(dictionaries) or None,
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,
        memory_map=False,
        **_METADATA,
    )


def _leaves_of(
    file: Any,
    row_groups: Sequence[RowGroup],
    names: Sequence[str],
) -> dict[int, bool]:
    """Return what `iter_batches` reads of some columns: the schema's leaves, and whether each is inside of lists.

    Leaves are chosen by the schema, as pyarrow chooses them: the path that the footer repeats at each of a row group's
    columns is never looked at there.

    Raises:
        ImageError: row groups that are not as many as pyarrow read, or whose columns are not those of the schema.
    """
    num_leaves = file.metadata.num_columns
    are_complete = all(len(group.chunks) == num_leaves for group in row_groups)
    if len(row_groups) != file.metadata.num_row_groups or not are_complete:
        raise ImageError(Reason.DAMAGED, "a footer of Parquet whose columns differ from its schema")
    leaves = {}
    schema = file.metadata.schema
    for index in range(num_leaves):
        leaf = schema.column(index)
        for column in names:
            # A column of lists or structures is stored as several, named after it.
            if leaf.path == column or leaf.path.startswith(f"{column}."):
                leaves[index] = leaf.max_repetition_level > 0
    return leaves


def _check_row_group(
    path: Path,
    group: RowGroup,
    leaves: Mapping[int, bool],
) -> None:
    """Refuse a row group whose columns take too much memory for its rows.

    Raises:
        ImageError: see `check_pages`; or lists that are longer than pictures are.
    """
    for index, is_list in leaves.items():
        chunk = group.chunks[index]
        num_values = None
        if not is_list:
            # Such a cell is one value, there or missing.
            num_values = group.num_rows
        check_pages(path, chunk, num_values)
        max_values_of_pictures = _MAX_VALUES_PER_BYTE * chunk.packed_bytes
        if chunk.num_values > max(_MAX_VALUES, max_values_of_pictures):
            raise ImageError(Reason.TOO_LARGE, "lists of too many values for their compressed size")


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    checks = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    )
    return any(check(kind) for check in checks)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(check(kind) for check in checks)


def _value_type(kind: Any) -> Any:
    """Return the type of a column's entries, also where it numbers the entries of a list."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    return kind


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    checks = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
    )
    return any(check(kind) for check in checks)


def _numpy_type(kind: Any) -> ValueType:
    import pyarrow as pa

    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ImageError(
            Reason.UNSUPPORTED,
            "a column of images that are neither image files, tensors nor lists of numbers",
        )
    dtype: ValueType = np.dtype(kind.to_pandas_dtype())
    return dtype


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    checks = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
    )
    return any(check(kind) for check in checks)


def _shape_of_first(column: Any) -> Shape:
    """Return the shape of the first row of nested lists."""
    shape: list[int] = []
    while len(column) and _is_list(column.type):
        num_lists = prod(shape) or 1
        column = column.flatten()
        shape.append(len(column) // num_lists)
    return tuple(shape)


def _pictures(
    column: Any,
    dtype: ValueType,
    shape: Shape,
    first: int,
) -> Values:
    import pyarrow as pa

    if isinstance(column.type, pa.FixedShapeTensorType):
        _check_complete(column, first)
        c_order = list(range(len(shape)))
        if column.type.permutation not in (None, c_order):
            raise DataError(
                "images",
                expected="tensors in C order",
                got="tensors in another order",
                remedy="Save the tensors in C order: numpy.ascontiguousarray(images).",
            )
        column = column.storage
    values = column
    for depth, side in enumerate(shape):
        if not _is_list(values.type):
            break  # a tensor's storage is flat
        lists_per_row = prod(shape[:depth]) or 1
        _check_complete(values, first, lists_per_row)
        if not pa.types.is_fixed_size_list(values.type):
            lengths_B = np.asarray(values.value_lengths())
            _check_lengths(lengths_B, side, first, lists_per_row)
        values = values.flatten()
    if _numpy_type(values.type) != dtype:
        expected = f"{dtype}, as in the first row"
        raise DataError("images", expected=expected, got=f"{values.type} in row {first}")
    if values.null_count:
        values_per_row = prod(shape) or 1
        row = first + _first_missing(values) // values_per_row
        raise DataError(
            "images",
            expected="numbers",
            got=f"a missing value in row {row}",
            remedy="Give every row its value, or leave the row out.",
        )
    numbers = np.asarray(values.to_numpy(zero_copy_only=False), dtype)
    return numbers.reshape(len(column), *shape)


def _check_lengths(
    lengths_B: NDArray[np.integer[Any]],
    side: int,
    first: int,
    lists_per_row: int,
) -> None:
    """Refuse lists of another length than in the first row, by the number of their row."""
    wrong_B = np.flatnonzero(lengths_B != side)
    if not wrong_B.size:
        return
    place = int(wrong_B[0])
    length = int(lengths_B[place])
    row = first + place // lists_per_row
    raise DataError(
        "images",
        expected=f"lists of {side}, as in the first row",
        got=f"a list of {length} in row {row}",
        remedy="Give images of one type and one shape; others belong in another data set.",
    )


def _check_complete(
    column: Any,
    first: int,
    entries_per_row: int = 1,
) -> None:
    """Refuse a column without an entry in some row, by the number of the row."""
    if column.null_count:
        row = first + _first_missing(column) // entries_per_row
        raise DataError(
            "images",
            expected="an image in every row",
            got=f"none in row {row}",
            remedy="Give every row its value, or leave the row out.",
        )


def _first_missing(column: Any) -> int:
    """Return the place of the first missing entry of a column that has one."""
    is_missing = column.is_null()
    place: int = is_missing.index(True).as_py()
    return place
