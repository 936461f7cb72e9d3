"""Tables of images: a column of paths, and columns of labels, patients, splits and captions; CSV or Parquet.

A table has one reading, or it is refused: no two columns may mean the same, and what is missing is missing in every
column. Rows are streamed, with bounds on what they produce.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddm.errors import DataError
from ddm.images.csv_text import CsvFormat, csv_format, read_records
from ddm.images.names import TABLE_SUFFIXES
from ddm.images.parquet import ParquetTable
from ddm.images.patients import is_missing, visible_text
from ddm.images.reasons import ImageError

ColumnName = Literal["path", "label", "patient", "split", "caption"]

Columns = Mapping[ColumnName, str]
"""Other names of a table's columns, such as ``{"label": "finding"}``."""

# Without case, blanks and punctuation: `Patient ID`, `patient_id` and `PatientID` are one.
_NAMES: dict[ColumnName, tuple[str, ...]] = {
    "path": (
        "path",
        "file",
        "filename",
        "filepath",
        "image",
        "imagepath",
        "imagefile",
        "imagename",
        "imageindex",
    ),
    "label": ("label", "labels", "class"),
    "patient": ("patient", "patients", "patientid", "subject", "subjectid"),
    "split": ("split", "splits", "subset", "partition"),
    "caption": ("caption", "captions", "text"),
}
COLUMNS = tuple(_NAMES)

