"""The recipe that trains a public autoencoder: it learns, it resumes exactly, and a plan can take what it leaves."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.encoders.autoencoder import open_weights
from ddm.planning.recipe import AutoencoderKlRecipe

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "autoencoder" / "train.py"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Stripes, along one side or the other."""
    rng = np.random.default_rng(0)
    stripes = np.sin(
        rng.uniform(0.5, 2.0, (80, 1, 1, 1)) * np.arange(8) + rng.uniform(0, 6, (80, 1, 1, 1))
    )
    images = np.where(
        rng.random((80, 1, 1, 1)) < 0.5,
        stripes + np.zeros((80, 1, 8, 8)),
        stripes.transpose(0, 1, 3, 2),
    )
    np.savez(tmp_path / "public.npz", images=images.astype(np.float32))
    return tmp_path / "public.npz"


def run(data: Path, out: Path, steps: int, *more: str, expect: int = 0) -> str:
    command = [
        sys.executable,
        str(SCRIPT),
        "--data",
        str(data),
        "--out",
        str(out),
        "--steps",
        str(steps),
        *more,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == expect, result.stderr
    return result.stdout


def test_autoencoder_beats_the_mean_image_and_a_plan_takes_its_table(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "autoencoder.safetensors"
    output = run(data, out, 60)
    line = next(line for line in output.splitlines() if line.startswith("reconstruction"))
    error, of_mean = (
        float(part.split("(")[0].split()[-1]) for part in line.split(": ")[1].split(", ")
    )
    assert error < 0.7 * of_mean
    table = tomllib.loads(output[output.index("[latent]") :])["latent"]
    recipe = AutoencoderKlRecipe.model_validate_json(json.dumps(table))
    with np.load(data) as public:
        images = torch.from_numpy(public["images"])
    opened = open_weights(Path(recipe.weights), recipe, (1, 8, 8))
    assert float((opened.decode(opened.encode(images)) - images).abs().mean()) < 0.7 * of_mean


def test_run_that_was_killed_goes_on_to_the_same_bytes(data: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    parts = tmp_path / "parts.safetensors"
    run(data, whole, 30, "--every", "10")
    command = [
        sys.executable,
        "-u",
        str(SCRIPT),
        "--data",
        str(data),
        "--out",
        str(parts),
        "--steps",
        "30",
        "--every",
        "10",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 10 ")
        process.kill()
    assert not parts.exists()
    assert "going on from step " in run(data, parts, 30, "--every", "10")
    assert parts.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*checkpoint*"))
    run(data, tmp_path / "other.safetensors", 30, "--seed", "1")
    assert (tmp_path / "other.safetensors").read_bytes() != whole.read_bytes()
