"""`ddm evaluate` as a researcher types it: the figures, the page, the same again, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium.webdriver import Chrome
from typer.testing import CliRunner

from ddm.cli.main import app
from ddm.encoders.timm import TimmEncoder
from ddm.errors import DataError, MemoryLimitError, MissingFileError, SetupError, TensorFileError
from ddm.evaluation import SampleOrigins, evaluate
from ddm.evaluation.classifier import train_classifier
from ddm.loading.plan import PlanFiles
from ddm.protocol.base import sha256_file
from ddm.protocol.data import DataSpec
from tests.conftest import PublishedRelease
from tests.support.browser import overflow, show_as
from tests.support.case import case
from tests.support.federation import images
from tests.support.publishing import verify_release

SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reference images that name the silo whose data they resemble, and others held out."""
    path = tmp_path_factory.mktemp("evaluation")
    for name, seed in (("reference", 70), ("holdout", 71)):
        arrays = [images(80, centre, seed=seed) for centre in (-0.5, 0.5)]
        np.savez_compressed(
            path / f"{name}.npz",
            images=np.concatenate(arrays),
            silos=["east"] * 80 + ["north"] * 80,
        )
    return path


def run(
    published: PublishedRelease, folder: Path, *words: object
) -> tuple[str, BaseException | None]:
    """Run the command; return what it printed and how it ended."""
    look = (published.release, "--root", published.root, "--state", folder / "state")
    arguments = ("--reference", folder / "reference.npz", *words)
    result = CliRunner().invoke(app, ["evaluate", *map(str, (*look, *arguments))])
    return result.stdout, result.exception


def figures(printed: str) -> dict[str, Any]:
    """The document that was printed, alone."""
    document: dict[str, Any] = json.loads(printed)
    return document


@pytest.fixture(scope="module")
def compared(published_once: PublishedRelease, folder: Path) -> str:
    """Two strategies at once, with the page."""
    words = (
        "--num",
        60,
        "--steps",
        4,
        "--strategy",
        "lock",
        "--strategy",
        "sample",
        "--json",
        "--out",
        folder / "page",
    )
    printed, error = run(published_once, folder, *words, "--holdout", folder / "holdout.npz")
    assert error is None, printed
    return printed


def test_figures_are_those_of_the_library_on_what_ddm_sample_draws(
    published_once: PublishedRelease, folder: Path, compared: str
) -> None:
    printed_figures = figures(compared)
    other_strategies = [other["strategy"] for other in printed_figures["compared"]]
    assert printed_figures["strategy"] == "lock" and other_strategies == ["sample"]
    out = folder / "drawn.npz"
    look = (published_once.release, "--root", published_once.root, "--state", folder / "state")
    drawn = CliRunner().invoke(
        app, ["sample", *map(str, (*look, "--num", 60, "--steps", 4, "--out", out))]
    )
    assert drawn.exception is None
    release = verify_release(published_once, published_once.release)
    encoder = PlanFiles.load(release.plan, release.folder).encoder
    with (
        np.load(out) as samples,
        np.load(folder / "reference.npz") as real,
        np.load(folder / "holdout.npz") as held,
    ):
        prior = [expert.prior for expert in release.manifest.experts]
        expected = evaluate(
            samples["images"],
            real["images"],
            features=encoder.encode,
            origins=SampleOrigins(samples["expert"], ["east", "north"], prior),
            holdout=held["images"],
        ).to_json()
    for name, estimate in expected["metrics"].items():
        assert printed_figures["metrics"][name] == pytest.approx(estimate, rel=1e-4, abs=1e-6), name
    assert printed_figures["share_error"] == pytest.approx(expected["share_error"])
    assert printed_figures["per_silo"]["east"]["prior"] == pytest.approx(60 / 180)
    assert (
        printed_figures["copies"]["pixels"]["near_copies"]
        == expected["copies"]["pixels"]["near_copies"]
    )
    # the silo's own reference images
    assert {estimate["num_reference"] for estimate in printed_figures["per_silo"].values()} == {80}
    assert set(printed_figures["recall_by"]) == {"east", "north"}
    assert printed_figures["release"]["manifest"] == sha256_file(release.folder / "manifest.json")
    assert printed_figures["reference"]["digest"] == sha256_file(folder / "reference.npz")
    assert (
        printed_figures["features"]["digest"] == release.plan.file(release.plan.encoder.path).digest
    )
    printed, error = run(
        published_once, folder, "--samples", out, "--json", "--holdout", folder / "holdout.npz"
    )
    assert error is None
    again = figures(printed)
    for name, estimate in printed_figures["metrics"].items():
        assert again["metrics"][name] == pytest.approx(estimate, rel=1e-4, abs=1e-6), name
    assert (
        again["sampling"] is None and again["per_silo"].keys() == printed_figures["per_silo"].keys()
    )


