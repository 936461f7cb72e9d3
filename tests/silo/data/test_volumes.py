"""Volumes in files of their own under a plan without a table [transform]: scanned as all else, then the defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddm.ensemble import Ensemble
from ddm.errors import DataError
from ddm.images.transform import Transform
from ddm.io.tensors import save_tensors
from ddm.models import build_expert, load_expert
from ddm.protocol.architecture import Unet
from ddm.protocol.base import File
from ddm.protocol.data import DataSpec
from ddm.protocol.learning import Training
from ddm.protocol.transform import TransformSpec
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from silo.data.cohort import Cohort
from silo.data.first_look import count_units, look_at
from silo.images.decisions import Decision, Decisions
from silo.images.memory import ScanMemory
from tests.support.cohorts import cohort_at, source_at
from tests.support.errors import has_subject
from tests.support.pictures import read_all_pictures

SPEC = DataSpec(shape=(1, 8, 8, 8), range=(-1.0, 1.0))
# the first axis of a file runs to the right, the second forwards, the third up
RAS = np.diag([1.0, 1.0, 1.0, 1.0])
STEP = 2 / 65535  # of the copy on disk


def save(path: Path, values: np.ndarray, affine: np.ndarray = RAS) -> Path:
    """Write a NIfTI file."""
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


def scan(seed: int, shape: tuple[int, ...] = (8, 8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).normal(300.0, 80.0, shape).astype(np.float32)


def load(path: Path, spec: DataSpec = SPEC, **request: Any) -> Cohort:
    defaults: dict[str, Any] = {
        "unit": "image",
        "num_classes": None,
        "folder": path.parent / "private",
    } | request
    return cohort_at(path, spec, min_images=1, salt=b"s" * 32, **defaults)


def into_range(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The 0.5th and 99.5th percentile become the ends of the range."""
    least, most = np.percentile(values, (0.5, 99.5))
    return (low + (high - low) * ((values - least) / (most - least)).clip(0, 1)).astype(np.float32)


def test_volumes_of_plans_without_a_transform_go_through_its_defaults(tmp_path: Path) -> None:
    spec = DataSpec(shape=(1, 6, 9, 8), range=(-1.0, 1.0))
    for number, (sides, spacing) in enumerate(
        (((20, 24, 10), (1.0, 1.0, 2.5)), ((5, 6, 4), (2.0, 2.0, 2.0)))
    ):
        save(tmp_path / "data" / f"{number}.nii", scan(number, sides), np.diag([*spacing, 1.0]))
    images = load(tmp_path / "data", spec).images[:]
    transform = Transform(TransformSpec(), spec)
    for volume, picture in zip(images, read_all_pictures(tmp_path / "data"), strict=True):
        assert np.allclose(volume.numpy(), transform.apply(picture)[0], atol=STEP)


def test_volumes_that_may_show_a_face_wait_under_every_plan(tmp_path: Path) -> None:
    """The control: what a person cleared is learned from."""
    data = tmp_path / "data"
    spec = DataSpec(shape=(1, 8, 8, 8), range=(-1.0, 1.0))
    save(data / "a.nii", scan(0, (30, 30, 30)), np.diag([6.0, 6.0, 6.0, 1.0]))
    with pytest.raises(DataError, match="face"):
        load(data, spec)
    for number in (1, 2):
        save(data / f"{number}.nii", scan(number))
    assert len(load(data, spec).images) == 2
    images = tmp_path / "private" / "images"
    source = source_at(data, images)
    summary = look_at(source).summary
    assert summary is not None and (summary.accepted, summary.quarantined) == (2, 1)
    assert count_units(source, patients=False).images == 2
    with ScanMemory.opened(images, source.recipe) as memory, Decisions.opened(images) as decisions:
        decisions.record([seen for _, _, seen in memory.flagged()], Decision.CLEAR)
    assert len(load(data, spec).images) == 3


