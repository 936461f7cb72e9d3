"""Image files inside Parquet, as Hugging Face's `datasets` keep them; and how much memory a Parquet file may take."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ddm.errors import DataError
from ddm.images.array_files import open_arrays
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.parquet import ParquetTable
from ddm.images.parquet_footer import read_footer
from ddm.images.parquet_pages import check_pages
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case
from tests.support.errors import has_subject

BYTES_AND_PATH = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((20, 16), value, np.uint8)).save(data, "PNG")
    return data.getvalue()


def metadata(**features: Any) -> dict[str, str]:
    return {"huggingface": json.dumps({"info": {"features": features}})}


def write(
    path: Path, cells: list[Any], image: str = "image", kind: Any = BYTES_AND_PATH, **columns: Any
) -> Path:
    """Write a file; `metadata` among the columns is the schema's."""
    schema_metadata = columns.pop("metadata", None)
    table = pa.table({image: pa.array(cells, kind), **columns}).replace_schema_metadata(
        schema_metadata
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
    return path


def rows_of(path: Path, limits: DecodeLimits | None = None) -> list[Any]:
    """The value, split, label, patient and caption of each picture, or the reason of its error."""
    return [
        actual.reason
        if isinstance(actual, ImageError)
        else (int(actual.values.max()), actual.split, actual.label, actual.patient, actual.caption)
        for actual in decode(FileContent.of(path), limits)
    ]


def test_image_files_come_with_the_columns_beside_them(tmp_path: Path) -> None:
    cells = [{"bytes": png(value), "path": f"{value}.png"} for value in (1, 2, 3)]
    features = metadata(
        image={"_type": "Image"}, label={"_type": "ClassLabel", "names": ["healthy", "ill"]}
    )
    path = write(
        tmp_path / "a.parquet",
        cells,
        metadata=features,
        label=pa.array([1, 0, -1]),
        patient=pa.array(["a", None, "c"]),
        text=pa.array(["first", "", None]),
        split=pa.array(["train", "train", "test"]),
    )
    assert rows_of(path) == [
        *(
            (1, "train", "ill", "a", "first"),
            (2, "train", "healthy", None, None),
            (3, "test", None, "c", None),
        ),
    ]
    with pytest.raises(DataError, check=has_subject("images")) as caught:
        open_arrays(path)
    assert "[transform]" in (caught.value.remedy or "")
    plain = [png(4), png(5)]
    for kind in (pa.binary(), pa.large_binary()):
        for image in ("image", "img", "Image", "pixel_values", "images"):
            with case(kind, image):
                path = write(
                    tmp_path / "b.parquet", plain, image, kind, labels=pa.array([7.0, 8.5])
                )
                assert rows_of(path) == [(4, None, "7", None, None), (5, None, "8.5", None, None)]
    path = write(
        tmp_path / "c.parquet",
        plain,
        "scan",
        pa.binary(),
        metadata=metadata(scan={"_type": "Image"}),
    )
    assert [row[0] for row in rows_of(path)] == [4, 5]


def test_a_column_of_classes_has_their_names_in_arrays_too(tmp_path: Path) -> None:
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((3, 8, 8), np.uint8))
    table = pa.table({"image": images, "label": pa.array([1, 0, None])})
    features = metadata(label={"_type": "ClassLabel", "names": ["healthy", "ill"]})
    pq.write_table(table.replace_schema_metadata(features), tmp_path / "a.parquet")
    source = open_arrays(tmp_path / "a.parquet")
    assert source.column("labels", 64).tolist() == ["ill", "healthy", ""]
    assert {"label", "labels"} <= source.columns
    assert [row[2] for row in rows_of(tmp_path / "a.parquet")] == ["ill", "healthy", None]
    for label in (2, -2):
        with case(label):
            table = pa.table({"image": images, "label": pa.array([label] * 3)})
            pq.write_table(table.replace_schema_metadata(features), tmp_path / "a.parquet")
            with pytest.raises(ImageError, match="no name in the metadata"):
                open_arrays(tmp_path / "a.parquet").column("labels", 64)


