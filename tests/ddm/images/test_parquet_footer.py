"""The footer of Parquet, read without pyarrow, whose own objects end the process where a footer contradicts itself."""

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm.errors import DataError
from ddm.images.parquet import ParquetTable
from ddm.images.parquet_footer import RowGroup, read_footer
from ddm.images.reasons import ImageError, Reason
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.errors import has_subject

TAIL_BYTES = 8

# Reads all columns of each file that it is given, and prints what came of it.
READ_ALL = """
import sys
from pathlib import Path
from ddm.errors import DataError
from ddm.images.parquet import ParquetTable

def read_all(path):
    outcomes = set()
    try:
        table = ParquetTable((path,))
        for name in sorted(table.names):
            try:
                for _ in table.rows([name]):
                    pass
                outcomes.add("rows")
            except DataError:
                outcomes.add("error")
    except DataError:
        outcomes.add("error")
    return " ".join(sorted(outcomes))
"""
READ_FILES = (
    READ_ALL
    + """
for path in sys.argv[1:]:
    print(read_all(Path(path)))
"""
)
# Flips each bit of the footer in turn.
READ_FLIPPED = (
    READ_ALL
    + """
path = Path(sys.argv[1])
whole = path.read_bytes()
start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
num_errors = 0
for place in range(start, len(whole)):
    for bit in range(8):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        num_errors += "error" in read_all(path)
print(num_errors)
"""
)