def test_page_shows_the_figures_and_reaches_nothing_outside_itself(
    folder: Path, compared: str
) -> None:
    page = (folder / "page" / "index.html").read_text("utf-8")
    assert json.loads((folder / "page" / "evaluation.json").read_text("utf-8")) == figures(compared)
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:image/png;base64,|#)""", page)
    # reference, two silos, pairs in two spaces
    assert page.count("data:image/png;base64,") == 16 * 3 + 2 * 2 * 12
    for name in figures(compared)["metrics"]:
        assert f'<th scope="row">{name}</th>' in page


def test_page_with_reference_images_is_for_its_owner_and_says_so(
    folder: Path, compared: str
) -> None:
    page = folder / "page" / "index.html"
    assert page.stat().st_mode & 0o777 == 0o600
    assert (folder / "page" / "evaluation.json").stat().st_mode & 0o777 == 0o644
    assert "This page shows images of the reference: 16 of them" in page.read_text("utf-8")


def test_floor_is_given_beside_the_samples_at_the_same_numbers(compared: str) -> None:
    floor = figures(compared)["floor"]
    assert (floor["num"], floor["num_reference"]) == (60, 80)
    assert floor["samples"].keys() == floor["metrics"].keys()
    # Both have the same numbers on both sides, so neither has less bias than the other.
    assert floor["samples"]["fid"]["value"] != figures(compared)["metrics"]["fid"]["value"]


def test_page_fits_a_phone_and_a_desktop(folder: Path, compared: str, browser: Chrome) -> None:
    for device in ("phone", "desktop"):
        show_as(browser, device)
        browser.get((folder / "page" / "index.html").as_uri())
        assert overflow(browser) == 0, device


def test_table_names_what_the_figures_do_not_say(
    published_once: PublishedRelease, folder: Path
) -> None:
    np.savez(folder / "nine.npz", images=images(9, 0.0, seed=3))
    printed, error = run(
        published_once, folder, "--samples", folder / "nine.npz", "--neighbours", 3
    )
    assert error is None
    for word in (
        "kid",
        "95% interval",
        "floor",
        "diagnostic",
        "near copies by pixels",
        "biased upwards",
        "9 samples",
    ):
        assert word in printed
    assert "share error" not in printed  # the file does not say which silo its samples came from


