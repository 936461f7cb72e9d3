"""Images of whole numbers: their type's range becomes the plan's."""

from pathlib import Path

import numpy as np
import pytest

from ddm.errors import DataError
from ddm.images.array_files import read_images
from ddm.protocol.plan import DataSpec

SPEC = DataSpec(shape=(1, 2, 2), range=(-1.0, 3.0))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_whole_numbers_are_spread_over_the_plans_range(tmp_path: Path, dtype: type) -> None:
    most = np.iinfo(dtype).max
    np.savez(tmp_path / "a.npz", images=np.array([[[0, most], [most // 3, most // 5]]], dtype=dtype))
    found = read_images(tmp_path / "a.npz", SPEC).flatten().tolist()
    assert found == pytest.approx([-1.0, 3.0, 1 / 3, -0.2], abs=1e-6)


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64, bool])
def test_other_whole_numbers_are_refused(tmp_path: Path, dtype: type) -> None:
    np.savez(tmp_path / "a.npz", images=np.ones((1, 2, 2), dtype=dtype))
    with pytest.raises(DataError, match="uint8 or uint16"):
        read_images(tmp_path / "a.npz", SPEC)
