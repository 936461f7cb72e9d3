"""How much memory the pages of a Parquet file take, as their own headers announce: read before the pages are.

A page of some bytes may unpack to gigabytes, and a run of a billion equal values takes ten bytes. The sizes in the
footer are no bound, since nothing but their writer's word joins them to the pages: the headers of pages state what a
reader allocates. They are structures of Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), with the fields of `PageHeader` in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddm.images.reasons import ImageError, Reason

MAX_PAGE_BYTES = 1 << 29  # unpacked; writers aim at 1 MB, but put some hundred pictures into a page
_HEADER_BYTES = 1 << 16  # statistics may hold the lowest and the highest value
_MAX_DEPTH = 8

# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
# Fields of `PageHeader`. Those of data pages are structures, whose first field is the number of values.
_UNPACKED_SIZE = 2
_PACKED_SIZE = 3
_DATA_PAGE = 5
_DATA_PAGE_V2 = 8
_NUM_VALUES = 1
_LONG_LIST = 15  # in place of a size that follows by itself


@dataclass(frozen=True)
class PageSize:
    """The sizes of one page.

    Attributes:
        unpacked_bytes: in memory.
        packed_bytes: in the file.
        num_values: how many values it holds, with those that are missing; 0 of a dictionary.
    """

    unpacked_bytes: int
    packed_bytes: int
    num_values: int


def check_pages(path: Path, chunk: Any, num_values: int | None) -> None:
    """Refuse a column of a row group that takes more memory than it should.

    Args:
        path: the file.
        chunk: what the footer says of the column, `pyarrow.parquet.ColumnChunkMetaData`.
        num_values: how many values there must be; None where any number is right.

    Raises:
        ImageError: a page that is too large, or another number of values.
    """
    total = 0
    for page in _pages(path, chunk):
        if page.unpacked_bytes > MAX_PAGE_BYTES:
            raise ImageError(
                Reason.TOO_LARGE, f"a page of Parquet of more than {MAX_PAGE_BYTES} bytes"
            )
        total += page.num_values
    if total != chunk.num_values or (num_values is not None and total != num_values):
        raise ImageError(
            Reason.DAMAGED, "a column of Parquet with more or fewer values than its rows need"
        )


def _pages(path: Path, chunk: Any) -> Iterator[PageSize]:
    offset = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        offset = min(offset, chunk.dictionary_page_offset)
    end = offset + chunk.total_compressed_size
    with path.open("rb", buffering=0) as file:
        while offset < end:
            file.seek(offset)
            reader = _CompactReader(file.read(min(_HEADER_BYTES, end - offset)))
            try:
                page = reader.page()
            except (IndexError, RecursionError):
                raise ImageError(Reason.DAMAGED, "the header of a page of Parquet") from None
            if page.packed_bytes < 0 or page.unpacked_bytes < 0 or page.num_values < 0:
                raise ImageError(Reason.DAMAGED, "the header of a page of Parquet")
            yield page
            offset += reader.position + page.packed_bytes


class _CompactReader:
    """Reads structures of Thrift's compact protocol: whole numbers in them, and the places of anything else.

    Whatever ends early is an IndexError, and what is nested too deep a RecursionError.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def page(self) -> PageSize:
        """Read a `PageHeader`."""
        header = self._structure(0)
        data_page = header.get(_DATA_PAGE, {})
        if _DATA_PAGE_V2 in header:
            if data_page:
                raise IndexError
            data_page = header[_DATA_PAGE_V2]
        sizes = (header.get(_UNPACKED_SIZE, 0), header.get(_PACKED_SIZE, 0))
        num_values = -1
        if isinstance(data_page, dict):
            num_values = data_page.get(_NUM_VALUES, 0)
        numbers = [number if isinstance(number, int) else -1 for number in (*sizes, num_values)]
        return PageSize(*numbers)

    def _structure(self, depth: int) -> dict[int, Any]:
        """Read a structure: its whole numbers and structures by the number of their field, and None for others."""
        if depth > _MAX_DEPTH:
            raise RecursionError
        fields: dict[int, Any] = {}
        field = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            # The upper half of a byte is the step from the last field, or 0 before a number of its own.
            step = head >> 4
            if step:
                field = field + step
            else:
                field = self._signed()
            # Of a field that comes twice, another reader might take the other one.
            if field in fields:
                raise IndexError
            fields[field] = self._value(head & 0x0F, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind == _STRUCT:
            return self._structure(depth + 1)
        if kind == _BYTE:
            self._advance(1)
        elif kind == _DOUBLE:
            self._advance(8)
        elif kind == _BINARY:
            self._advance(self._unsigned())
        elif kind in (_LIST, _SET):
            self._skip_list(depth + 1)
        elif kind not in (_TRUE, _FALSE):  # a map, of which page headers have none, or no type
            raise IndexError
        return None

    def _skip_list(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise RecursionError
        head = self._byte()
        kind = head & 0x0F
        if kind in (_TRUE, _FALSE):
            kind = _BYTE  # in a list, true and false take a byte
        size = head >> 4
        if size == _LONG_LIST:
            size = self._unsigned()
        for _ in range(size):
            self._value(kind, depth)

    def _advance(self, num: int) -> None:
        self.position += num
        if self.position > len(self._data):
            raise IndexError

    def _byte(self) -> int:
        value = self._data[self.position]
        self.position += 1
        return value

    def _unsigned(self) -> int:
        value = 0
        # Seven bits a byte: 64 bits take ten bytes at most.
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise IndexError

    def _signed(self) -> int:
        value = self._unsigned()
        # Zigzag: 0, -1, 1, -2 are stored as 0, 1, 2, 3.
        return (value >> 1) ^ -(value & 1)
