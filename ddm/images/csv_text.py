"""The text of a table as offices write it: its encoding, its line ends and its separator, read in bounded memory.

RFC 4180 leaves all three open. UTF-8 and UTF-16 are recognised for certain, by a byte order mark or since no other text
is valid UTF-8. Anything else is read as Windows-1252, which is said, or refused.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from ddm.errors import DataError

MAX_FILE_BYTES = 4 << 30
_MAX_RECORD = 1 << 20  # characters of one row
_HEADER_LINES = 16  # a quoted name of a column may go over several
_BLOCK_BYTES = 1 << 20
_DELIMITERS = (",", ";", "\t", "|")
# Excel writes and obeys a first line that names the separator.
_SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|:^~])"?\s*', re.IGNORECASE)
_SURROGATE = re.compile("[\udc80-\udcff]")
_BEYOND_ASCII = re.compile("[^\0-\x7f\udc80-\udcff]")
_SAVE_AS_UTF8 = "In the program that made it, save it as CSV (UTF-8)."
_EXPECTED = "a CSV in UTF-8"


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV is read.

    Attributes:
        encoding: as Python names it.
        is_assumed: whether nothing but plausibility speaks for the encoding.
        delimiter: what separates cells.
        has_separator_line: whether the first line says nothing but the separator.
    """

    encoding: str
    is_assumed: bool
    delimiter: str
    has_separator_line: bool


def csv_format(path: Path, is_header: Callable[[list[str]], bool]) -> CsvFormat:
    """Find out how a CSV is to be read.

    Args:
        path: the path of the file.
        is_header: whether names of columns are those of a table that can be used: that decides between separators.

    Raises:
        DataError: no text, text in an encoding that cannot be known, or too large a file.
    """
    encoding, is_assumed = _encoding_of(path)
    with _open_lines(path, encoding) as lines:
        first_lines = list(islice(lines, _HEADER_LINES))
    separator = None
    if first_lines:
        separator = _SEPARATOR_LINE.fullmatch(first_lines[0])
    if separator:
        return CsvFormat(
            encoding,
            is_assumed,
            separator[1],
            has_separator_line=True,
        )
    num_columns = {}
    usable = []
    for delimiter in _DELIMITERS:
        header = _header(first_lines, delimiter)
        num_columns[delimiter] = len(header)
        if is_header(header):
            usable.append(delimiter)
    # Of the separators that give a header with known names, that with the most columns.
    most_columns = max(usable or _DELIMITERS, key=lambda delimiter: num_columns[delimiter])
    return CsvFormat(
        encoding,
        is_assumed,
        most_columns,
        has_separator_line=False,
    )


def read_records(path: Path, layout: CsvFormat) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a CSV, the header first, each with the number of its last line.

    Raises:
        DataError: a file that does not parse, a line that is too long, or characters that no text has.
    """
    with _open_lines(path, layout.encoding) as lines:
        if layout.has_separator_line:
            next(lines)
        reader = csv.reader(
            lines,
            delimiter=layout.delimiter,
            # A quote behind a separator and a blank still quotes.
            skipinitialspace=True,
            strict=True,
        )
        try:
            for record in reader:
                yield lines.number, record
                lines.num_characters = 0
        except csv.Error:  # its text may quote a cell
            got = f"a line that does not parse: line {lines.number}"
            remedy = "Correct that line, or export the table again: a quote may be missing."
            raise DataError("table", expected=_EXPECTED, got=got, remedy=remedy) from None


def _header(first_lines: list[str], delimiter: str) -> list[str]:
    reader = csv.reader(first_lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        for record in reader:
            if record:
                return record
    except csv.Error:
        pass
    return []


@contextmanager
def _open_lines(path: Path, encoding: str) -> "Iterator[_BoundedLines]":
    # Without translation of line ends: those inside of quotes belong to a cell, and a lone CR ends a line as well.
    with path.open(encoding=encoding, newline="") as handle:
        yield _BoundedLines(handle)


class _BoundedLines:
    """The lines of a text, each of them bounded, and together those of one record, which quotes may let continue.

    Attributes:
        number: the number of the last line.
        num_characters: since the last record; the reader of records resets it.
    """

    def __init__(self, handle: IO[str]) -> None:
        self._handle = handle
        self.number = 0
        self.num_characters = 0

    def __iter__(self) -> "_BoundedLines":
        return self

    def __next__(self) -> str:
        try:
            line = self._handle.readline(_MAX_RECORD)
        except UnicodeDecodeError:  # its text quotes the file
            raise DataError(
                "table",
                expected=_EXPECTED,
                got="text that is damaged",
                remedy=_SAVE_AS_UTF8,
            ) from None
        if not line:
            raise StopIteration
        self.number += 1
        self.num_characters += len(line)
        if self.num_characters >= _MAX_RECORD:
            raise DataError(
                "table",
                expected=f"rows of fewer than {_MAX_RECORD} characters",
                got=f"line {self.number}",
                remedy="Look at this line: most likely a quote is missing. Then export the table again.",
            )
        if "\0" in line:
            raise DataError(
                "table",
                expected=_EXPECTED,
                got="bytes that are not text",
                remedy=_SAVE_AS_UTF8,
            )
        return line


def _encoding_of(path: Path) -> tuple[str, bool]:
    """Return the encoding of a text, and whether it is assumed.

    The whole file is looked at, once, in blocks: the first letter beyond ASCII may be its last.
    """
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise DataError(
            "table",
            expected=f"at most {MAX_FILE_BYTES} bytes",
            got=f"{num_bytes}",
            remedy="Divide the table, or leave out columns that are not needed.",
        )
    with path.open("rb") as handle:
        start = handle.read(4)
        if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            raise DataError("table", expected=_EXPECTED, got="text in UTF-32", remedy=_SAVE_AS_UTF8)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16", False
        handle.seek(0)
        # Invalid bytes become surrogates, which can be counted; a strict decoder would stop at the first.
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        num_invalid = 0
        num_valid = 0
        has_line_feed = False
        is_windows_1252 = True
        is_filling = True
        block = start
        while block:
            block = handle.read(_BLOCK_BYTES)
            if b"\0" in block:
                got = "bytes that are not text, or UTF-16 without a byte order mark"
                raise DataError("table", expected=_EXPECTED, got=got, remedy=_SAVE_AS_UTF8)
            has_line_feed = has_line_feed or b"\n" in block
            text = decoder.decode(block, final=not block)
            if not text.isascii():
                num_invalid += len(_SURROGATE.findall(text))
                num_valid += len(_BEYOND_ASCII.findall(text))
                is_windows_1252 = is_windows_1252 and _is_windows_1252(block)
                is_filling = is_filling and block.replace(b"\xff", b"").isascii()
    if not num_invalid:
        return "utf-8-sig", False
    # Letters of Windows-1252 are hardly ever valid UTF-8: where many are, this was UTF-8 before it was damaged.
    if num_valid >= num_invalid:
        got = "UTF-8 with invalid bytes between valid ones"
        raise DataError("table", expected=_EXPECTED, got=got, remedy=_SAVE_AS_UTF8)
    # Programs that end lines with CR alone are from the time when the Mac had an encoding of its own; bytes of ones
    # alone are what storage holds where nothing was written.
    if not has_line_feed or not is_windows_1252 or is_filling:
        raise DataError(
            "table",
            expected=_EXPECTED,
            got="text in an unknown encoding",
            remedy=_SAVE_AS_UTF8,
        )
    return "cp1252", True


def _is_windows_1252(block: bytes) -> bool:
    try:
        block.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return True