def test_a_row_that_gives_no_picture_comes_as_its_reason_and_the_next_ones_follow(
    tmp_path: Path,
) -> None:
    inside = tmp_path / "data"
    (inside / "images").mkdir(parents=True)
    (inside / "images" / "x.png").write_bytes(png(9))
    (tmp_path / "secret.png").write_bytes(png(99))
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "within.png").symlink_to(inside / "images" / "x.png")
    pq.write_table(pa.table({"image": pa.array([png(1)])}), inside / "inner.parquet")
    wrong = {
        "images/x.png": (9, None, None, None, None),
        "./images/../images/x.png": (9, None, None, None, None),
        "within.png": (9, None, None, None, None),
        "images/none.png": Reason.MISSING,
        "images": Reason.SPECIAL,
        "../secret.png": Reason.UNSUPPORTED,
        "link.png": Reason.UNSUPPORTED,
        str(tmp_path / "secret.png"): Reason.UNSUPPORTED,
        "https://example.org/x.png": Reason.UNSUPPORTED,
        "file:///etc/passwd": Reason.UNSUPPORTED,
        "C:\\images\\x.png": Reason.UNSUPPORTED,
        "images\\x.png": Reason.UNSUPPORTED,
        "inner.parquet": Reason.UNSUPPORTED,
        "": Reason.NO_PIXELS,
    }
    cells = [{"bytes": None, "path": name} for name in wrong]
    more = {
        "nothing": (None, Reason.NO_PIXELS),
        "no path": ({"bytes": None, "path": None}, Reason.NO_PIXELS),
        "empty": ({"bytes": b"", "path": "x.png"}, Reason.EMPTY),
        "text": ({"bytes": b"hello", "path": "x.png"}, Reason.UNKNOWN),
        "bytes first": ({"bytes": png(5), "path": "images/x.png"}, (5, None, None, None, None)),
    }
    cells += [cell for cell, _ in more.values()]
    expected_rows = [*wrong.values(), *(expected for _, expected in more.values())]
    actual = rows_of(write(inside / "a.parquet", cells))
    for name, row, expected in zip((*wrong, *more), actual, expected_rows, strict=True):
        with case(name):
            assert row == expected


def test_splits_come_from_the_names_of_shards_where_all_files_follow_the_pattern(
    tmp_path: Path,
) -> None:
    for name, split in {
        "train-00000-of-00002": "train",
        "train-00001-of-00002": "train",
        "test-00000-of-00001": "test",
        "validation-00000-of-00001-0123456789abcdef": "validation",
        "set.test-00000-of-00001": "test",
        "data-00000-of-00001": None,
    }.items():
        path = write(tmp_path / "data" / f"{name}.parquet", [png(1)], kind=pa.binary())
        with case(name):
            assert rows_of(path)[0][1] == split
    write(tmp_path / "data" / "other.parquet", [png(1)], kind=pa.binary())
    assert rows_of(path)[0][1] is None
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((3, 8, 8), np.uint8))
        (tmp_path / "arrays").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": images}), tmp_path / "arrays" / f"{name}.parquet")
    assert {row[1] for row in rows_of(tmp_path / "arrays" / "test-00000-of-00001.parquet")} == {
        "test"
    }
    with pytest.raises(DataError, check=has_subject("images")):
        open_arrays(tmp_path / "arrays")


def test_columns_whose_meaning_is_not_certain_are_refused(tmp_path: Path) -> None:
    one = [png(1)]
    text = pa.array(["x"])
    for name, columns, reason in (
        ("two images", {"img": pa.array(one)}, Reason.AMBIGUOUS),
        ("two labels", {"label": text, "labels": text}, Reason.AMBIGUOUS),
        ("two captions", {"caption": text, "text": text}, Reason.AMBIGUOUS),
        ("metadata", {"label": text, "metadata": {"huggingface": "{"}}, Reason.DAMAGED),
        (
            "names",
            {"label": text, "metadata": metadata(label={"_type": "ClassLabel", "names": 3})},
            Reason.DAMAGED,
        ),
    ):
        with case(name):
            path = write(tmp_path / "a.parquet", one, kind=pa.binary(), **columns)
            with pytest.raises(ImageError) as caught:
                rows_of(path)
            assert caught.value.reason is reason
    for name, cell in {
        "long": pa.array(["x" * 2000]),
        "list": pa.array([[1, 2]]),
        "no name": pa.array([5]),
    }.items():
        with case(name):
            names = (
                metadata(label={"_type": "ClassLabel", "names": ["a"]})
                if name == "no name"
                else None
            )
            path = write(tmp_path / "a.parquet", one, kind=pa.binary(), label=cell, metadata=names)
            assert rows_of(path)[0] in (Reason.TOO_LARGE, Reason.UNSUPPORTED, Reason.DAMAGED)
    two = metadata(left={"_type": "Image"}, right={"_type": "Image"})
    path = write(
        tmp_path / "a.parquet", one, "left", pa.binary(), right=pa.array(one), metadata=two
    )
    with pytest.raises(ImageError, match="may be the images"):
        rows_of(path)


