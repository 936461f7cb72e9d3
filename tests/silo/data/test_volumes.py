"""NIfTI volumes from disk: how they are turned, mapped and cut, what is refused, and an expert made of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble
from ddm.errors import DataError, MissingFileError, SetupError
from ddm.io.sources import open_images
from ddm.io.tensors import save_tensors
from ddm.models import build_expert, load_expert
from ddm.protocol.architecture import Unet
from ddm.protocol.base import File
from ddm.protocol.plan import DataSpec, Training, UniformT
from ddm.training.loop import train
from silo.data.cohort import Cohort, load_cohort
from silo.data.first_look import look_at
from silo.data.volumes import Volumes, are_volumes

SPEC = DataSpec(shape=(1, 8, 8, 8), range=(-1.0, 1.0))
RAS = np.diag([1.0, 1.0, 1.0, 1.0])  # the first axis of a file runs to the right, the second forwards, the third up


def save(path: Path, values: np.ndarray, affine: np.ndarray = RAS) -> Path:
    """Write a NIfTI file."""
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


def scan(seed: int, shape: tuple[int, ...] = (8, 8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).normal(300.0, 80.0, shape).astype(np.float32)


def read_volumes(path: Path, spec: DataSpec) -> torch.Tensor:
    return open_images(Volumes(path, spec), spec, None)[:]


def load(path: Path, **asked: Any) -> Cohort:
    return load_cohort(path, SPEC, min_images=1, salt=b"s" * 32, **({"unit": "image", "num_classes": None} | asked))


def into_range(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The 0.5th and 99.5th percentile become the ends of the range."""
    least, most = np.percentile(values, (0.5, 99.5))
    return (low + (high - low) * ((values - least) / (most - least)).clip(0, 1)).astype(np.float32)


def test_volumes_of_plans_without_a_transform_are_to_the_bit_those_of_nibabel_and_monai(tmp_path: Path) -> None:
    import nibabel
    from monai.transforms import Resize

    spec = DataSpec(shape=(1, 6, 9, 8), range=(-1.0, 1.0))
    for number, (sides, spacing) in enumerate((((20, 24, 10), (1.0, 1.0, 2.5)), ((5, 6, 4), (2.0, 2.0, 2.0)))):
        path = save(tmp_path / f"{number}.nii", scan(number, sides), np.diag([*spacing, 1.0]))
        image: Any = nibabel.load(path)
        turned = image.get_fdata(dtype=np.float32).transpose(2, 1, 0)[:, ::-1, ::-1]
        extent = np.array(sides[::-1]) * spacing[::-1]
        side = min(extent / spec.shape[1:])
        size = tuple(
            int(max(least, round(length / side))) for length, least in zip(extent, spec.shape[1:], strict=True)
        )
        resize = Resize(size, mode="trilinear", align_corners=False, anti_aliasing=True)
        whole = resize(torch.from_numpy(into_range(np.ascontiguousarray(turned), -1.0, 1.0))[None])
        d, h, w = ((have - kept) // 2 for have, kept in zip(size, spec.shape[1:], strict=True))
        wanted = whole.numpy()[:, d : d + 6, h : h + 9, w : w + 8].clip(-1, 1)
        assert np.array_equal(read_volumes(path, spec)[0].numpy(), wanted)


def test_folders_and_nifti_files_are_volumes_and_npz_files_are_not(tmp_path: Path) -> None:
    assert not are_volumes(tmp_path)
    (tmp_path / "a.nii.gz").touch()
    assert are_volumes(tmp_path)
    assert are_volumes(tmp_path / "a.nii.gz")
    assert not are_volumes(tmp_path / "a.npz")


def test_plan_for_pictures_and_folders_without_volumes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="as the plan requires"):
        read_volumes(tmp_path, DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0)))
    with pytest.raises(DataError, match="no such file"):
        read_volumes(tmp_path, SPEC)
    with pytest.raises(MissingFileError):
        read_volumes(tmp_path / "a.nii", SPEC)


def test_volumes_without_monai_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "monai.data", None)
    (tmp_path / "a.nii").write_bytes(b"anything")
    with pytest.raises(SetupError, match="MONAI") as caught:
        read_volumes(tmp_path, SPEC)
    assert "nibabel" in caught.value.remedy


def test_volume_lies_as_radiology_shows_it_however_its_file_was_turned(tmp_path: Path) -> None:
    values = scan(0)
    expected = into_range(values, -1.0, 1.0).transpose(2, 1, 0)[:, ::-1, ::-1]  # up, backwards, to the left
    save(tmp_path / "a.nii", values)
    save(tmp_path / "b.nii.gz", values[::-1].copy(), np.diag([-1.0, 1.0, 1.0, 1.0]))
    swapped = RAS[:, [2, 0, 1, 3]]
    save(tmp_path / "c.nii", np.ascontiguousarray(values.transpose(2, 0, 1)), swapped)
    for volume in load(tmp_path).images[:]:
        assert np.allclose(volume[0].numpy(), expected, atol=1e-6)
    save(tmp_path / "a.nii", values[::-1].copy())  # the control: a mirrored patient is another one
    assert not np.allclose(read_volumes(tmp_path / "a.nii", SPEC)[0, 0].numpy(), expected, atol=0.1)