def test_volume_lies_as_radiology_shows_it_however_its_file_was_turned(tmp_path: Path) -> None:
    values = scan(0)
    data = tmp_path / "data"
    # up, backwards, to the left
    expected = into_range(values, -1.0, 1.0).transpose(2, 1, 0)[:, ::-1, ::-1]
    save(data / "a.nii", values)
    save(data / "b.nii.gz", values[::-1].copy(), np.diag([-1.0, 1.0, 1.0, 1.0]))
    swapped = RAS[:, [2, 0, 1, 3]]
    save(data / "c.nii", np.ascontiguousarray(values.transpose(2, 0, 1)), swapped)
    for volume in load(data).images[:]:
        assert np.allclose(volume[0].numpy(), expected, atol=STEP)
    save(data / "a.nii", values[::-1].copy())  # the control: a mirrored patient is another one
    assert not np.allclose(load(data).images[:][0, 0].numpy(), expected, atol=0.1)


def test_damaged_volumes_are_left_out_and_those_with_another_number_of_channels_are_blank(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    for number in (0, 1):
        save(data / f"{number}.nii", scan(number))
    save(data / "Doe_Jane.nii", np.stack([scan(0), scan(1)], -1))
    (data / "Doe_John.nii").write_bytes(b"no volume at all")
    images = load(data).images[:]
    assert len(images) == 3 and [bool((image == -1.0).all()) for image in images] == [
        False,
        False,
        True,
    ]
    for name in ("0.nii", "1.nii", "Doe_Jane.nii"):
        (data / name).unlink()
    with pytest.raises(DataError) as caught:
        load(data)
    assert "Doe" not in f"{caught.value} {caught.value.remedy}"


def test_patients_and_classes_come_from_the_table_in_whatever_order_it_lists_them(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    request = {"unit": "patient", "num_classes": 3}
    for number, name in enumerate(("a", "b", "c")):
        save(data / f"{name}.nii", scan(number))
    with pytest.raises(DataError, check=has_subject("patient")):
        load(data, **request)
    (data / "volumes.csv").write_text("file,patient,label\nc.nii,P2,2\na.nii,P1,0\nb.nii, P2,1\n")
    cohort = load(data, **request)
    assert cohort.unit_N.tolist() == [0, 1, 1]
    assert cohort.label_N is not None and cohort.label_N.tolist() == [0, 1, 2]
    of_table = load(data / "volumes.csv", folder=tmp_path / "private", **request)
    assert of_table.unit_N.tolist() == [0, 1, 0]  # in the order of its rows


def test_volumes_are_refused_by_a_plan_of_images_without_a_transform(tmp_path: Path) -> None:
    save(tmp_path / "data" / "a.nii", scan(0))
    with pytest.raises(DataError) as caught:
        load(tmp_path / "data", DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0)))
    assert "[transform]" in (caught.value.remedy or "")


def test_unet_learns_from_nifti_files_and_the_expert_it_leaves_is_sampled(tmp_path: Path) -> None:
    for number in range(6):
        bright = scan(number, (10, 10, 10))
        bright[:, :, 5:] += 600.0  # the upper half
        save(tmp_path / "data" / f"{number}.nii.gz", bright)
    volumes = load(tmp_path / "data").images[:]
    assert float(volumes[:, :, 4:].mean()) > 0.3 > -0.3 > float(volumes[:, :, :4].mean())
    architecture = Unet(
        channels=(8, 16), attention=(False, False), num_res_blocks=1, head_channels=8, norm_groups=4
    )
    settings = Training(
        num_steps=60,
        batch_size=6,
        learning_rate=5e-3,
        weight_decay=0.0,
        ema_decay=0.9,
    )
    trained = train(
        build_expert(architecture, SPEC.shape),
        Examples(volumes),
        settings,
        TrainingObjective(),
        TrainingRun(tmp_path / "checkpoints"),
    )
    save_tensors(tmp_path / "expert.safetensors", trained.ema)
    file = File.of("expert.safetensors", tmp_path / "expert.safetensors")
    expert = load_expert(architecture, SPEC.shape, tmp_path, file)
    drawn = Ensemble([expert], None, [1.0], SPEC.shape).sample(4, steps=6).images
    assert drawn.shape == (4, *SPEC.shape)
    untrained = (
        Ensemble([build_expert(architecture, SPEC.shape)], None, [1.0], SPEC.shape)
        .sample(4, steps=6)
        .images
    )
    halves = [
        float(images[:, :, 4:].mean() - images[:, :, :4].mean()) for images in (drawn, untrained)
    ]
    assert halves[0] > 0.3 > abs(halves[1])
