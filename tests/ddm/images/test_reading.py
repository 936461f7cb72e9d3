"""Public images: pictures in a folder through the plan's transform, and arrays without one as before."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddm.errors import DataError, MissingFileError
from ddm.images.array_files import read_images
from ddm.images.samples import open_image_set
from ddm.islands.data import Dataset
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import FullRange, Slices, TransformSpec
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject

DATA = DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0))
SPEC = TransformSpec(channels="grey", range=FullRange(), storage="uint8")


def save(path: Path, seed: int, size: tuple[int, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, np.uint8)).save(path)
    return path


def folder(path: Path) -> Path:
    save(path / "b.png", 0, (30, 20))
    save(path / "a" / "deep.jpg", 1, (18, 40, 3))
    save(path / "c.png", 2, (16, 16, 4))
    return path


def test_a_folder_of_pictures_is_read_as_a_silo_reads_it(tmp_path: Path) -> None:
    public = open_image_set(folder(tmp_path / "public"), DATA, SPEC).read()
    assert public.shape == (3, 1, 16, 16) and public.dtype == torch.float32
    request = {"unit": "image", "num_classes": None, "min_images": 1, "salt": b"s"}
    private = cohort_at(
        tmp_path / "public", DATA, folder=tmp_path / "private", transform=SPEC, **request
    )
    assert torch.equal(private.images[:], public)
    assert torch.equal(Dataset.read(tmp_path / "public", DATA, SPEC).images, public)
    with Image.open(tmp_path / "public" / "b.png") as picture:
        alone = np.asarray(picture.resize((16, 24), Image.Resampling.BILINEAR))
    wanted = alone[4:20].astype(np.float32) / 255 * 2 - 1
    assert float((public[0, 0] - torch.from_numpy(wanted)).abs().max()) <= 2 * 2 / 255


def test_without_a_transform_arrays_are_read_as_they_were_and_pictures_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    np.savez(
        tmp_path / "a.npz", images=np.random.default_rng(0).integers(0, 256, (4, 16, 16), np.uint8)
    )
    assert torch.equal(
        open_image_set(tmp_path / "a.npz", DATA, None).read(), read_images(tmp_path / "a.npz", DATA)
    )
    with pytest.raises(DataError) as caught:
        open_image_set(folder(tmp_path / "public"), DATA, None).read()
    assert "[transform]" in caught.value.remedy


def test_arrays_beside_pictures_are_left_out_where_they_hold_none(tmp_path: Path) -> None:
    public = folder(tmp_path / "public")
    wanted = open_image_set(public, DATA, SPEC).read()
    np.savez(public / "0-features.npz", vectors=np.zeros((3, 8)))
    np.save(public / "b-labels.npy", np.arange(3))
    assert torch.equal(open_image_set(public, DATA, SPEC).read(), wanted)
    np.savez(public / "z.npz", images=np.zeros((2, 16, 16), np.uint8))
    assert len(open_image_set(public, DATA, SPEC).read()) == 5
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays/features.npy", np.arange(3))
    with pytest.raises(DataError, check=has_subject("images")):
        open_image_set(tmp_path / "arrays", DATA, SPEC).read()


def test_volumes_in_an_npz_become_slices_and_an_image_that_fails_is_named_by_its_file(
    tmp_path: Path,
) -> None:
    np.savez(
        tmp_path / "a.npz", images=np.random.default_rng(0).random((2, 1, 8, 20, 20), np.float32)
    )
    actual = open_image_set(tmp_path / "a.npz", DATA, TransformSpec(slices=Slices(count=3))).read()
    assert actual.shape == (6, 1, 16, 16)
    with pytest.raises(DataError, match="a.npz: picture: expected an image"):
        open_image_set(tmp_path / "a.npz", DATA, TransformSpec()).read()
    with pytest.raises(MissingFileError):
        open_image_set(tmp_path / "nothing.npz", DATA, SPEC).read()
    (tmp_path / "bad").mkdir()
    with pytest.raises(DataError, match="^images: expected at least one"):
        open_image_set(tmp_path / "bad", DATA, SPEC).read()
    save(tmp_path / "bad" / "a.png", 0, (16, 16))
    (tmp_path / "bad" / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="b.png: not an image"):
        open_image_set(tmp_path / "bad", DATA, SPEC).read()
