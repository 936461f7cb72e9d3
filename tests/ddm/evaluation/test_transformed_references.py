"""A plan with a transform: raw pictures that a reader compares or distils with go through it, samples do not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddm.distillation.student import Student
from ddm.errors import DataError, SetupError
from ddm.evaluation.reference import classes_of, open_reference
from ddm.images.samples import open_image_set
from ddm.protocol.base import sha256_file
from ddm.protocol.classes import Classes
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import FullRange, Slices, TransformSpec
from tests.conftest import PublishedRelease
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, declare, recipe
from tests.support.publishing import publish_short_pages

DATA = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
SPEC = TransformSpec(channels="grey", range=FullRange(), storage="uint8")
NUM = 20


def raw(num: int = NUM, size: tuple[int, ...] = (3, 12, 9)) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (num, *size), np.uint8)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> PublishedRelease:
    """A release of a plan that takes colours of any size."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("transformed"), {"north": 40})
    np.savez(tiny.path / "north.npz", images=raw(40))
    declare(tiny.sites["north"])
    plan_recipe = recipe(
        transform=SPEC.model_dump(mode="json", exclude_none=True), router={"kind": "counts"}
    )
    with pytest.MonkeyPatch.context() as patch:
        publish_short_pages(patch)
        plan_id = tiny.complete(tiny.path / "release", plan_recipe)
    return PublishedRelease(tiny.path / "release", tiny.root, plan_id, tiny)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same pictures in files of their own, in one array, and as the transform makes them."""
    (tmp_path / "pictures").mkdir()
    for number, pixels in enumerate(raw()):
        Image.fromarray(np.moveaxis(pixels, 0, -1)).save(tmp_path / "pictures" / f"{number:03}.png")
    np.savez(tmp_path / "raw.npz", images=raw(), labels=np.arange(NUM) % 2)
    made = open_image_set(tmp_path / "pictures", DATA, SPEC).read()
    np.savez(tmp_path / "prepared.npz", images=made.numpy(), labels=np.arange(NUM) % 2)
    return tmp_path


def evaluated(published: PublishedRelease, reference: Path, *more: object) -> dict[str, Any]:
    arguments = (
        "--reference",
        reference,
        "--num",
        16,
        "--steps",
        1,
        "--neighbours",
        3,
        "--json",
        *more,
    )
    finished = run_command(
        "ddm", "evaluate", published.release, "--root", published.root, *arguments
    )
    assert finished.code == 0, finished.err
    document: dict[str, Any] = json.loads(finished.out)
    return document


def test_figures_are_the_same_whether_the_reference_is_raw_or_prepared(
    published: PublishedRelease, folder: Path
) -> None:
    prepared = evaluated(published, folder / "prepared.npz")
    pictures = evaluated(published, folder / "pictures", "--holdout", folder / "raw.npz")
    array = evaluated(published, folder / "raw.npz")
    assert prepared["metrics"] == pictures["metrics"] == array["metrics"]
    assert prepared["recall_by"] == array["recall_by"] and set(array["recall_by"]) == {"0", "1"}
    assert not pictures["recall_by"] and pictures["holdout"]["digest"] == sha256_file(
        folder / "raw.npz"
    )
    files = sorted((folder / "pictures").iterdir())
    assert pictures["reference"]["digest"] not in {None, *map(sha256_file, files)}
    files[0].unlink()
    assert evaluated(published, folder / "pictures")["reference"]["num"] == NUM - 1


def test_student_is_the_same_whether_its_images_are_raw_or_prepared(
    published: PublishedRelease, folder: Path
) -> None:
    students = []
    for name in ("pictures", "prepared.npz"):
        out = folder / f"{Path(name).stem}.safetensors"
        finished = run_command(
            "ddm",
            "distill",
            published.release,
            "--root",
            published.root,
            "--data",
            folder / name,
            "--steps",
            2,
            "--teacher",
            "mixture",
            "--out",
            out,
        )
        assert finished.code == 0, finished.err
        assert (
            Student.parse(out.with_suffix(".json").read_bytes(), subject="record").images.num == NUM
        )
        students.append(out.read_bytes())
    assert students[0] == students[1]


def test_columns_follow_the_slices_of_a_volume(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=raw(3, (1, 6, 8, 8)), labels=np.array([0, 1, 1]))
    spec = SPEC.model_copy(update={"slices": Slices(count=2)})
    reference = open_reference(tmp_path / "a.npz", DATA, None, spec)
    assert reference.num == 6 and reference.groups == ["0", "0", "1", "1", "1", "1"]
    label_M = classes_of(reference, Classes(2))
    assert label_M is not None and label_M.tolist() == [0, 0, 1, 1, 1, 1]
    np.savez(
        tmp_path / "b.npz",
        images=raw(3, (1, 6, 8, 8)),
        labels=np.array(["normal", " Pneumonia", "1"]),
    )
    label_M = classes_of(
        open_reference(tmp_path / "b.npz", DATA, None, spec), Classes(2, ("Normal", "pneumonia"))
    )
    assert label_M is not None and label_M.tolist() == [0, 0, 1, 1, 1, 1]
    assert (
        sum(len(block) for block in reference.blocks()) == reference.num
        and reference.num_bytes == 6 * 16
    )


def test_what_no_reader_could_compare_with_is_refused(
    published: PublishedRelease, folder: Path
) -> None:
    with pytest.raises(DataError, check=has_subject("--by")):
        open_reference(folder / "pictures", DATA, "hospital", SPEC)
    (folder / "pictures" / "note.png").write_bytes(b"no picture")
    with pytest.raises(DataError, check=has_subject("reference")):
        open_reference(folder / "pictures", DATA, None, SPEC)
    with pytest.raises(DataError, match="folder"):
        open_reference(folder / "pictures", DATA)
    look = (published.release, "--root", published.root)
    finished = run_command(
        "ddm", "evaluate", *look, "--reference", folder / "pictures", "--num", 16
    )
    assert finished.code == DataError.exit_code and "note.png" in finished.err
    assert (
        run_command("ddm", "evaluate", *look, "--reference", folder / "raw.npz").code
        == SetupError.exit_code
    )
