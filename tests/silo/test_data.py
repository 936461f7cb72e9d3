"""Private images from disk: what is taken, what is refused, and that the digest is the site's own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.errors import DataError, MissingFileError
from ddm.protocol.plan import DataSpec
from silo.data import dataset_digest, load_cohort

SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
SALT = b"s" * 32


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def load(path: Path, min_images: int = 1):  # type: ignore[no-untyped-def]
    return load_cohort(path, SPEC, min_images=min_images, salt=SALT)


def test_cohort_takes_floats_with_and_without_a_channel(tmp_path: Path) -> None:
    array = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 1, 4, 4)
    with_channel = load(save(tmp_path / "a.npz", images=array))
    without = load(save(tmp_path / "b.npz", images=array[:, 0]))
    assert torch.equal(with_channel.images, torch.from_numpy(array))
    assert torch.equal(with_channel.images, without.images)
    assert with_channel.num_units == 3


def test_cohort_scales_bytes_to_the_plans_range(tmp_path: Path) -> None:
    array = np.zeros((2, 4, 4), dtype=np.uint8)
    array[1] = 255
    images = load(save(tmp_path / "a.npz", images=array)).images
    assert float(images[0].min()) == -1.0
    assert float(images[1].max()) == 1.0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 1, 5, 5), dtype=np.float32),
        np.zeros((3, 4, 4, 4), dtype=np.float32),
        np.zeros(16, dtype=np.float32),
        np.full((3, 1, 4, 4), 2.0, dtype=np.float32),
        np.full((3, 1, 4, 4), np.nan, dtype=np.float32),
        np.zeros((3, 1, 4, 4), dtype=np.int64),
        np.array([{"a": 1}], dtype=object),
    ],
    ids=["size", "channels", "flat", "range", "nan", "integers", "pickled objects"],
)
def test_cohort_refuses_images_that_the_plan_did_not_ask_for(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(DataError):
        load(save(tmp_path / "a.npz", images=array))


def test_cohort_refuses_too_few_images_another_array_and_other_files(tmp_path: Path) -> None:
    array = np.zeros((3, 1, 4, 4), dtype=np.float32)
    with pytest.raises(DataError, match="at least 4"):
        load(save(tmp_path / "a.npz", images=array), min_images=4)
    with pytest.raises(DataError):
        load(save(tmp_path / "b.npz", pictures=array))
    (tmp_path / "c.npz").write_bytes(b"not a zip")
    np.save(tmp_path / "d.npy", array)
    whole = save(tmp_path / "e.npz", images=array).read_bytes()
    (tmp_path / "e.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("c.npz", "d.npy", "e.npz"):
        with pytest.raises(DataError):
            load(tmp_path / name)
    with pytest.raises(MissingFileError):
        load(tmp_path / "none.npz")


def test_dataset_digest_changes_with_one_value_and_with_the_sites_salt() -> None:
    images = torch.zeros(3, 1, 4, 4)
    changed = images.clone()
    changed[2, 0, 3, 3] = 1e-6
    digest = dataset_digest(images, SALT)
    assert digest == dataset_digest(images.clone(), SALT)
    assert digest != dataset_digest(changed, SALT)
    assert digest != dataset_digest(images, b"t" * 32)
    assert digest != dataset_digest(images.reshape(3, 1, 2, 8), SALT)
