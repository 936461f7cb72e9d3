"""How much memory the pages of a Parquet file take, as their own headers announce: read before the pages are.

A page of some bytes may unpack to gigabytes, and a run of a billion equal values takes ten bytes. The sizes in the
footer are no bound, since nothing but their writer's word joins them to the pages: the headers of pages state what a
reader allocates. They are structures called `PageHeader` in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddm.images.compact_protocol import I32, CompactReader, Structure
from ddm.images.parquet_footer import ColumnChunk
from ddm.images.reasons import ImageError, Reason

MAX_PAGE_BYTES = 1 << 29  # unpacked; writers aim at 1 MB, but put some hundred pictures into a page
_HEADER_BYTES = 1 << 16  # statistics may hold the lowest and the highest value
_SUBJECT = "the header of a page of Parquet"

# Fields of `PageHeader`. Those of data pages are structures, whose first field is the number of values.
_UNPACKED_SIZE = 2
_PACKED_SIZE = 3
_DATA_PAGE = 5
_DATA_PAGE_V2 = 8
_NUM_VALUES = 1
_VALUES = Structure({_NUM_VALUES: I32}, required=frozenset({_NUM_VALUES}))
_PAGE_HEADER = Structure(
    {_UNPACKED_SIZE: I32, _PACKED_SIZE: I32, _DATA_PAGE: _VALUES, _DATA_PAGE_V2: _VALUES},
    required=frozenset({_UNPACKED_SIZE, _PACKED_SIZE}),
)


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


def check_pages(
    path: Path,
    chunk: ColumnChunk,
    num_values: int | None,
) -> None:
    """Refuse a column of a row group that takes more memory than it should.

    Args:
        path: the file.
        chunk: what the footer says about the column.
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


def _pages(path: Path, chunk: ColumnChunk) -> Iterator[PageSize]:
    offset = chunk.offset
    end = offset + chunk.packed_bytes
    with path.open("rb", buffering=0) as file:
        while offset < end:
            file.seek(offset)
            header = file.read(min(_HEADER_BYTES, end - offset))
            reader = CompactReader(header, _SUBJECT)
            page = _read_page_size(reader)
            yield page
            offset += reader.position + page.packed_bytes


def _read_page_size(reader: CompactReader) -> PageSize:
    header = reader.read(_PAGE_HEADER)
    # Of a page that is of both kinds, another reader might take the other one.
    if _DATA_PAGE in header and _DATA_PAGE_V2 in header:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    data_page = header.get(_DATA_PAGE) or header.get(_DATA_PAGE_V2) or {}
    page = PageSize(
        unpacked_bytes=header[_UNPACKED_SIZE],
        packed_bytes=header[_PACKED_SIZE],
        num_values=data_page.get(_NUM_VALUES, 0),
    )
    if min(page.unpacked_bytes, page.packed_bytes, page.num_values) < 0:
        raise ImageError(Reason.DAMAGED, _SUBJECT)
    return page
