"""The example of two hospitals: how it lays the data out, what it refuses, and the whole of it with few steps."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aggregator.planning.recipe import Recipe
from ddm.io.settings import load_settings
from ddm.planning.recipe import TrainedBaseRecipe
from tests.support.scripts import load_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_hospitals_cxr"
NUM_PATIENTS = 45
SMALL = {
    "num_steps = 1200": "num_steps = 6",
    "depth = 4": "depth = 1",
    "[data]": "rehearsal = true\n[data]",
}


def made(folder: Path) -> tuple[Path, Path]:
    """Data sets of the same layout, with two or three made pictures a patient."""
    rng = np.random.default_rng(0)
    hannover = folder / "hannover"
    pneumonia = folder / "pneumonia.npz"
    (hannover / "images").mkdir(parents=True)
    with (hannover / "metadata.csv").open("w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(("file", "original_name", "patient_id", "finding"))
        for number in range(NUM_PATIENTS * 5 // 2):
            name = f"images/{number:03}.png"
            Image.fromarray(xray(rng, 105, 128)).save(hannover / name)
            table.writerow((name, f"{number}.png", f"patient-{number * 2 // 5}", "COVID-19"))
    parts = {
        part: np.stack([xray(rng, 28, 28) for _ in range(num)])
        for part, num in (("train", 90), ("val", 160))
    }
    np.savez(pneumonia, **{f"{part}_images": images for part, images in parts.items()})  # type: ignore[arg-type]
    return hannover, pneumonia


def xray(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Two dark fields on grey."""
    across = np.cos(np.linspace(-2.2, 2.2, width) * 2.8)[None] * np.hanning(height)[:, None] ** 0.5
    return np.clip(130 + 60 * across + 10 * rng.standard_normal((height, width)), 0, 255).astype(
        np.uint8
    )


