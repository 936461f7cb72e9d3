"""Private pictures on their way through the plan's transform."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import DataError
from ddm.imaging.reading import read_transformed
from ddm.imaging.transform import Transform
from ddm.protocol.plan import DataSpec, TransformSpec
from silo.data.transformed import open_transformed

DATA = DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0))
SPEC = TransformSpec(channels="grey")


def test_picture_that_a_person_must_see_first_does_not_become_a_sample(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), np.uint8)
    Image.fromarray(noise).save(folder / "a.png")
    assert len(open_transformed(folder, Transform(SPEC, DATA), [], tmp_path)) == 1
    Image.new("RGB", (1280, 720)).save(folder / "DOE^JOHN.png")  # as large as a screen
    with pytest.raises(DataError) as caught:
        open_transformed(folder, Transform(SPEC, DATA), [], tmp_path)
    assert caught.value.got == "screenshot" and "silo scan" in caught.value.remedy
    assert "DOE" not in f"{caught.value} {caught.value.remedy}"
    assert len(read_transformed(folder, DATA, TransformSpec(channels="grey", range={"kind": "full"}))) == 2