def test_thick_slices_become_cubes_and_the_longer_axis_loses_its_ends(tmp_path: Path) -> None:
    height = np.arange(4.0, dtype=np.float32)  # slices 2 mm thick, 8 mm in all
    values = np.broadcast_to(height, (12, 8, 4)) + 0.0
    values[[0, 1, 10, 11]] += 100.0  # beyond the middle 8 mm
    save(tmp_path / "a.nii", values.astype(np.float32), np.diag([1.0, 1.0, 2.0, 1.0]))
    volume = read_volumes(tmp_path, SPEC)[0, 0]
    assert volume.shape == (8, 8, 8)
    assert torch.allclose(volume, volume[:, :1, :1].expand_as(volume), atol=1e-5)
    assert bool((volume[1:, 0, 0] >= volume[:-1, 0, 0]).all())
    assert float(volume.max()) < -0.8  # what shone lay beyond


def test_channels_are_the_fourth_axis_and_must_be_the_plans(tmp_path: Path) -> None:
    values = np.stack([scan(0), scan(1)], -1)
    save(tmp_path / "a.nii", values)
    volume = read_volumes(tmp_path, DataSpec(shape=(2, 8, 8, 8), range=(0.0, 1.0)))[0]
    expected = into_range(values, 0.0, 1.0).transpose(3, 2, 1, 0)[:, :, ::-1, ::-1]
    assert np.allclose(volume.numpy(), expected, atol=1e-6)
    with pytest.raises(DataError, match="channels"):
        read_volumes(tmp_path, SPEC)


def test_refusals_say_which_volume_and_never_its_name(tmp_path: Path) -> None:
    save(tmp_path / "Doe_Jane.nii", scan(0))
    (tmp_path / "Doe_John.nii").write_bytes(b"no volume at all")
    for spoilt in (None, np.full((8, 8, 8), 5.0, np.float32), np.full((8, 8, 8), np.nan, np.float32)):
        if spoilt is not None:
            save(tmp_path / "Doe_John.nii", spoilt)
        with pytest.raises(DataError, match="volume 2 of 2") as caught:
            load(tmp_path)
        assert "Doe" not in f"{caught.value} {caught.value.remedy}"


def test_patients_and_classes_come_from_the_table_in_whatever_order_it_lists_them(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        save(tmp_path / f"{name}.nii", scan(number))
    asked = {"unit": "patient", "num_classes": 3}
    with pytest.raises(MissingFileError, match="volumes.csv"):
        load(tmp_path, **asked)
    table = tmp_path / "volumes.csv"
    table.write_text("file,patient,label\nc.nii,P2,2\na.nii,P1,0\nb.nii, P2,1\n")
    cohort = load(tmp_path, **asked)
    assert cohort.unit_N.tolist() == [0, 1, 1]
    assert cohort.label_N is not None and cohort.label_N.tolist() == [0, 1, 2]
    cut = "patient,file\nP1, of two,a.nii\nP1, too,b.nii\nP2, more,c.nii\n"  # alone pandas takes first cells for names
    for spoilt in (cut, "file,patient\na.nii,P1\n", "file,patient\na.nii,1\na.nii,2\nb.nii,3\nc.nii,4\n", "x\n1\n", ""):
        table.write_text(spoilt)
        with pytest.raises(DataError, match="volumes.csv"):
            load(tmp_path, unit="patient")
    table.write_text("file,label\na.nii,0\nb.nii,1\n")
    with pytest.raises(DataError, match="one row for each of 3 volumes"):  # before there is a plan
        look_at(tmp_path, tmp_path / "scans")
    table.unlink()
    look_at(tmp_path, tmp_path / "scans")


def test_unet_learns_from_nifti_files_and_the_expert_it_leaves_is_sampled(tmp_path: Path) -> None:
    for number in range(6):
        bright = scan(number, (10, 10, 10))
        bright[:, :, 5:] += 600.0  # the upper half
        save(tmp_path / "data" / f"{number}.nii.gz", bright)
    volumes = load(tmp_path / "data").images
    assert float(volumes[:, :, 4:].mean()) > 0.3 > -0.3 > float(volumes[:, :, :4].mean())
    architecture = Unet(channels=(8, 16), attention=(False, False), num_res_blocks=1, head_channels=8, norm_groups=4)
    settings = Training(
        num_steps=60, batch_size=6, learning_rate=5e-3, weight_decay=0.0, ema_decay=0.9, checkpoint_steps=60
    )
    trained = train(
        build_expert(architecture, SPEC.shape),
        volumes,
        settings,
        LinearPath(),
        UniformT(),
        checkpoint_dir=tmp_path / "checkpoints",
        on_progress=lambda progress: None,
        should_stop=lambda: False,
    )
    save_tensors(tmp_path / "expert.safetensors", trained.ema)
    file = File.of("expert.safetensors", tmp_path / "expert.safetensors")
    expert = load_expert(architecture, SPEC.shape, tmp_path, file)
    drawn = Ensemble([expert], None, [1.0], SPEC.shape).sample(4, steps=6).images
    assert drawn.shape == (4, *SPEC.shape)
    untrained = Ensemble([build_expert(architecture, SPEC.shape)], None, [1.0], SPEC.shape).sample(4, steps=6).images
    halves = [float(images[:, :, 4:].mean() - images[:, :, :4].mean()) for images in (drawn, untrained)]
    assert halves[0] > 0.3 > abs(halves[1])
