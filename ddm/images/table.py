"""Tables of images: a column of paths, and columns of labels, patients, splits and captions; CSV or Parquet."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from ddm.errors import DataError

ColumnName = Literal["path", "label", "patient", "split", "caption"]

Columns = Mapping[ColumnName, str]
"""Other names of a table's columns, such as ``{"label": "finding"}``."""
_NAMES: dict[ColumnName, tuple[str, ...]] = {  # the first is the name that this project writes
    "path": ("path", "file", "filename", "image"),
    "label": ("label", "class"),
    "patient": ("patient", "patient_id"),
    "split": ("split",),
    "caption": ("caption", "text"),
}
COLUMNS = tuple(_NAMES)
_ENDINGS = (".csv", ".tsv")
_MAX_CELL = 4096  # characters
_MAX_CELL_BYTES = 4 * _MAX_CELL
_HEAD = 1 << 16


@dataclass(frozen=True)
class Row:
    """One row of a table; blanks around cells are gone, and what was blank is None."""

    path: str = field(repr=False)
    label: str | None = field(default=None, repr=False)
    patient: str | None = field(default=None, repr=False)
    split: str | None = field(default=None, repr=False)
    caption: str | None = field(default=None, repr=False)


def is_table(data: Path, columns: Columns) -> bool:
    """Whether a file is a table of paths: a CSV, or a Parquet file without images of its own."""
    if data.suffix.lower() in _ENDINGS:
        return True
    if data.suffix.lower() != ".parquet":
        return False
    from ddm.images.parquet import ParquetTable

    names = ParquetTable([data]).names
    return _column("path", sorted(names), columns) is not None and not _holds_images(data, names)


def read_table(data: Path, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        data: a CSV, separated by commas, semicolons or tabs, in UTF-8; or a Parquet file.
        columns: other names of its columns.

    Raises:
        DataError: a file that does not parse, no column of paths, a row without one, or a column that is not there.
    """
    rows = _csv_rows(data, columns) if data.suffix.lower() in _ENDINGS else _parquet_rows(data, columns)
    for number, cells in enumerate(rows, 1):
        path = cells.pop("path", None)
        if not path:
            raise DataError("table", expected="a path in every row", got=f"an empty one in row {number}")
        yield Row(path, **cells)


def _holds_images(data: Path, names: frozenset[str]) -> bool:
    if "image" not in names:
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pq.read_schema(data).field("image").type
    return not (pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _column(meaning: ColumnName, header: list[str], columns: Columns) -> str | None:
    """Return the name of a column in the table; one that was asked for must be there."""
    if meaning in columns:
        if columns[meaning] not in header:
            expected, got = f"a column of the table for {meaning}", "a name that it does not have"
            remedy = "Name it as the first line of the table does, such as --column label=finding."
            raise DataError("--column", expected=expected, got=got, remedy=remedy)
        return columns[meaning]
    lowered = {name.strip().lower(): name for name in header}
    return next((lowered[name] for name in _NAMES[meaning] if name in lowered), None)


def _chosen(header: list[str], columns: Columns) -> dict[str, str]:
    found = {meaning: _column(meaning, header, columns) for meaning in _NAMES}
    if found["path"] is None:
        got = f"{len(header)} columns with other names"
        remedy = "Name the column that holds the paths, such as --column path=NAME."
        raise DataError("table", expected="a column called path", got=got, remedy=remedy)
    return {meaning: name for meaning, name in found.items() if name is not None}


def _csv_rows(data: Path, columns: Columns) -> Iterator[dict[str, str | None]]:
    try:
        with data.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, delimiter=_delimiter(handle), strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise DataError("table", expected="columns of different names", got="two columns of one name")
            places = {meaning: header.index(name) for meaning, name in _chosen(header, columns).items()}
            for number, row in enumerate(reader, 1):
                if not row:
                    continue
                if len(row) != len(header):
                    got = f"{len(row)} in row {number}"
                    raise DataError("table", expected=f"{len(header)} cells in each row", got=got)
                yield {meaning: _cell(row[place], number) for meaning, place in places.items()}
    except (csv.Error, UnicodeDecodeError) as error:  # their texts may quote a cell
        got = "a file that does not parse" if isinstance(error, csv.Error) else "a file in another encoding"
        raise DataError("table", expected="a CSV in UTF-8", got=got) from None


def _delimiter(handle: IO[str]) -> str:
    """Return what separates the names of the first line."""
    first = handle.readline(_HEAD)
    handle.seek(0)
    return max(",;\t", key=first.count)


def _parquet_rows(data: Path, columns: Columns) -> Iterator[dict[str, str | None]]:
    from ddm.images.parquet import ParquetTable

    table = ParquetTable([data])
    chosen = _chosen(sorted(table.names), columns)
    cells = {meaning: table.cells(name, _MAX_CELL_BYTES).tolist() for meaning, name in chosen.items()}
    for number in range(table.num_rows):
        yield {meaning: _cell(_written(column[number]), number + 1) for meaning, column in cells.items()}


def _written(value: object) -> str:
    """Return a cell as text; a whole number in floating point as a whole number, and none where there is none."""
    if isinstance(value, float):
        return "" if value != value else str(int(value)) if value.is_integer() else str(value)
    return str(value)


def _cell(text: str, number: int) -> str | None:
    if len(text) > _MAX_CELL:
        raise DataError("table", expected=f"at most {_MAX_CELL} characters a cell", got=f"more in row {number}")
    return text.strip() or None
