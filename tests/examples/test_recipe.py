"""The comparison of recipes runs as its page says, and takes up where it was stopped."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.mark.slow
def test_rows_are_measured_once_and_written_as_a_table(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part, num in (("train", 800), ("t10k", 80)):
        labels = random.integers(0, 2, num, np.uint8)
        images = random.integers(0, 60, (num, 28, 28), np.uint8) + 150 * labels[:, None, None]
        idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images.astype(np.uint8))
        idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    out = tmp_path / "out"
    words = [
        sys.executable,
        "-m",
        "examples.paper.recipe",
        "--data",
        str(tmp_path),
        "--out",
        str(out),
    ]
    words += ["--steps", "2", "--num", "80"]
    rows = [*words, "--rows", "plain", "afterwards", "dropped", "told", "default"]
    first = subprocess.run(rows, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = (out / "recipe.csv").read_text("utf-8").splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "row",
        "plain",
        "afterwards",
        "dropped",
        "told",
        "default",
    ]
    assert "all defaults, 3000 steps" in first.stdout
    measured = (out / "default-2-80-0.json").read_bytes()
    (out / "plain-2-80-0.json").unlink()
    again = subprocess.run(rows, capture_output=True, text=True, check=True, cwd=ROOT)
    said = again.stdout + again.stderr
    assert "plain: training" in said and "default: training" not in said
    assert (out / "default-2-80-0.json").read_bytes() == measured