MAX_ROWS = 10_000_000
MAX_COLUMNS = 16_384  # as many as Excel has
MAX_CELL = 4096  # characters
_MAX_CELL_BYTES = 4 * MAX_CELL
_CORRECT = "Correct that line, or export the table again."
# How Excel writes whole numbers of more than eleven digits.
_ROUNDED = re.compile(r"\d([.,]\d+)?[eE]\+?\d+")
_PUNCTUATION = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table; blanks around cells are gone, and what is missing is None."""

    path: str = field(repr=False)
    label: str | None = field(default=None, repr=False)
    patient: str | None = field(default=None, repr=False)
    split: str | None = field(default=None, repr=False)
    caption: str | None = field(default=None, repr=False)

    @property
    def num_characters(self) -> int:
        """The number of characters in all cells."""
        cells = (self.path, self.label, self.patient, self.split, self.caption)
        return sum(len(cell) for cell in cells if cell is not None)


class Table:
    """A table of paths.

    Args:
        path: the path of a CSV, separated by commas, semicolons, tabs or bars; or of a Parquet file.
        columns: other names of its columns.

    Attributes:
        path: the path of the table.
    """

    def __init__(self, path: Path, columns: Columns | None = None) -> None:
        self.path = path
        self._columns: Columns = columns or {}
        self._num_empty_rows = 0
        self._num_rounded_patients = 0
        self._assumed_encoding = ""
        self._format: tuple[tuple[int, int, int], CsvFormat] | None = None

    def names_paths(self) -> bool:
        """Whether there is a column of paths by its name; false for a file that does not parse."""
        try:
            return self._has_paths(self._header())
        except DataError:
            return False

    def _header(self) -> list[str]:
        if not _is_csv(self.path):
            return sorted(ParquetTable((self.path,)).names)
        how = self._csv_format()
        for _, record in read_records(self.path, how):
            if not _is_empty(record):
                return record
        return []

    def rows(self) -> Iterator[TableRow]:
        """Yield its rows.

        Raises:
            DataError: a file that does not parse, no column of paths, two columns that mean the same, a row without a
                path, a column that is not there, or more than the bounds allow.
        """
        self._num_empty_rows = 0
        self._num_rounded_patients = 0
        if _is_csv(self.path):
            records = self._csv_records()
        else:
            records = self._parquet_records()
        for count, (place, texts) in enumerate(records):
            if count >= MAX_ROWS:
                raise DataError(
                    "table",
                    expected=f"at most {MAX_ROWS} rows",
                    got=f"row {count + 1}",
                    remedy="Divide the table.",
                )
            path = _cell(texts.pop("path"), place)
            if path is None:
                got = f"an empty one in {place}"
                raise DataError("table", expected="a path in every row", got=got, remedy=_CORRECT)
            cells = {meaning: _cell(text, place) for meaning, text in texts.items()}
            visible_cells = {meaning: _visible(cell) for meaning, cell in cells.items()}
            row = TableRow(path, **visible_cells)
            if row.patient is not None and _ROUNDED.fullmatch(row.patient):
                self._num_rounded_patients += 1
            yield row

    def remarks(self) -> list[str]:
        """Return what a person should know about how it was read, after `rows` came to its end."""
        remarks = []
        if self._assumed_encoding:
            remarks.append(
                f"The table is not in UTF-8: it was read as {self._assumed_encoding}. Check its accented letters."
            )
        if self._num_empty_rows:
            remarks.append(f"{self._num_empty_rows} empty rows of the table were skipped.")
        if self._num_rounded_patients:
            remarks.append(
                f"{self._num_rounded_patients} patients are numbers as Excel rounds them, such as 1.23E+12: several "
                "patients may now have the same identifier. Export the identifiers as text."
            )
        return remarks

    def _has_paths(self, header: Sequence[str]) -> bool:
        if "path" in self._columns:
            return self._columns["path"] in header
        return bool(_matching("path", header))

    def _csv_format(self) -> CsvFormat:
        """Return how the CSV is read, which takes a pass over all of it: once, unless it changed."""
        status = self.path.stat()
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._format is None or self._format[0] != state:
            self._format = (state, csv_format(self.path, self._has_paths))
        return self._format[1]

    def _csv_records(self) -> Iterator[tuple[str, dict[ColumnName, str | None]]]:
        how = self._csv_format()
        self._assumed_encoding = ""
        if how.is_assumed:
            self._assumed_encoding = "Windows-1252"
        places: dict[ColumnName, int] = {}
        num_columns = 0
        for line, record in read_records(self.path, how):
            if not places:
                if _is_empty(record):
                    continue
                if len(record) > MAX_COLUMNS:
                    raise DataError(
                        "table",
                        expected=f"at most {MAX_COLUMNS} columns",
                        got=f"{len(record)}",
                        remedy="Leave out columns that are not needed.",
                    )
                num_columns = len(record)
                places = self._choose_columns(record)
                continue
            if _is_empty(record):
                self._num_empty_rows += 1
                continue
            # Such a row lacks a cell or has one too many, and its cells may stand under the wrong columns.
            if len(record) != num_columns:
                got = f"{len(record)} in line {line}"
                raise DataError(
                    "table",
                    expected=f"{num_columns} cells in each row",
                    got=got,
                    remedy=_CORRECT,
                )
            yield f"line {line}", {meaning: record[place] for meaning, place in places.items()}
        if not places:
            raise DataError(
                "table",
                expected="a column called path",
                got="an empty file",
                remedy="Export the table again: its first line names the columns.",
            )

    def _parquet_records(self) -> Iterator[tuple[str, dict[ColumnName, str | None]]]:
        table = ParquetTable((self.path,))
        header = sorted(table.names)
        places = self._choose_columns(header)
        names = [header[place] for place in places.values()]
        meanings = tuple(places)
        for number, texts in enumerate(table.texts(names, _MAX_CELL_BYTES), 1):
            if not any(texts):
                self._num_empty_rows += 1
                continue
            cells = dict(zip(meanings, texts, strict=True))
            yield f"row {number}", cells

    def _choose_columns(self, header: Sequence[str]) -> dict[ColumnName, int]:
        """Return the place of the column of each meaning; of those that were named, all must be there."""
        places: dict[ColumnName, int] = {}
        for meaning in COLUMNS:
            place = self._choose_column(meaning, header)
            if place is not None:
                places[meaning] = place
        if "path" not in places:
            got = f"{len(header)} columns with other names"
            remedy = "Its first line must name the columns. Name the column of paths with --column path=NAME."
            raise DataError("table", expected="a column called path", got=got, remedy=remedy)
        return places

    def _choose_column(self, meaning: ColumnName, header: Sequence[str]) -> int | None:
        name = self._columns.get(meaning)
        if name is None:
            matches = _matching(meaning, header)
        else:
            matches = [
                place for place, column in enumerate(header) if column.strip() == name.strip()
            ]
            if not matches:
                remedy = (
                    "Use a name from the first line of the table, such as --column label=finding."
                )
                expected = f"a column of the table for {meaning}"
                raise DataError(
                    "--column",
                    expected=expected,
                    got="a name that is not in the table",
                    remedy=remedy,
                )
        if len(matches) > 1:
            got = " and ".join(header[place].strip()[:64] for place in matches)
            remedy = (
                f"Choose one of them with --column {meaning}=NAME, or rename or remove the others."
            )
            raise DataError(
                "table",
                expected=f"one column that means {meaning}",
                got=got,
                remedy=remedy,
            )
        if not matches:
            return None
        return matches[0]


def is_table(path: Path, columns: Columns) -> bool:
    """Whether a file is a table of paths: a CSV, or a Parquet file without images of its own."""
    if _is_csv(path):
        return True
    if path.suffix.lower() != ".parquet":
        return False
    table = ParquetTable((path,))
    if "path" in columns and columns["path"] not in table.names:
        return False
    if "path" not in columns and not _matching("path", sorted(table.names)):
        return False
    return not _holds_images(table)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES


def _holds_images(table: ParquetTable) -> bool:
    """Whether a column holds images, as numbers or as the content of files; text in it is paths."""
    try:
        column = table.image_column
    except ImageError:  # several that may be it
        return True
    return column is not None and not (table.is_text(column) and not table.is_encoded(column))


def _matching(meaning: ColumnName, header: Sequence[str]) -> list[int]:
    """Return the places of the columns that have a meaning by their names."""
    return [
        place
        for place, name in enumerate(header)
        if _PUNCTUATION.sub("", name).casefold() in _NAMES[meaning]
    ]


def _is_empty(record: Sequence[str]) -> bool:
    return not any(cell and not cell.isspace() for cell in record)


def _cell(text: str | None, place: str) -> str | None:
    """Return what a cell says; None where it is empty or one of the words for what is missing."""
    if text is None:
        return None
    if len(text) > MAX_CELL:
        raise DataError(
            "table",
            expected=f"at most {MAX_CELL} characters a cell",
            got=f"more in {place}",
            remedy="Shorten this cell.",
        )
    plain = text.strip()
    if is_missing(visible_text(plain)):
        return None
    return plain


def _visible(cell: str | None) -> str | None:
    """Return a cell with single blanks and without invisible characters, which names of files alone may need."""
    if cell is None:
        return None
    return " ".join(visible_text(cell).split())
