"""The test part of a data set is neither trained on nor counted, unless policy.toml says otherwise."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import DataError
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from silo.data.cohort import Cohort
from silo.data.first_look import UnitCounts, count_units, look_at
from silo.images.report import report
from silo.images.scan import scan
from tests.support.case import case
from tests.support.cohorts import cohort_at, source_at
from tests.support.commands import run_command

DATA = DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0))
SPEC = TransformSpec(range={"kind": "full"}, storage="uint8")
LEVELS = {"train": (10, 20), "Validation": (30,), "test": (40, 50), "": (60,)}
USED_BY_DEFAULT = [10, 20, 30, 60]


def table(folder: Path) -> Path:
    """Pictures of one grey each, in the parts of `LEVELS`."""
    rows = ["path,split"]
    for part, levels in LEVELS.items():
        for level in levels:
            Image.fromarray(np.full((40, 40), level, np.uint8)).save(folder / f"{level}.png")
            rows.append(f"{level}.png,{part}")
    path = folder / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def levels_of(cohort: Cohort) -> list[int]:
    return [round(127.5 * (1 + float(image.max()))) for image in cohort.images[:]]


def test_scan_counts_the_test_part_apart(tmp_path: Path) -> None:
    summary = scan(source_at(table(tmp_path), tmp_path / "scans"))
    assert (summary.accepted, summary.quarantined, summary.other_parts) == (4, 0, {"test": 2})
    assert "Not used: 2 of part test." in report(
        summary, tmp_path / "scans", of_site=True, review_command="silo review"
    )
    result = run_command(
        "silo", "scan", "--data", tmp_path / "table.csv", "--json", "--private", tmp_path / "scans"
    )
    assert json.loads(result.out)["other_parts"] == {"test": 2}


def test_cohort_and_card_hold_the_parts_that_are_used(tmp_path: Path) -> None:
    path = table(tmp_path)
    cases = {
        None: USED_BY_DEFAULT,
        ("test",): [40, 50, 60],
        ("train", "test"): [10, 20, 40, 50, 60],
    }
    for number, (parts, levels) in enumerate(cases.items()):
        with case(parts):
            folder = tmp_path / f"private-{number}"
            cohort = cohort_at(
                path, DATA, salt=b"s", unit="image", transform=SPEC, folder=folder, parts=parts
            )
            assert levels_of(cohort) == levels
            assert count_units(
                source_at(path, folder / "images", parts=parts), patients=False
            ).images == len(levels)


def test_arrays_with_a_column_of_parts_give_the_rows_that_are_used(tmp_path: Path) -> None:
    spec = DataSpec(shape=(1, 4, 4), range=(0.0, 255.0))
    images = np.stack([np.full((4, 4), level, np.uint8) for level in (1, 2, 3, 4)])
    columns = {
        "labels": [0, 1, 0, 1],
        "patients": ["a", "b", "c", "d"],
        "splits": ["train", "test", "val", ""],
    }
    path = tmp_path / "a.npz"
    request = {"unit": "patient", "num_classes": 2, "salt": b"s"}
    for name, save in {"in place": np.savez, "packed": np.savez_compressed}.items():
        with case(name):
            save(path, images=images, **columns)
            for folder in (None, tmp_path / "private"):
                cohort = cohort_at(path, spec, folder=folder, **request)
                assert cohort.images[:].amax((1, 2, 3)).tolist() == [1.0, 3.0, 4.0]
                assert cohort.label_N.tolist() == [0, 0, 1]
                assert cohort.num_units == 3
    counts = count_units(source_at(path, tmp_path / "scans"), patients=True)
    assert counts == UnitCounts(3, 3, Counter(test=1))
    assert (
        look_at(source_at(path, tmp_path / "scans"))
        .remarks[-1]
        .startswith("Not used: 1 of part test.")
    )


def test_arrays_of_other_parts_alone_are_refused(tmp_path: Path) -> None:
    images = np.zeros((4, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, splits=["test"] * 4)
    with pytest.raises(DataError, match="a part that is used"):
        count_units(source_at(tmp_path / "a.npz", tmp_path / "scans"), patients=False)


def test_card_of_medmnist_counts_train_and_validation(tmp_path: Path) -> None:
    rows = {"train": 5, "val": 3, "test": 7}
    arrays = {
        f"{part}_images": np.random.default_rng(0).integers(0, 256, (num, 28, 28), np.uint8)
        for part, num in rows.items()
    }
    labels = {f"{part}_labels": np.zeros((num, 1), np.uint8) for part, num in rows.items()}
    np.savez(tmp_path / "mnist.npz", **arrays, **labels)
    assert (
        count_units(source_at(tmp_path / "mnist.npz", tmp_path / "scans"), patients=False).images
        == 8
    )
