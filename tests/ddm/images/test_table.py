"""Tables as offices write them: one reading, or a refusal that says why."""

import codecs
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm.errors import DataError
from ddm.images import csv_text
from ddm.images import table as table_module
from ddm.images.table import Columns, Table, TableRow, is_table
from tests.support.bounded import attempt
from tests.support.case import case

ROWS = [TableRow("img/0.png", "normal", "007"), TableRow("img/1.png", "nodule", "7")]
CSV = "path,patient,label\nimg/0.png,007,normal\nimg/1.png,7,nodule\n"


def read(path: Path, data: bytes | str, columns: Columns | None = None) -> list[TableRow]:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(Table(path, columns).rows())


def refusal(path: Path, data: bytes | str, columns: Columns | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read(path, data, columns)
    return f"{caught.value} {caught.value.remedy}"


def test_separators_line_ends_and_encodings_of_offices_are_read_alike(tmp_path: Path) -> None:
    semicolons = CSV.replace(",", ";")
    files = {
        "commas": CSV.encode(),
        "byte order mark": codecs.BOM_UTF8 + CSV.encode(),
        "semicolons": semicolons.encode(),
        "tabs": CSV.replace(",", "\t").encode(),
        "bars": CSV.replace(",", "|").encode(),
        "CRLF": CSV.replace("\n", "\r\n").encode(),
        "CR": CSV.replace("\n", "\r").encode(),
        "no line end at the end": CSV.rstrip("\n").encode(),
        "separator named": b"sep=;\r\n" + semicolons.encode(),
        "separator named in quotes": b'"sep=;"\n' + semicolons.encode(),
        "separator named in capitals": b"SEP=,\n" + CSV.encode(),
        "separator named after a mark": codecs.BOM_UTF8 + b"sep=;\n" + semicolons.encode(),
        "UTF-16, little endian": CSV.encode("utf-16"),
        "UTF-16, big endian": codecs.BOM_UTF16_BE + CSV.encode("utf-16-be"),
        "UTF-16, CRLF, tabs": CSV.replace(",", "\t").replace("\n", "\r\n").encode("utf-16"),
        "blanks around cells": CSV.replace(",", " , ").encode(),
        "quotes": CSV.replace("img/0.png", '"img/0.png"').encode(),
        "empty lines before the header": b"\n\n" + CSV.encode(),
        "a comma in a quoted name": (
            b'"a, b";path;patient;label\n1;img/0.png;007;normal\n2;img/1.png;7;nodule\n'
        ),
        "commas in cells of semicolons": b"path;patient;label;size\nimg/0.png;007;normal;1,5\nimg/1.png;7;nodule;2,5\n",
        "other names": b"Image Index,Patient ID,Class\nimg/0.png,007,normal\nimg/1.png,7,nodule\n",
        "names of Hugging Face": b"file_name,subject_id,labels\nimg/0.png,007,normal\nimg/1.png,7,nodule\n",
    }
    for name, data in files.items():
        with case(name):
            assert read(tmp_path / "table.csv", data) == ROWS


def test_windows_1252_is_read_and_said_and_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = Table(path)
    path.write_bytes("path,label\na.png,Gefäß\nb.png,Übersicht\n".encode("cp1252"))
    assert [row.label for row in table.rows()] == ["Gefäß", "Übersicht"]
    assert any("Windows-1252" in remark for remark in table.remarks())
    path.write_bytes("path,label\na.png,Gefäß\n".encode())
    assert [row.label for row in table.rows()] == ["Gefäß"] and not table.remarks()
    late = "path,label\n" + "a.png,x\n" * 200_000 + "b.png,Gefäß\n"
    path.write_bytes(late.encode("cp1252"))
    assert list(table.rows())[-1].label == "Gefäß"
    refused = {
        "UTF-16 without a mark": CSV.encode("utf-16-le"),
        "UTF-32": CSV.encode("utf-32"),
        "UTF-8 with a byte between": "path,label\na.png,äöü\n".encode() + b"b.png,\xe4\n",
        "UTF-8 that is cut": "path,label\na.png,äöü\nb.png,ß".encode()[:-1],
        "bytes without a letter in Windows-1252": b"path,label\na.png,\x81\x8d\n",
        "an old Macintosh": "path,label\ra.png,Gefäß\r".encode("mac-roman"),
        "nothing but ones": b"path\n\xff\n",
        "zeros": b"path,label\na.png,x\n" + bytes(1000),
        "UTF-16 that is cut": CSV.encode("utf-16")[:-1],
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    }
    for name, data in refused.items():
        with case(name):
            text = refusal(path, data)
            assert "Gef" not in text


def test_two_columns_of_one_meaning_are_refused_by_name_or_one_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for names in ("Label,label", "label,class", "Class,LABEL", "label,Labels", "label,label"):
        with case(names):
            text = refusal(path, f"path,{names}\na.png,x,y\n")
            assert " and ".join(names.split(",")) in text and "--column label=NAME" in text
    for names in ("patient,patient_id", "PatientID,patient id"):
        with case(names):
            assert "--column patient=NAME" in refusal(path, f"path,{names}\na.png,x,y\n")
    assert "--column path=NAME" in refusal(path, "path,filename\na.png,a\n")
    assert read(path, "path,Label,label\na.png,x,y\n", {"label": "Label"}) == [
        TableRow("a.png", "x")
    ]
    assert read(path, "path,label,class\na.png,x,y\n", {"label": "class"}) == [
        TableRow("a.png", "y")
    ]
    assert read(path, "path,finding, ,\na.png,x,,\n", {"label": "finding"}) == [
        TableRow("a.png", "x")
    ]
    assert "label" in refusal(path, "path,label\na.png,x\n", {"label": "finding"})


def test_missing_is_missing_in_every_column(tmp_path: Path) -> None:
    header = "path,label,patient,split,caption\n"
    for word in (
        "",
        "  ",
        "NA",
        "nan",
        "NaN",
        "null",
        "NULL",
        "None",
        "N/A",
        "n/a",
        "<NA>",
        "#N/A",
        "NaT",
    ):
        with case(word):
            row = ",".join(["a.png", *[word] * 4])
            assert read(tmp_path / "table.csv", header + row + "\n") == [TableRow("a.png")]
    row = "a.png,Nancy,0,national,nano\n"
    assert read(tmp_path / "table.csv", header + row) == [
        TableRow("a.png", "Nancy", "0", "national", "nano")
    ]
    assert "line 3" in refusal(tmp_path / "table.csv", header + "a.png,x,,,\nNA,x,,,\n")


def test_empty_rows_are_skipped_and_counted_and_ragged_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table = Table(path)
    path.write_text(CSV + ",,\n , ,\n\n,,\n")
    for _ in range(2):  # every reading counts from the beginning
        assert list(table.rows()) == ROWS
        assert table.remarks() == ["4 empty rows of the table were skipped."]
    for name, text in {
        "too few": CSV + "c.png,1\n",
        "too many": CSV + "c.png,1,x,y\n",
        "header alone, longer rows": "path\na.png,x\n",
        "a quote that never ends": CSV + '"c.png,1,x\n',
        "text after a quote": CSV + '"c.png"x,1,x\n',
        "nothing": "",
        "blank lines": "\n\n",
        "no column of paths": "a,b\n1,2\n",
    }.items():
        with case(name):
            refusal(path, text)


def test_identifiers_that_excel_rounded_are_counted_and_invisible_characters_dropped(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.csv"
    table = Table(path)
    path.write_text(
        "path,patient,label\na.png,1.23E+12,x\u200b y\nb.png,1E5,\u200b\nc.png,17e,x\n", "utf-8"
    )
    assert [(row.patient, row.label) for row in table.rows()] == [
        ("1.23E+12", "x y"),
        ("1E5", None),
        ("17e", "x"),
    ]
    assert table.remarks()[0].startswith("2 patients are numbers as Excel rounds them")


def test_quoted_cells_go_over_lines_and_keep_separators(tmp_path: Path) -> None:
    for end in ("\n", "\r\n"):
        with case(end):
            text = f'path,caption{end}a.png,"one, {end}two"{end}"b,1.png","say ""x"""{end}'
            rows = read(tmp_path / "table.csv", text)
            assert [(row.path, (row.caption or "").split()) for row in rows] == [
                ("a.png", ["one,", "two"]),
                ("b,1.png", ["say", '"x"']),
            ]


def test_parquet_cells_of_every_type_are_text(tmp_path: Path) -> None:
    paths = ["a.png", "b.png", "c.png"]
    columns = {
        "text": (pa.array(["x", None, "y"]), ["x", None, "y"]),
        "large text": (pa.array(["x", None, "y"], pa.large_string()), ["x", None, "y"]),
        "bytes": (pa.array([b"x", None, "ä".encode()], pa.binary()), ["x", None, "ä"]),
        "categories": (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        "categories of numbers": (pa.array([3, None, 3]).dictionary_encode(), ["3", None, "3"]),
        "truth": (pa.array([True, None, False]), ["1", None, "0"]),
        "whole numbers": (pa.array([7, None, -1]), ["7", None, "-1"]),
        "large whole numbers": (pa.array([2**62 + 1, None, 0]), [str(2**62 + 1), None, "0"]),
        "floating point": (pa.array([12.0, float("nan"), 1.5]), ["12", None, "1.5"]),
        "half precision": (pa.array([12.0, None, 1.5], pa.float16()), ["12", None, "1.5"]),
        "nothing at all": (pa.nulls(3), [None, None, None]),
        "words for nothing": (pa.array(["NA", "nan", " "]), [None, None, None]),
        "leading zeros": (pa.array(["007", "7", "0"]), ["007", "7", "0"]),
    }
    path = tmp_path / "table.parquet"
    for name, (column, texts) in columns.items():
        with case(name):
            pq.write_table(pa.table({"path": paths, "label": column}), path)
            assert is_table(path, {}) and [row.label for row in Table(path).rows()] == texts
    for name, column in {
        "a list": pa.array([[1], [2], [3]]),
        "no UTF-8": pa.array([b"\xff", b"", b""]),
    }.items():
        with case(name), pytest.raises(DataError):
            pq.write_table(pa.table({"path": paths, "label": column}), path)
            list(Table(path).rows())
    pq.write_table(pa.table({"path": ["a.png", None, None], "label": ["x", None, None]}), path)
    table = Table(path)
    assert list(table.rows()) == [TableRow("a.png", "x")] and "2 empty rows" in table.remarks()[0]


def test_parquet_of_images_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pictures = {
        "bytes": pa.array([b"\x89PNG"]),
        "bytes with a path": pa.array([{"bytes": b"\x89PNG", "path": "a.png"}]),
        "numbers": pa.array([[1.0, 2.0]]),
    }
    for name, column in pictures.items():
        for column_name in ("image", "img"):
            with case(name, column_name):
                pq.write_table(pa.table({column_name: column, "path": ["a.png"]}), path)
                assert not is_table(path, {})
    pq.write_table(pa.table({"image": ["a.png"]}), path)
    assert is_table(path, {})
    pq.write_table(pa.table({"scan": ["a.png"]}), path)
    assert not is_table(path, {}) and is_table(path, {"path": "scan"})


def test_what_a_table_may_hold_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    assert "4096 characters" in refusal(path, f"path,caption\na.png,{'x' * 4097}\n")
    assert read(path, f"path,caption\na.png,{'x' * 4096}\n")[0].caption == "x" * 4096
    assert "characters" in refusal(path, "path," + "x" * (1 << 20) + "\n")
    assert "16384 columns" in refusal(path, "path" + ",x" * 20_000 + "\n")
    monkeypatch.setattr(table_module, "MAX_ROWS", 1)
    assert "1 rows" in refusal(path, CSV)
    monkeypatch.setattr(csv_text, "MAX_FILE_BYTES", 10)
    assert "10 bytes" in refusal(path, CSV)


@pytest.mark.measured
def test_tables_that_unfold_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as handle:
        handle.write(b"path,label\n")
        handle.truncate(30 << 30)  # sparse: takes no room
    sparse = tmp_path / "sparse.csv"
    with sparse.open("wb") as handle:
        handle.write(b"path,label\n")
        handle.truncate(1 << 30)
    line = tmp_path / "line.csv"
    line.write_bytes(b"path,label\n" + b"x" * (64 << 20))
    quoted = tmp_path / "quoted.csv"
    quoted.write_bytes(b"path,label\n" + b'"\n",' * (8 << 20))
    long_cell = tmp_path / "long.parquet"
    pq.write_table(
        pa.table({"path": ["a.png"] * 1_000_000, "label": ["x"] * 999_999 + ["y" * (1 << 20)]}),
        long_cell,
    )
    repeated = tmp_path / "repeated.parquet"
    column = pa.DictionaryArray.from_arrays(
        pa.array([0] * 1_000_000, pa.int32()), pa.array(["y" * 200_000])
    )
    pq.write_table(
        pa.table({"path": ["a.png"] * 1_000_000, "label": column}), repeated, compression="zstd"
    )
    assert repeated.stat().st_size < 1 << 20
    for path in (huge, sparse, line, quoted, long_cell, repeated):
        with case(path.name):
            outcome = attempt(
                lambda path=path: sum(1 for _ in Table(path).rows()), mib=300, cpu_s=5
            )
            assert outcome.error == "DataError" and outcome.mib < 200, outcome


@pytest.mark.measured
def test_long_table_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(
        "path,label\n" + "".join(f"folder/{number}.png,x\n" for number in range(100_000))
    )

    def count() -> None:
        assert sum(1 for _ in Table(path).rows()) == 100_000

    outcome = attempt(count, mib=200, cpu_s=10)
    assert outcome.error is None and outcome.mib < 50, outcome
