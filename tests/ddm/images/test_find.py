"""What lies at a path is decided once; clutter is counted; nothing outside of the data folder is read unasked."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ddm.errors import DataError, MissingFileError
from ddm.images import find as find_module
from ddm.images.find import DataKind, DataSet, ImageFile, find_data
from ddm.images.reasons import Reason
from tests.support.bounded import attempt
from tests.support.case import case
from tests.support.errors import has_subject


def find_files(path: Path, **options: Any) -> Iterator[ImageFile]:
    """The files of a data set."""
    return find_data(path, **options).files()


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(path, "PNG")
    return path


def names(data: DataSet, root: Path) -> list[str]:
    return [os.path.relpath(file.path, root) for file in data.files() if file.reason is None]


def reasons(path: Path, **options: bool) -> dict[str, Reason | None]:
    return {Path(file.path).name: file.reason for file in find_files(path, **options)}


def rows(data: DataSet) -> dict[str, tuple[str | None, str | None]]:
    return {
        Path(file.path).name: (file.row.label, file.row.patient)
        for file in data.files()
        if file.row is not None
    }


def test_kind_of_data_is_decided_once(tmp_path: Path) -> None:
    image(tmp_path / "pictures/a.png")
    image(tmp_path / "single.png")
    (tmp_path / "table.csv").write_text("path\nsingle.png\n")
    (tmp_path / "empty").mkdir()
    kinds: dict[str, tuple[DataKind, bool]] = {
        "pictures": (DataKind.PICTURES, False),
        "single.png": (DataKind.PICTURES, False),
        "table.csv": (DataKind.PICTURES, False),
        "empty": (DataKind.PICTURES, False),
    }
    stored = {
        "floats": (np.zeros((3, 1, 4, 4), np.float32), DataKind.ARRAYS),
        "bytes": (np.zeros((3, 4, 4), np.uint8), DataKind.ARRAYS),
        "whole numbers": (np.zeros((3, 4, 4), np.int32), DataKind.PICTURES),
        "five axes": (np.zeros((3, 1, 1, 1, 4, 4), np.uint8), DataKind.PICTURES),
    }
    for name, (array, kind) in stored.items():
        np.savez(tmp_path / f"{name}.npz", images=array)
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "images.npy", array)
        kinds |= {f"{name}.npz": (kind, True), name: (kind, True)}
    np.savez(tmp_path / "latents.npz", latents=np.zeros((3, 2, 2), np.float32))
    kinds["latents.npz"] = (DataKind.LATENTS, True)
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04")
    kinds["damaged.npz"] = (DataKind.PICTURES, True)
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.table({"image": [[[0.0, 1.0]]]}), tmp_path / "parquet/a.parquet")
    (tmp_path / "parquet/README.md").write_text("x")
    kinds["parquet"] = (DataKind.ARRAYS, True)
    pq.write_table(pa.table({"path": ["single.png"]}), tmp_path / "table.parquet")
    kinds["table.parquet"] = (DataKind.PICTURES, False)
    for name, (kind, looks_like_arrays) in kinds.items():
        with case(name):
            data = find_data(tmp_path / name)
            assert (data.kind, data.looks_like_arrays) == (kind, looks_like_arrays)
            assert (data.arrays is None) == (not looks_like_arrays or name == "damaged.npz")
            if data.arrays is None:
                with pytest.raises(DataError):
                    data.require_arrays()
    with pytest.raises(MissingFileError):
        find_data(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, check=has_subject("data")):
        find_data(tmp_path / "pipe")


def test_spreadsheets_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for suffix in ("xlsx", "XLS", "ods", "xlsm"):
        with case(suffix), pytest.raises(DataError) as caught:
            path = tmp_path / f"table.{suffix}"
            path.write_bytes(b"PK\x03\x04")
            find_data(path)
        assert "save it as CSV (UTF-8)" in str(caught.value.remedy)


def test_files_come_in_the_order_of_their_names_before_those_of_folders(tmp_path: Path) -> None:
    for name in ("b.png", "a/z.png", "a.png", "c/d/x.png", "c/y.png", "a/b/w.png"):
        image(tmp_path / name)
    data = find_data(tmp_path)
    assert names(data, tmp_path) == [
        "a.png",
        "b.png",
        "a/z.png",
        "a/b/w.png",
        "c/y.png",
        "c/d/x.png",
    ]
    assert [file.num_bytes for file in data.files()] == [(tmp_path / "a.png").stat().st_size] * 6


def test_clutter_is_listed_with_its_reason_and_images_of_like_names_are_read(
    tmp_path: Path,
) -> None:
    clutter = (
        *(
            "README.txt",
            "README",
            "readme.md",
            "LICENSE",
            "LICENCE.de.txt",
            "licenses",
            "COPYING",
            "NOTICE.txt",
        ),
        *(
            "Thumbs.db",
            "desktop.ini",
            ".DS_Store",
            "._a.png",
            ".hidden.png",
            "DICOMDIR",
            "SHA256SUMS",
            "a.md5",
        ),
        *("unused.csv", "unused.tsv", "table.xlsx", "CHANGELOG.md"),
    )
    documents = ("notes.txt", "report.pdf", "a.json", "index.html", "script.py", "ORDER.DOCX")
    pictures = (
        "a.png",
        "readme.png",
        "license.dcm",
        "notice 1.jpg",
        "IM000001",
        "scan",
        "1.2.840.113619.2.55",
    )
    for name in (*clutter, *documents, *pictures):
        (tmp_path / name).write_bytes(b"x")
    (
        image(tmp_path / ".git/a.png"),
        image(tmp_path / "__MACOSX/b.png"),
        image(tmp_path / "deep/c.png"),
    )
    (tmp_path / "deep/labels.csv").write_text("path\nc.png\n")
    files = {Path(file.path).name: file for file in find_files(tmp_path)}
    for name in (*clutter, ".git", "__MACOSX", "labels.csv"):
        with case(name):
            assert files.pop(name).reason is Reason.CLUTTER
    for name in documents:
        with case(name):
            assert files[name].is_clutter and files.pop(name).reason is Reason.UNKNOWN
    assert set(files) == {*pictures, "c.png"} and not any(
        file.is_clutter for file in files.values()
    )


def test_parts_and_columns_of_an_array_are_one_file(tmp_path: Path) -> None:
    for name in ("images-1.npy", "images-2.npy"):
        np.save(tmp_path / name, np.zeros((2, 4, 4), np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(4))
    np.save(tmp_path / "other.npy", np.zeros(4))
    (tmp_path / "README.txt").write_text("x")
    files = [file for file in find_files(tmp_path) if file.reason is None]
    assert [Path(name).name for file in files for name in file.files][:3] == [
        *("images-1.npy", "images-2.npy", "labels.npy"),
    ]
    assert len(files) == 1 and files[0].num_bytes == sum(size for size, _, _ in files[0].stats)


def test_parts_are_in_the_order_of_their_numbers_with_their_own_columns(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        np.save(tmp_path / f"images-{number}.npy", np.zeros((2, 4, 4), np.uint8))
        np.save(tmp_path / f"labels-{number}.npy", np.zeros(2))
    (file,) = find_files(tmp_path)
    assert [Path(name).name for name in file.files] == [
        *(
            "images-1.npy",
            "images-2.npy",
            "images-10.npy",
            "labels-1.npy",
            "labels-2.npy",
            "labels-10.npy",
        ),
    ]
    # beside its parts: nothing tells which counts
    np.save(tmp_path / "images.npy", np.zeros((2, 4, 4), np.uint8))
    assert find_data(tmp_path).arrays is None and find_data(tmp_path).looks_like_arrays
    assert [Path(file.path).name for file in find_files(tmp_path) if not file.is_clutter] == [
        "images-1.npy"
    ]
    tables = tmp_path / "with a table"
    tables.mkdir()
    np.save(tables / "images.npy", np.zeros((2, 4, 4), np.uint8))
    (tables / "labels.csv").write_text("label\nx\ny\n")
    assert "labels.csv" in find_data(tables).remarks()[0]


def test_links_and_paths_that_lead_out_of_the_folder_are_refused_unless_allowed(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    image(data / "a.png"), image(tmp_path / "secret.png"), image(tmp_path / "data2/b.png")
    (data / "inside.png").symlink_to("a.png")
    (data / "outside.png").symlink_to("../secret.png")
    (data / "like.png").symlink_to("../data2/b.png")  # a folder whose name begins alike
    (data / "loop.png").symlink_to("loop.png")
    (data / "folder").symlink_to("../data2")
    (data / "inner").mkdir()
    (data / "chain.png").symlink_to("inner/next.png")
    (data / "inner/next.png").symlink_to("../../secret.png")
    expected = {
        "a.png": None,
        "inside.png": None,
        "outside.png": Reason.OUTSIDE,
        "like.png": Reason.OUTSIDE,
        "chain.png": Reason.OUTSIDE,
        "next.png": Reason.OUTSIDE,
        "loop.png": Reason.FORBIDDEN,
        "folder": Reason.FOLDER_LINK,
    }
    assert reasons(data) == expected
    allowed = {
        name: None if reason is Reason.OUTSIDE else reason for name, reason in expected.items()
    }
    assert reasons(data, outside=True) == allowed
    # whoever runs the command names the folder, by a link or not
    (tmp_path / "entry").symlink_to("data")
    assert reasons(tmp_path / "entry") == expected
    (tmp_path / "elsewhere.csv").write_text("path,label\na.png,x\n")
    (data / "linked.csv").symlink_to("../elsewhere.csv")
    assert find_data(data).table is None and "leads outside" in find_data(data).remarks()[0]
    (data / "linked.csv").unlink()
    table = data / "table.csv"
    paths = [
        "a.png",
        "../secret.png",
        str(tmp_path / "secret.png"),
        str(data / "inside.png"),
        "folder/b.png",
    ]
    paths += ["inner/../../secret.png", "inner/next.png", "/etc/passwd", "../data/a.png"]
    table.write_text("path\n" + "\n".join(paths) + "\n")
    got = [file.reason for file in find_files(table)]
    outside = Reason.OUTSIDE
    repeated = Reason.REPEATED
    assert got == [None, outside, repeated, None, outside, repeated, outside, outside, repeated]
    assert Counter(file.reason for file in find_files(table, outside=True))[outside] == 0


def test_links_beside_arrays_that_lead_out_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.npy"
    np.save(secret, np.zeros((3, 4, 4), np.uint8))
    for name in ("images.npy", "labels.npy"):
        with case(name):
            data = tmp_path / name.partition(".")[0]
            data.mkdir()
            if name != "images.npy":
                np.save(data / "images.npy", np.zeros((3, 4, 4), np.uint8))
            (data / name).symlink_to(secret)
            assert (
                find_data(data).arrays is None and find_data(data, outside=True).arrays is not None
            )
            assert set(reasons(data).values()) == {Reason.OUTSIDE}
            with pytest.raises(DataError, check=has_subject("data")):
                find_data(data).require_arrays()


def test_paths_of_windows_and_other_cases_get_a_hint(tmp_path: Path) -> None:
    (
        image(tmp_path / "img/0.png"),
        image(tmp_path / "img/1.PNG"),
        image(tmp_path / "img/back\\slash.png"),
    )
    image(tmp_path / "img/Käse.png")
    hints = {
        "img\\0.png": (None, ""),
        "img\\1.PNG": (None, ""),
        "img/back\\slash.png": (None, ""),  # Unix allows it in names: the literal file comes first
        "img/1.png": (Reason.MISSING, "differs only in case"),
        "IMG/0.png": (Reason.MISSING, "differs only in case"),
        "img\\2.PNG": (Reason.MISSING, "No such file"),
        "img/Ka\u0308se.png": (Reason.MISSING, "accents"),
        "img/0": (Reason.MISSING, "write the whole name"),
        "img/7": (Reason.MISSING, "No such file"),
        "C:\\export\\img\\0.png": (Reason.MISSING, "Windows drive"),
        "d:/img/0.png": (Reason.MISSING, "Windows drive"),
        "\\\\server\\share\\0.png": (Reason.MISSING, "server"),
        "https://host.example/0.png": (Reason.MISSING, "a URL"),
    }
    table = tmp_path / "table.csv"
    table.write_text("path\n" + "\n".join(hints) + "\n")
    data = find_data(table)
    for file, (path, (reason, detail)) in zip(data.files(), hints.items(), strict=True):
        with case(path):
            assert file.reason is reason and detail in file.detail
    remarks = " ".join(data.remarks())
    assert (
        "3 paths of the table have backslashes" in remarks
        and "3 paths of the table lead to no file" in remarks
    )
    assert sum(1 for _ in data.files()) == len(hints) and " ".join(data.remarks()) == remarks


def test_one_table_beside_images_is_used_and_said(tmp_path: Path) -> None:
    tables = {
        "metadata.csv": "file,patient_id,label,site\nimages/0.png,p0,x,A\nimages/1.png,p1,y,B\n",
        "labels.csv": "file_name;class;patient\nimages\\0.png;x;p0\nimages\\1.png;y;p1\n",
        "names.csv": "Image Index,label,Patient ID\n0.png,x,p0\n1.png,y,p1\n",
        "volumes.csv": "path,label,patient\nimages/0.png,x,p0\nimages/1.png,y,p1\n",
        "with the folder.tsv": "path\tlabel\tpatient\nDATA/images/0.png\tx\tp0\nDATA/images/1.png\ty\tp1\n",
        "in utf16.csv": "path,label,patient\nimages/0.png,x,p0\nimages/1.png,y,p1\n",
    }
    for name, text in tables.items():
        with case(name):
            root = tmp_path / name / "data"
            image(root / "images/0.png"), image(root / "images/1.png"), image(root / "extra.png")
            encoding = "utf-16" if "utf16" in name else "utf-8"
            (root / name).write_text(text.replace("DATA", root.name), encoding=encoding)
            (root / "notes.csv").write_text("date,remark\n2020,x\n")
            data = find_data(root)
            assert rows(data) == {"0.png": ("x", "p0"), "1.png": ("y", "p1")}
            assert names(data, root) == ["extra.png", "images/0.png", "images/1.png"]
            assert reasons(root)["notes.csv"] is Reason.CLUTTER and name not in reasons(root)
            if name != "volumes.csv":
                assert f"{name} beside the images lists them and was used." in data.remarks()


def test_several_tables_beside_images_are_named_and_none_is_used(tmp_path: Path) -> None:
    image(tmp_path / "0.png"), image(tmp_path / "1.png")
    (tmp_path / "train.csv").write_text("path,label\n0.png,x\n")
    (tmp_path / "valid.csv").write_text("path,label\n1.png,y\n")
    data = find_data(tmp_path)
    assert data.table is None and not rows(data) and names(data, tmp_path) == ["0.png", "1.png"]
    (remark,) = data.remarks()
    assert "train.csv, valid.csv" in remark and "--data" in remark


def test_table_beside_images_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    image(tmp_path / "0.png")
    (tmp_path / "elsewhere.csv").write_text("path,label\nother/0.png,x\nother/1.png,y\n")
    (tmp_path / "no paths.csv").write_text("id,label\n0,x\n")
    assert find_data(tmp_path).table is None and not find_data(tmp_path).remarks()
    (tmp_path / "two.csv").write_text("path,label,class\n0.png,x,y\n")
    data = find_data(tmp_path)
    assert data.table is None and "label and class" in data.remarks()[0]
    assert find_data(tmp_path, {"label": "class"}).table is not None
    with pytest.raises(DataError, check=has_subject("--column")):
        find_data(tmp_path, {"label": "finding"})


def test_rows_are_led_to_files_once_and_what_they_lack_is_said(tmp_path: Path) -> None:
    image(tmp_path / "0.png"), image(tmp_path / "notes.txt"), image(tmp_path / ".hidden.png")
    (tmp_path / "volumes.csv").write_text(
        "path,label\n0.png,x\nabsent.png,x\n./0.png,y\nnotes.txt,x\n.hidden.png,x\n../out.png,x\n"
    )
    files = [
        (os.path.relpath(file.path, tmp_path), file.reason, bool(file.row))
        for file in find_files(tmp_path)
    ]
    assert files == [
        ("0.png", Reason.REPEATED, True),
        (".hidden.png", None, True),  # whoever made the table means it
        ("0.png", None, True),
        ("notes.txt", None, True),
        ("absent.png", Reason.MISSING, True),
        ("../out.png", Reason.OUTSIDE, True),
    ]


def test_table_beside_images_is_bounded_and_one_by_itself_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image(tmp_path / "0.png")
    (tmp_path / "volumes.csv").write_text("path,label\n0.png,x\n1.png,x\n2.png,x\n")
    monkeypatch.setattr(find_module, "MAX_ROWS_IN_MEMORY", 2)
    with pytest.raises(DataError) as caught:
        list(find_files(tmp_path))
    assert "--data" in str(caught.value.remedy)
    assert sum(1 for _ in find_files(tmp_path / "volumes.csv")) == 3


@pytest.mark.measured
def test_rows_of_a_table_leave_little_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        "path,label\n" + "".join(f"folder/{number:064}.png,x\n" for number in range(50_000))
    )

    def count() -> None:
        assert sum(file.reason is Reason.MISSING for file in find_files(path)) == 50_000

    outcome = attempt(count, mib=200, cpu_s=20)
    assert outcome.error is None and outcome.mib < 40, outcome


def test_files_keep_their_names_to_themselves() -> None:
    file = ImageFile("DOE.png", row=None)
    assert file.num_bytes == 0 and not file.is_clutter