def honest_table() -> pa.Table:
    """Columns of every kind that pyarrow stores in its own way."""
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((30, 4, 5), np.uint8))
    files = pa.array(
        [{"bytes": b"x" * i, "path": None} for i in range(30)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    nested = pa.array([[[i], [i, None], []] for i in range(30)], pa.list_(pa.list_(pa.int32())))
    maps = pa.array([[("a", i)] for i in range(30)], pa.map_(pa.string(), pa.int32()))
    return pa.table(
        {
            "image": images,
            "file": files,
            "nested": nested,
            "map": maps,
            "class": pa.array(["a", "b", None] * 10).dictionary_encode(),
            "text": [f"text {i}" for i in range(30)],
            "day": pa.array([datetime.date(2020, 1, 1)] * 30),
            "truth": [True, None, False] * 10,
            "nothing": pa.nulls(30),
        }
    )


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, **options)
    return path


def small(path: Path) -> Path:
    """Two rows of text without what Arrow says of its schema."""
    table = pa.table({"image": ["a", "b"], "label": ["1", "2"]})
    return write(path, table, store_schema=False, compression="none")


def change_footer(path: Path, old: bytes, new: bytes, place: int = 0) -> Path:
    """Replace bytes of the footer that are there, after skipping as many of their places, and state its new length."""
    whole = path.read_bytes()
    start = len(whole) - TAIL_BYTES - int.from_bytes(whole[-TAIL_BYTES:-4], "little")
    footer = whole[start:-TAIL_BYTES]
    position = -1
    for _ in range(place + 1):
        position = footer.index(old, position + 1)
    footer = footer[:position] + new + footer[position + len(old) :]
    path.write_bytes(whole[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def python(script: str, *paths: Path) -> list[str]:
    """Run a script in a process of its own, which must end by itself, and return the lines that it prints."""
    command = [sys.executable, "-c", script, *map(str, paths)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_footers_of_honest_files_read_as_pyarrow_reads_them(tmp_path: Path) -> None:
    options: tuple[dict[str, Any], ...] = (
        {},
        {"row_group_size": 7},
        {"use_dictionary": False, "write_statistics": False},
        {"write_page_index": True, "data_page_version": "2.0"},
        {"compression": "none", "store_schema": False, "version": "1.0"},
        {"sorting_columns": [pq.SortingColumn(0)], "write_page_checksum": True},
        {"bloom_filter_options": {"text": True}},
    )
    for written in options:
        with case(written):
            path = write(tmp_path / "a.parquet", honest_table(), **written)
            metadata = pq.ParquetFile(path).metadata
            groups = read_footer(path)
            assert len(groups) == metadata.num_row_groups
            for number, group in enumerate(groups):
                check_row_group(group, metadata.row_group(number))
            table = ParquetTable((path,))
            names = sorted(table.names)
            assert len(list(table.rows(names))) == table.num_rows == 30


def check_row_group(actual: RowGroup, expected: Any) -> None:
    assert actual.num_rows == expected.num_rows
    assert len(actual.chunks) == expected.num_columns > 10
    for index, chunk in enumerate(actual.chunks):
        column = expected.column(index)
        offset = column.data_page_offset
        if column.has_dictionary_page:
            offset = min(offset, column.dictionary_page_offset)
        assert chunk.offset == offset
        assert chunk.num_values == column.num_values
        assert chunk.packed_bytes == column.total_compressed_size


def test_a_footer_that_contradicts_itself_is_an_error_and_ends_no_process(tmp_path: Path) -> None:
    # The schema says that the column has a value in each row (field 3 is 0, not 1), the size statistics of its pages
    # have a place for missing ones. pyarrow's `row_group.column` ends the process with "Definition level histogram
    # size mismatch".
    path = small(tmp_path / "a.parquet")
    honest = small(tmp_path / "b.parquet")
    change_footer(path, b"\x25\x02\x18\x05image", b"\x25\x00\x18\x05image")
    assert python(READ_FILES, path, honest) == ["error rows", "rows"]


def test_no_flipped_bit_of_a_footer_ends_a_process(tmp_path: Path) -> None:
    path = small(tmp_path / "a.parquet")
    (num_errors,) = python(READ_FLIPPED, path)
    assert int(num_errors) > 500


def test_pages_are_measured_whatever_the_footer_calls_their_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyarrow chooses columns by the schema, and never looks at the path that the row group repeats.
    images = pa.table({"image": pa.array([bytes(100_000)])})
    path = write(tmp_path / "a.parquet", images, store_schema=False)
    change_footer(path, b"\x05image", b"\x05other", place=1)
    monkeypatch.setattr("ddm.images.parquet_pages.MAX_PAGE_BYTES", 99_999)
    with pytest.raises(ImageError) as caught:
        list(ParquetTable((path,)).rows(["image"]))
    assert caught.value.reason == Reason.TOO_LARGE
    monkeypatch.undo()
    assert len(list(ParquetTable((path,)).rows(["image"]))) == 1


def test_a_few_bytes_that_announce_millions_of_columns_take_no_memory(tmp_path: Path) -> None:
    # One element of a schema, no rows, and a row group with a list of four million structures, as a number of seven
    # bits a byte. pyarrow alone takes 2.8 GB before it finds that they are not there.
    schema = b"\x19\x1c" + b"\x48\x01r\x00"
    columns = b"\x19\xfc\xff\xff\xff\x01"
    footer = b"\x15\x02" + schema + b"\x16\x00" + b"\x19\x1c" + columns
    for following in (0, 1 << 22):
        path = tmp_path / "a.parquet"
        whole = footer + bytes(following)
        path.write_bytes(b"PAR1" + whole + len(whole).to_bytes(4, "little") + b"PAR1")
        outcome = attempt(lambda path=path: ParquetTable((path,)), mib=64, cpu_s=2)
        assert outcome.error == "ImageError", outcome
        assert outcome.mib < 64


def test_footers_that_are_encrypted_too_long_or_nonsense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    honest = small(path).read_bytes()
    start = len(honest) - TAIL_BYTES - int.from_bytes(honest[-TAIL_BYTES:-4], "little")

    def refuse(data: bytes, reason: Reason) -> None:
        path.write_bytes(data)
        with pytest.raises(ImageError) as caught:
            ParquetTable((path,))
        assert caught.value.reason == reason

    refuse(honest[:-4] + b"PARE", Reason.UNSUPPORTED)
    # A footer in plain text of an encrypted file: field 8, which follows field 7, is the algorithm.
    path.write_bytes(honest)
    change_footer(
        path, honest[start:-TAIL_BYTES], honest[start : -TAIL_BYTES - 1] + b"\x1c\x1c\x00\x00\x00"
    )
    refuse(path.read_bytes(), Reason.UNSUPPORTED)
    refuse(honest[:-TAIL_BYTES] + len(honest).to_bytes(4, "little") + b"PAR1", Reason.DAMAGED)
    # Fewer rows in the file than in its row group: field 3 of the file comes first.
    path.write_bytes(honest)
    change_footer(path, b"\x16\x04", b"\x16\x02")
    refuse(path.read_bytes(), Reason.DAMAGED)
    for data in (b"", b"PAR1", honest[:-1], b"GIF8" * 100):
        path.write_bytes(data)
        with pytest.raises(DataError, check=has_subject("data file")):
            ParquetTable((path,))
    for limit in ("MAX_FOOTER_BYTES", "MAX_ENTRIES"):
        with monkeypatch.context() as patch, case(limit):
            patch.setattr(f"ddm.images.parquet_footer.{limit}", 2)
            refuse(honest, Reason.TOO_LARGE)
    path.write_bytes(honest)
    assert ParquetTable((path,)).num_rows == 2
