"""Fashion-MNIST as it comes, in eight islands, through the commands."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run_command
from tests.support.islands import RECIPE, Owner


@pytest.mark.slow
def test_fashion_mnist_in_eight_islands_is_sampled_by_their_shares(tmp_path: Path) -> None:
    folder = os.environ.get("FASHION_MNIST")
    if not folder:
        pytest.skip("the variable FASHION_MNIST does not name the folder of the data set's files")
    recipe = RECIPE.replace("[1, 8, 8]", "[1, 28, 28]").replace(
        "num_fine = 24", "num_fine = 128\nbalanced = true"
    )
    recipe = recipe.replace("num_groups = 8", "num_groups = 32")
    owner = Owner.make(tmp_path, steps=100, recipe=recipe + "fit_images = 6000\n")
    known = (
        "--recipe",
        owner.path / "plan.toml",
        "--out",
        owner.run,
        "--passphrase-file",
        owner.path / "pass",
    )
    data = Path(folder) / "train-images-idx3-ubyte.gz"
    for result in (
        run_command("ddm", "split", "--data", data, "--islands", 8, *known),
        owner.train(),
        owner.assemble("release"),
        owner.read(
            "sample", "release", "--num", 256, "--steps", 4, "--out", tmp_path / "samples.npz"
        ),
    ):
        assert result.code == 0, result.err
    assert np.isfinite(np.load(tmp_path / "samples.npz")["images"]).all()
    shown = [float(word.split()[1]) for word in result.out.split("Experts: ")[1].split(", ")]
    assert len(shown) == 8
    assert sum(shown) == pytest.approx(1.0, abs=0.05)
    assert max(shown) < 0.3  # balanced islands of 1/8 each