def test_tensors_of_another_shape_in_a_second_file_are_refused(tmp_path: Path) -> None:
    for number, shape in enumerate(((4, 6, 8), (4, 8, 6))):
        images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros(shape, np.uint8))
        pq.write_table(pa.table({"image": images}), tmp_path / f"{number}.parquet")
    with pytest.raises(DataError, check=has_subject("image")):
        open_arrays(tmp_path)


def test_an_image_file_larger_than_the_limit_is_refused_alone(tmp_path: Path) -> None:
    large = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(
        large, "PNG"
    )
    path = write(tmp_path / "a.parquet", [png(1), large.getvalue(), png(2)], kind=pa.binary())
    actual = rows_of(path, DecodeLimits(values=4000))
    assert [actual[0][0], actual[1], actual[2][0]] == [1, Reason.TOO_LARGE, 2]


BOUNDED = """
import resource, sys
from pathlib import Path
import numpy, pyarrow.parquet
from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.reasons import ImageError
import ddm.images.arrays, ddm.images.raster
taken = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 29), resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    reasons = set()
    try:
        for found in decode(FileContent.of(Path(path))):
            reasons.add(found.reason.name if isinstance(found, ImageError) else "picture")
    except ImageError as error:
        reasons.add(error.reason.name)
    print(*sorted(reasons))
"""


def repeated(cell: bytes | str, num: int) -> pa.Array:
    """One cell in a dictionary, and rows that name it."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * num, pa.int32()), pa.array([cell]))


def test_a_few_kilobytes_of_parquet_never_take_gigabytes(tmp_path: Path) -> None:
    tables: dict[str, tuple[pa.Table, str]] = {
        "repeated images": (pa.table({"image": repeated(bytes(40 << 20), 30)}), "UNKNOWN"),
        "long captions": (
            pa.table({"image": repeated(png(1), 400), "text": repeated("x" * 10**6, 400)}),
            "TOO_LARGE",
        ),
        "many captions": (
            pa.table(
                {
                    "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
                        np.zeros((100_000, 5, 5), np.uint8)
                    ),
                    "text": repeated("x" * 16_000, 100_000),
                }
            ),
            "DAMAGED",
        ),
    }
    paths = []
    for name, (table, _) in tables.items():
        paths.append(str(tmp_path / f"{name}.parquet"))
        pq.write_table(table, paths[-1], compression="zstd", store_schema=name == "many captions")
        assert Path(paths[-1]).stat().st_size < 100_000
    command = [sys.executable, "-c", BOUNDED, *paths]
    # The default allocator reserves a gigabyte of addresses, of which it uses little.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    for name, reasons in zip(tables, finished.stdout.splitlines(), strict=True):
        with case(name):
            assert reasons == tables[name][1]


def test_lists_of_very_many_equal_values_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddm.images.parquet._MAX_VALUES", 1 << 20)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": pa.array([np.zeros(1 << 21, np.uint8)])}), path)
    with pytest.raises(ImageError, match="lists of too many values"):
        rows_of(path)


def test_pages_are_measured_by_their_own_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(60_000, dtype=np.int64)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 60_001, 3)), pa.array(values))
    table = pa.table({"a": pa.array(values[:20_000]), "b": lists, "c": pa.array(["x"] * 20_000)})
    path = tmp_path / "a.parquet"
    for options in (
        {},
        {"data_page_version": "2.0"},
        {"use_dictionary": False},
        {"compression": "none"},
    ):
        pq.write_table(table, path, data_page_size=10_000, **options)
        (group,) = read_footer(path)
        for column, num_values in enumerate((20_000, 60_000, 20_000)):
            with case(options, column):
                check_pages(path, group.chunks[column], num_values)
                with pytest.raises(ImageError, match="more or fewer values"):
                    check_pages(path, group.chunks[column], num_values + 1)
    pq.write_table(pa.table({"image": pa.array([bytes(100_000)])}), path, compression="zstd")
    monkeypatch.setattr("ddm.images.parquet_pages.MAX_PAGE_BYTES", 99_999)
    with pytest.raises(ImageError, match="a page of Parquet"):
        rows_of(path)


def test_a_damaged_parquet_file_is_an_error_and_never_another_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [png(7)] * 6, kind=pa.binary(), label=pa.array(["a"] * 6))
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(4, len(whole) - 8, 60).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with case(place):
            try:
                for actual in decode(FileContent.of(path)):
                    if isinstance(actual, DecodedPicture):
                        assert (actual.values == 7).all()
            except DataError:
                pass
    assert ParquetTable((write(path, [png(1)], kind=pa.binary()),)).num_rows == 1
