"""The demo script itself, with an expert of a few steps: what it leaves behind is what the reference promises."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.scripts import load_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_three_silos"


def test_demo_data_have_the_promised_sizes_and_different_label_mixes(tmp_path: Path) -> None:
    sizes = load_script(EXAMPLE / "make_data.py").make_data(tmp_path, seed=0)
    silos = {name: size for name, size in sizes.items() if name not in ("public", "evaluation")}
    total = sum(silos.values())
    for name, share in {"north": 0.6, "east": 0.3, "west": 0.1}.items():
        assert silos[name] / total == pytest.approx(share, abs=0.03)
    histograms = []
    seen: set[bytes] = set()
    for name, size in sizes.items():
        with np.load(tmp_path / f"{name}.npz") as archive:
            images = archive["images"]
            assert images.shape == (size, 1, 8, 8)
            assert images.min() >= -1.0
            assert images.max() <= 1.0
            if name in silos:
                histograms.append(np.bincount(archive["labels"], minlength=10) / size)
        own = {image.tobytes() for image in images}
        assert not own & seen, "an image is in two sets"
        seen |= own
    assert min(np.abs(a - b).sum() for i, a in enumerate(histograms) for b in histograms[:i]) > 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_leaves_a_grid_and_a_summary(tmp_path: Path) -> None:
    recipe = (EXAMPLE / "plan.toml").read_text().replace("num_steps = 1000", "num_steps = 60")
    (tmp_path / "plan.toml").write_text(recipe)
    out = tmp_path / "demo"
    command = [
        sys.executable,
        str(EXAMPLE / "run.py"),
        "--out",
        str(out),
        "--recipe",
        str(tmp_path / "plan.toml"),
        "--screenshots",
        str(tmp_path / "screenshots"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["silos"]) == {"north", "east", "west"}
    assert all(
        row["epsilon"] == 8.0 and row["bytes_left"] > 1e6 for row in summary["silos"].values()
    )
    assert not {"router", "shares"} & set(summary), "the long comparison was not asked for"
    comparison = [sys.executable, str(EXAMPLE / "compare.py"), "--out", str(out)]
    result = subprocess.run(comparison, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    summary |= json.loads((out / "summary.json").read_text())
    assert {"prior", "counts", "learned", "non-private"} <= set(summary["router"][0])
    assert {"lock(1)", "sample", "full", "top-1 (biased)"} <= set(summary["shares"])
    assert summary["processes"]["aggregator"]["run_id"] and summary["seconds"]["set up"] > 0
    with Image.open(out / "samples.png") as grid:
        assert grid.width > 500
    for name in ("live-page.png", "review-page.png"):
        with Image.open(tmp_path / "screenshots" / name) as screenshot:
            # A page has text and cards; an empty one has a single colour.
            assert screenshot.width == 900 and screenshot.height > 300
            assert len(screenshot.convert("RGB").getcolors(1 << 16) or []) > 20
