"""A silo whose images are nothing like the plan's, from a plan with a transform to a submission that is accepted."""

from pathlib import Path

import numpy as np

from tests.support.federation import TinyFederation, declare, recipe

TRANSFORM = {
    "channels": "grey",
    "range": {"kind": "full"},
    "fit": {"kind": "pad"},
    "storage": "uint8",
}


def test_a_silo_brings_images_as_they_are_and_decodes_them_once_for_all_stages(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 60})
    pixels = np.random.default_rng(0).integers(0, 256, (60, 3, 24, 20), np.uint8)
    np.savez_compressed(tmp_path / "tiny" / "north.npz", images=pixels)
    declare(tiny.sites["north"])
    plan_id = tiny.sign(recipe(transform=TRANSFORM))
    tiny.take_part("north", plan_id)
    site = tiny.sites["north"]
    (kept,) = site.private.glob("unpacked-*")
    array = np.load(kept)
    assert (array.dtype, array.shape) == (np.uint8, (60, 1, 4, 4))
    grey = np.tensordot(pixels, (0.299, 0.587, 0.114), (1, 0))
    # 24 x 20 fits as 4 x 3
    assert np.allclose(array[:, 0, :, 1:3].mean(), grey[:, :, 5:15].mean(), atol=3)
    assert not array[:, :, :, 3].any()  # the border
    plan, _ = tiny.federation.current_plan()
    assert plan.transform is not None