def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_data_are_laid_out_without_a_patient_on_both_sides(tmp_path: Path) -> None:
    hannover, pneumonia = made(tmp_path)
    sizes = load_script(EXAMPLE / "make_data.py").make_data(hannover, pneumonia, tmp_path / "data")
    assert (
        sizes["guangzhou"] == 90
        and sizes["hannover"] + sizes["public"] - 150 == NUM_PATIENTS * 5 // 2
    )
    with (tmp_path / "data" / "hannover.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert len({row["patient"] for row in rows}) == NUM_PATIENTS - 15
    private = {(tmp_path / "data" / row["path"]).read_bytes() for row in rows}
    public = {path.read_bytes() for path in (tmp_path / "data" / "public").glob("hannover-*.png")}
    assert len(public) + len(rows) == NUM_PATIENTS * 5 // 2 and not public & private
    with np.load(tmp_path / "data" / "guangzhou.npz") as archive, np.load(pneumonia) as source:
        assert (archive["images"] == source["train_images"]).all()
        assert len(set(archive["patients"].tolist())) == 90
    assert len(list((tmp_path / "data" / "public").glob("guangzhou-*.png"))) == 150


def test_what_is_not_the_data_set_is_refused_with_what_to_name(tmp_path: Path) -> None:
    hannover, pneumonia = made(tmp_path)
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    script = load_script(EXAMPLE / "make_data.py")
    for folder, file, said in [
        (tmp_path, pneumonia, "--hannover"),
        (hannover, tmp_path / "nothing.npz", "--pneumonia"),
        (hannover, tmp_path / "other.npz", "--pneumonia"),
        (hannover, hannover / "metadata.csv", "--pneumonia"),
    ]:
        with pytest.raises(script.InputError, match=said):
            script.make_data(folder, file, tmp_path / "data")
    result = run(
        "make_data.py", "--hannover", tmp_path, "--pneumonia", pneumonia, "--out", tmp_path / "data"
    )
    assert (
        result.returncode == 1
        and result.stderr.startswith("error: ")
        and "Traceback" not in result.stderr
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    result = run(
        "run.py", "--hannover", hannover, "--pneumonia", pneumonia, "--out", tmp_path / "mine"
    )
    assert (
        result.returncode == 1
        and "--out" in result.stderr
        and (tmp_path / "mine" / "thesis.txt").exists()
    )


def test_recipe_with_a_base_gives_it_all_steps_and_the_experts_an_eighth(tmp_path: Path) -> None:
    script = load_script(EXAMPLE / "run.py")
    path = script.write_recipe_with_base(EXAMPLE / "plan.toml", tmp_path)
    with_base = load_settings(Recipe, path)
    without = load_settings(Recipe, EXAMPLE / "plan.toml")
    assert isinstance(with_base.base, TrainedBaseRecipe)
    assert with_base.base.training.num_steps == without.expert.training.num_steps == 1200
    assert with_base.expert.training.num_steps == 150
    # Experts from a base begin at half of the rate.
    rate = without.expert.training.learning_rate
    assert with_base.expert.training.learning_rate == rate / 2


class RecordingDemo:
    """A demo that runs no command, and remembers each."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out / "root.json"
        self.background: list[object] = []
        self.commands: list[tuple[object, ...]] = []
        (out / "release").mkdir(parents=True)
        (out / "release" / "report.html").touch()

    def call(self, *words: object) -> None:
        self.commands.append(words)

    def ignore(self, *words: object, **options: object) -> None:
        """Do nothing in place of a method that runs several commands."""

    join = enroll = start = accept = waive = wait = ignore

    @staticmethod
    def free_port() -> int:
        return 1


@pytest.mark.parametrize("public", [None, "photographs.npz"])
def test_plan_and_base_take_the_public_images_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public: str | None
) -> None:
    script = load_script(EXAMPLE / "run.py")
    demo = RecordingDemo(tmp_path / "out")
    monkeypatch.setattr(script, "run_demo", lambda out, act, again: act(demo) or 0)
    words = ["run.py", "--hannover", "hannover", "--pneumonia", "pneumonia.npz", "--base"]
    expected = demo.out / "data" / "public"
    licence = "CC-BY-4.0"
    if public is not None:
        expected = tmp_path / public
        licence = "CC0-1.0"
        expected.touch()
        words += ["--public", str(expected), "--base-licence", licence]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0
    public_of_command = {}
    for command in demo.commands:
        if "--public" in command:
            public_of_command[command[1]] = command[command.index("--public") + 1]
    assert public_of_command == {"base": expected, "plan": expected}
    recipe = load_settings(Recipe, demo.out / "plan.toml")
    assert isinstance(recipe.base, TrainedBaseRecipe)
    assert recipe.base.licence == licence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--public", "missing"), "there is no missing"),
        (("--public", str(EXAMPLE), "--base"), "--base-licence"),
        (("--base-licence", "CC0-1.0"), "give --base as well"),
    ],
)
def test_public_images_that_are_missing_or_without_a_licence_are_refused_before_anything_runs(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    refused = run("run.py", "--hannover", tmp_path, "--pneumonia", tmp_path, "--out", out, *options)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not out.exists()


def published(folder: Path) -> tuple[Path, Path]:
    """The published data sets, where variables name them."""
    folders = [os.environ.get(name) for name in ("CXR_HANNOVER", "PNEUMONIA_MNIST")]
    if not all(folders):
        pytest.skip("the variables CXR_HANNOVER and PNEUMONIA_MNIST do not name the data sets")
    return Path(str(folders[0])), Path(str(folders[1]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sources", "with_base", "with_public"),
    [(made, False, False), (made, True, False), (made, True, True), (published, False, False)],
)
def test_example_leads_from_folders_to_samples_of_a_verified_release(
    sources: Callable[[Path], tuple[Path, Path]],
    with_base: bool,
    with_public: bool,
    tmp_path: Path,
) -> None:
    hannover, pneumonia = sources(tmp_path)
    recipe = (EXAMPLE / "plan.toml").read_text()
    for old, new in SMALL.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "plan.toml").write_text(recipe)
    out = tmp_path / "out"
    options: tuple[object, ...] = (
        "--hannover",
        hannover,
        "--pneumonia",
        pneumonia,
        "--recipe",
        tmp_path / "plan.toml",
        "--num",
        4,
    )
    if with_base:
        options += ("--base",)
    if with_public:
        random = np.random.default_rng(7)
        images = np.stack([xray(random, 32, 32) for _ in range(160)])
        np.savez(tmp_path / "public.npz", images=images)
        options += ("--public", tmp_path / "public.npz", "--base-licence", "CC0-1.0")
    result = run("run.py", *options, "--out", out)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name in ("hannover", "guangzhou", "both"):
        with Image.open(out / f"{name}.png") as picture:
            assert picture.width > 100
    assert "none unlisted" in result.stdout
    manifest = json.loads(next((out / "release").rglob("manifest.json")).read_bytes())
    assert (manifest.get("base") is not None) == with_base
    if with_public:
        assert manifest["base"]["licence"] == "CC0-1.0"
        # A quarter of the public images is held out.
        assert manifest["base"]["num_images"] == 120
    submissions = [
        json.loads(path.read_bytes()) for path in out.glob("*/outbox/**/submission.json")
    ]
    with (out / "data" / "hannover.csv").open() as handle:
        patients = len({row["patient"] for row in csv.DictReader(handle)})
    assert min(submission["num_units"] for submission in submissions) == patients