def test_wrong_files_and_flags_are_refused(published_once: PublishedRelease, folder: Path) -> None:
    np.savez(folder / "large.npz", images=np.zeros((20, 1, 5, 4), np.float32))
    np.savez(folder / "bright.npz", images=np.full((20, 1, 4, 4), 7.0, np.float32))
    np.savez(folder / "owners.npz", images=images(20, 0.0, seed=3), expert=np.full(20, 2))
    (folder / "text.npz").write_text("no archive")
    (folder / "odd.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    drawn = ("--num", 16, "--steps", 1)
    for words, kind, said in [
        ((), SetupError, "--num"),
        ((*drawn, "--tau", 0.5, "--strategy", "full"), SetupError, "--tau"),
        (("--samples", folder / "owners.npz", "--strategy", "full"), SetupError, "--strategy"),
        ((*drawn, "--out", folder / "page.html"), SetupError, "--out"),
        ((*drawn, "--reference", folder / "none.npz"), MissingFileError, "none.npz"),
        ((*drawn, "--reference", folder / "text.npz"), DataError, "npz"),
        ((*drawn, "--reference", folder / "large.npz"), DataError, "(1, 4, 4)"),
        ((*drawn, "--reference", folder / "bright.npz"), DataError, "within [-1, 1]"),
        ((*drawn, "--by", "hospital"), DataError, "hospital"),
        (("--samples", folder / "owners.npz"), DataError, "below 2"),
        ((*drawn, "--features", "inception"), MissingFileError, "inception"),
        ((*drawn, "--features", "vgg:file"), SetupError, "timm:NAME=FILE"),
        ((*drawn, "--features", folder / "odd.safetensors"), TensorFileError, "tensor"),
        ((*drawn, "--features", f"clip:{folder}/nowhere"), MissingFileError, "nowhere"),
        ((*drawn, "--memory", "1MiB"), MemoryLimitError, "memory"),
    ]:
        with case(words=words):
            _, error = run(published_once, folder, *words)
            assert isinstance(error, kind) and said in str(error), error


def test_samples_are_held_to_the_range_of_the_reference(
    published_once: PublishedRelease, folder: Path
) -> None:
    """Other ways to write the same samples give the same figures; another range is refused, never clipped."""
    rows = images(60, 0.0, seed=9)
    rows.flat[:2] = -1.0, 1.0
    whole = np.round((rows + 1) / 2 * 65535)
    beyond = np.random.default_rng(0).random(rows.shape) < 0.02  # of all values

    def judged(array: np.ndarray) -> tuple[dict[str, Any], list[str]]:
        np.savez(folder / "samples.npz", images=array)
        printed, error = run(published_once, folder, "--samples", folder / "samples.npz", "--json")
        assert error is None, error
        document = figures(printed)
        return document["metrics"], [
            note for note in document["notes"] if "samples' values" in note
        ]

    expected, notes = judged(rows)
    assert notes == []
    for name, array in {
        "16 bits": whole.astype(np.uint16),
        "double precision": rows.astype(np.float64),
        "big endian": rows.astype(">f4"),
        "column order": np.asfortranarray(rows),
        "rounding beyond the range": rows * np.float32(1 + 5e-6),
    }.items():
        with case(name):
            document, notes = judged(array)
            assert notes == []
            for metric in ("fid", "kid", "precision"):
                assert document[metric]["value"] == pytest.approx(
                    expected[metric]["value"], abs=1e-3
                )

    clipped = np.where(beyond, 1.0, rows)
    document, notes = judged(np.where(beyond, 1.3, rows))
    assert document["fid"]["value"] == pytest.approx(judged(clipped)[0]["fid"]["value"], abs=1e-6)
    assert notes == [
        f"{beyond.mean():.2%} of the samples' values were beyond -1 to 1 and were clipped."
    ]

    _, notes = judged((rows + 1) / 2)
    assert len(notes) == 1 and "fill 50% of the range -1 to 1: 0 to 1" in notes[0]
    _, notes = judged(((rows + 1) / 2 * 4095).astype(np.uint16))
    assert len(notes) == 1 and "fill 6% of the range 0 to 65535" in notes[0]

    for name, array in {
        "0 to 255": (rows + 1) / 2 * 255,
        "0 to 255 in half precision": ((rows + 1) / 2 * 255).astype(np.float16),
        "standardised": (rows - rows.mean()) / rows.std() * 2,
        "0 to 2": rows + 1,
        "one value far out": np.where(np.arange(rows.size).reshape(rows.shape) == 7, 9.0, rows),
        "many values a little out": np.where(
            np.arange(rows.size).reshape(rows.shape) % 8, rows, 1.2
        ),
        "NaN": np.where(beyond, np.nan, rows),
        "infinity": np.where(beyond, np.inf, rows),
        "complex": rows + 0j,
        "no images": rows[:0],
        "a number": np.float32(0),
        "8 bits with a sign": (rows * 127).astype(np.int8),
    }.items():
        with case(name):
            np.savez(folder / "samples.npz", images=array)
            _, error = run(published_once, folder, "--samples", folder / "samples.npz")
            assert isinstance(error, DataError), error
            assert error.subject in ("samples", "image values", "image shape")


def test_other_features_are_opened_by_their_names(
    published_once: PublishedRelease, folder: Path
) -> None:
    """A small classifier and a network of timm, each with its file's digest beside the figures."""
    from tests.ddm.encoders.test_timm import weights

    with np.load(folder / "reference.npz") as real:
        rows = torch.from_numpy(real["images"])
    classifier = train_classifier(rows, torch.tensor([0] * 80 + [1] * 80), SPEC, num_steps=3)
    classifier.save(folder / "classifier.safetensors")
    weights(folder / "test_resnet.safetensors", "test_resnet")
    np.savez(folder / "some.npz", images=images(20, 0.0, seed=3))
    for named, file, dim in [
        (folder / "classifier.safetensors", "classifier.safetensors", 64),
        (f"timm:{folder}/test_resnet.safetensors", "test_resnet.safetensors", None),
    ]:
        printed, error = run(
            published_once, folder, "--samples", folder / "some.npz", "--features", named, "--json"
        )
        assert error is None, error
        document = figures(printed)
        assert document["features"]["digest"] == sha256_file(folder / file)
        assert dim in (None, document["features"]["dim"])
        assert any("singular" in note for note in document["notes"])
    assert TimmEncoder.from_file("test_resnet", folder / "test_resnet.safetensors", SPEC).dim > 0
