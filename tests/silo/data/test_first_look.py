"""A site's data before there is a plan: what is wrong, all at once, and how much there is."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import DataError, MissingFileError
from silo.config import ImagesSettings
from silo.data.first_look import UnitCounts, count_units, look_at
from tests.support.cohorts import source_at
from tests.support.dicom_files import tags_of, waves, write
from tests.support.errors import has_subject

IMAGES = np.linspace(-1, 1, 6 * 16, dtype=np.float32).reshape(6, 1, 4, 4)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def pictures(folder: Path, num: int) -> Path:
    folder.mkdir()
    for number in range(num):
        noise = np.random.default_rng(number).integers(0, 256, (40, 36), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    return folder


def test_all_that_no_plan_could_take_is_named_at_once_and_nobody_in_it(tmp_path: Path) -> None:
    """By headers: what the columns hold is looked at when a plan asks for it."""
    columns = {
        "patients": ["secret"] * 5,
        "captions": ["secret"] * 6,
        "labels": [[1] * 6],
        "site": ["secret"] * 2,
    }
    whole = save(
        tmp_path / "whole.npz", images=IMAGES, patients=["a"] * 6, labels=["x"] * 6, site=["b"]
    )
    look_at(source_at(whole, tmp_path / "scans"))
    with pytest.raises(DataError) as caught:
        look_at(
            source_at(
                save(tmp_path / "a.npz", images=IMAGES.astype(np.int64), **columns),
                tmp_path / "scans",
            )
        )
    said = f"{caught.value} {caught.value.remedy}"
    for part in (
        "image values: expected",
        "patients: expected shape (6,)",
        "got shape (5,)",
        "labels: expected shape",
    ):
        assert part in said
    assert "captions" not in said and "site" not in said and "secret" not in said
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "images.npy", IMAGES)
    np.save(folder / "captions.npy", np.array(["secret"] * 7))
    with pytest.raises(DataError, check=has_subject("captions")):
        look_at(source_at(folder, tmp_path / "scans"))
    np.save(folder / "captions.npy", np.array(["secret", None], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="pickled"):
        look_at(source_at(folder, tmp_path / "scans"))


def test_folders_tables_and_dicom_are_scanned_once_and_counted(tmp_path: Path) -> None:
    data = pictures(tmp_path / "export", 3)
    scans = tmp_path / "scans"
    (data / "notes.txt").write_text("DOE^JOHN")
    write(tags_of(waves(), PatientID="MRN1"), data / "a.dcm")
    look = look_at(source_at(data, scans))
    assert look.summary and (look.summary.accepted, look.summary.reasons) == (
        4,
        {"not an image": 1},
    )
    assert count_units(source_at(data, scans), patients=False) == UnitCounts(4, None)
    with pytest.raises(DataError, check=has_subject("patients")):
        count_units(source_at(data, scans), patients=True)
    rows = "file,who,finding\n" + "".join(f"export/{n}.png,P{n // 2},x\n" for n in range(3))
    (tmp_path / "table.csv").write_text(rows)
    settings = ImagesSettings(columns={"patient": "who"})
    source = source_at(tmp_path / "table.csv", tmp_path / "two", settings)
    assert look_at(source).summary.patients == 2  # type: ignore[union-attr]
    assert count_units(source, patients=True) == UnitCounts(3, 2)


def test_data_that_no_plan_can_use_are_refused_by_reason(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export/DOE.txt").write_text("no image")
    with pytest.raises(DataError, check=has_subject("images")) as caught:
        look_at(source_at(tmp_path / "export", tmp_path / "scans"))
    assert "DOE" not in str(caught.value)
    with pytest.raises(MissingFileError):
        look_at(source_at(tmp_path / "nothing", tmp_path / "scans"))


def test_arrays_that_plans_with_a_transform_alone_take_are_told_apart(tmp_path: Path) -> None:
    assert (
        look_at(source_at(save(tmp_path / "plain.npz", images=IMAGES), tmp_path / "scans")).summary
        is None
    )
    assert not (tmp_path / "scans").exists()
    colours = np.random.default_rng(0).integers(0, 4096, (4, 20, 20, 3), dtype=np.int32)
    look = look_at(source_at(save(tmp_path / "odd.npz", images=colours), tmp_path / "scans"))
    assert look.summary and look.summary.accepted == 4
    assert [problem.subject for problem in look.problems] == ["image values"]
