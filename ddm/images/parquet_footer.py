"""Where the columns of a Parquet file are, as its footer says: read without pyarrow.

pyarrow's objects for a column in the footer (`pyarrow.parquet.ColumnChunkMetaData`) are made by code in C++ whose
exceptions nothing catches: a footer that contradicts itself ends the process. The structures are `FileMetaData`,
`RowGroup` and `ColumnChunk` in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddm.errors import DataError
from ddm.images.compact_protocol import BINARY, I32, I64, STRUCT, CompactReader, ListOf, Structure
from ddm.images.reasons import ImageError, Reason

MAX_FOOTER_BYTES = 1 << 26
"""The most that a footer may have: a column takes some hundred bytes of it in each row group."""

MAX_ENTRIES = 1 << 18
"""The most entries that a list of the footer may have, and that row groups and their columns may be together."""

_SUBJECT = "the footer of Parquet"
_MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_TAIL_BYTES = 8  # the footer's length and the magic number

# Fields by their numbers in the structure. Lists that nobody reads are here for the types of their elements alone.
# SizeStatistics and GeospatialStatistics
_REPETITION_LEVELS = 2
_DEFINITION_LEVELS = 3
_GEOSPATIAL_TYPES = 2
# ColumnMetaData
_ENCODINGS = 2
_PATH = 3
_NUM_VALUES = 5
_PACKED_BYTES = 7
_COLUMN_KEY_VALUES = 8
_DATA_OFFSET = 9
_DICTIONARY_OFFSET = 11
_ENCODING_STATISTICS = 13
_SIZE_STATISTICS = 16
_GEOSPATIAL_STATISTICS = 17
# ColumnChunk
_COLUMN_METADATA = 3
_COLUMN_ENCRYPTION = 8
# RowGroup
_COLUMNS = 1
_GROUP_NUM_ROWS = 3
_SORTING_COLUMNS = 4
# FileMetaData
_SCHEMA = 2
_FILE_NUM_ROWS = 3
_ROW_GROUPS = 4
_FILE_KEY_VALUES = 5
_COLUMN_ORDERS = 7
_FILE_ENCRYPTION = 8

_COLUMN_LAYOUT = Structure(
    {
        _ENCODINGS: ListOf(I32),
        _PATH: ListOf(BINARY),
        _NUM_VALUES: I64,
        _PACKED_BYTES: I64,
        _COLUMN_KEY_VALUES: ListOf(STRUCT),
        _DATA_OFFSET: I64,
        _DICTIONARY_OFFSET: I64,
        _ENCODING_STATISTICS: ListOf(STRUCT),
        _SIZE_STATISTICS: Structure(
            {_REPETITION_LEVELS: ListOf(I64), _DEFINITION_LEVELS: ListOf(I64)}
        ),
        _GEOSPATIAL_STATISTICS: Structure({_GEOSPATIAL_TYPES: ListOf(I32)}),
    },
    required=frozenset({_NUM_VALUES, _PACKED_BYTES, _DATA_OFFSET}),
)
_CHUNK_LAYOUT = Structure({_COLUMN_METADATA: _COLUMN_LAYOUT, _COLUMN_ENCRYPTION: Structure({})})
_GROUP_LAYOUT = Structure(
    {
        _COLUMNS: ListOf(_CHUNK_LAYOUT),
        _GROUP_NUM_ROWS: I64,
        _SORTING_COLUMNS: ListOf(STRUCT),
    },
    required=frozenset({_COLUMNS, _GROUP_NUM_ROWS}),
)
_FOOTER_LAYOUT = Structure(
    {
        _SCHEMA: ListOf(STRUCT),
        _FILE_NUM_ROWS: I64,
        _ROW_GROUPS: ListOf(_GROUP_LAYOUT),
        _FILE_KEY_VALUES: ListOf(STRUCT),
        _COLUMN_ORDERS: ListOf(STRUCT),
        _FILE_ENCRYPTION: Structure({}),
    },
    required=frozenset({_FILE_NUM_ROWS, _ROW_GROUPS}),
)


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of a row group.

    Attributes:
        num_values: the number of values that it holds, with those that are missing.
        offset: the offset of its first page in the file.
        packed_bytes: of all its pages, with their headers.
    """

    num_values: int
    offset: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group.

    Attributes:
        num_rows: the number of rows that it holds.
        chunks: its columns, in the order of the schema's leaves.
    """

    num_rows: int
    chunks: tuple[ColumnChunk, ...]


def footer_place(path: Path) -> tuple[int, int]:
    """Return where a file's footer begins and ends.

    Raises:
        DataError: a file without one, or one that is encrypted or too large.
    """
    with path.open("rb", buffering=0) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        if num_bytes < len(_MAGIC) + _TAIL_BYTES:
            raise _no_footer()
        end = file.seek(num_bytes - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
    magic = tail[4:]
    if magic == _ENCRYPTED_MAGIC:
        raise _encrypted()
    if magic != _MAGIC:
        raise _no_footer()
    footer_bytes = int.from_bytes(tail[:4], "little")
    if footer_bytes > MAX_FOOTER_BYTES:
        raise ImageError(
            Reason.TOO_LARGE, f"a footer of Parquet of more than {MAX_FOOTER_BYTES} bytes"
        )
    if footer_bytes > end - len(_MAGIC):
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    return end - footer_bytes, end


def read_footer(path: Path) -> tuple[RowGroup, ...]:
    """Return the row groups of a file.

    Raises:
        DataError: see `footer_place`; or a footer that is damaged or contradicts itself.
    """
    start, end = footer_place(path)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        reader = CompactReader(file.read(end - start), _SUBJECT, MAX_ENTRIES)
    footer = reader.read(_FOOTER_LAYOUT)
    if _FILE_ENCRYPTION in footer:
        raise _encrypted()
    row_groups = tuple(_row_group(fields, start) for fields in footer[_ROW_GROUPS])
    num_rows = sum(group.num_rows for group in row_groups)
    if num_rows != footer[_FILE_NUM_ROWS]:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    return row_groups


def _row_group(fields: dict[int, Any], max_end: int) -> RowGroup:
    num_rows = fields[_GROUP_NUM_ROWS]
    if num_rows < 0:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    chunks = tuple(_chunk(chunk, max_end) for chunk in fields[_COLUMNS])
    return RowGroup(num_rows, chunks)


def _chunk(fields: dict[int, Any], max_end: int) -> ColumnChunk:
    """Return a column of a row group, whose pages lie before the footer."""
    if _COLUMN_ENCRYPTION in fields:
        raise _encrypted()
    column = fields.get(_COLUMN_METADATA)
    if column is None:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    num_values = column[_NUM_VALUES]
    packed_bytes = column[_PACKED_BYTES]
    offset = column[_DATA_OFFSET]
    # As pyarrow has it: some writers put 0 where there is no dictionary, or have one after the first page.
    dictionary_offset = column.get(_DICTIONARY_OFFSET, 0)
    if dictionary_offset > 0:
        offset = min(offset, dictionary_offset)
    smallest = min(num_values, packed_bytes, offset, dictionary_offset)
    if smallest < 0 or offset + packed_bytes > max_end:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    return ColumnChunk(num_values, offset, packed_bytes)


def _no_footer() -> DataError:
    got = "a file that is cut short or of another kind"
    return DataError(
        "data file",
        expected="a Parquet file",
        got=got,
        remedy="Copy the file again from where it came, or save it again in the program that made it.",
    )


def _encrypted() -> ImageError:
    return ImageError(Reason.UNSUPPORTED, "an encrypted Parquet file: decrypt it first")
