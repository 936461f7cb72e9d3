"""The flags of `ddm sample`: what means nothing is refused before anything is opened, what remains is obeyed."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ddm.cli import app
from ddm.commands.sample import _bytes
from ddm.errors import SetupError
from tests.conftest import Published


def sample(*words: object) -> BaseException | None:
    """Run the command; return how it ended, None for well."""
    result = CliRunner().invoke(app, ["sample", *map(str, words)])
    return result.exception


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--strategy full --tau 0.5", "--tau"),
        ("--strategy sample --prefix full", "--prefix"),
        ("--strategy lock --prefix full", "--prefix"),
        ("--strategy top-1 --k 2", "--k"),
        ("--mass 0.5", "--mass"),
        ("--strategy top-k --least 0.5", "--least"),
        ("--router-every 3", "--router-every"),
        ("--guidance 2", "--guidance"),
        ("--class-prior equal", "--class-prior"),
        ("--memory lots", "--memory"),
    ],
)
def test_flag_that_means_nothing_is_refused_before_a_release_is_looked_for(
    flags: str, named: str, tmp_path: Path
) -> None:
    words = ("nowhere", "--root", "nowhere", "--num", 4, "--out", tmp_path / "new" / "a.npz")
    ended = sample(*words, *flags.split())
    assert isinstance(ended, SetupError)
    assert ended.subject == named
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("700", 700)])
def test_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert _bytes(text) == size
    for wrong in ("-1GiB", "1GB", "1e3", "GiB", ""):
        with pytest.raises(SetupError):
            _bytes(wrong)


def test_flags_reach_the_sampler(published: Published, tmp_path: Path) -> None:
    """Strategies, solvers and budgets give images; a budget gives the very same."""
    words = (published.release, "--root", published.root, "--state", tmp_path / "state", "--num", 4, "--steps", 2)

    def draw(flags: str) -> np.ndarray:
        out = tmp_path / "a.npz"
        assert sample(*words, "--out", out, *flags.split()) is None
        with np.load(out) as found:
            return np.asarray(found["images"])

    plain = draw("")
    assert np.array_equal(draw("--memory 1MiB"), plain)
    np.testing.assert_allclose(draw("--batch 1"), plain, atol=1e-5)
    for flags in (
        "--solver rk4",
        "--solver exponential",
        "--strategy top-k --k 1",
        "--strategy lock --tau 0.5 --prefix full",
    ):
        assert not np.array_equal(draw(flags), plain)


def test_class_is_refused_when_experts_know_none(published: Published, tmp_path: Path) -> None:
    words = (published.release, "--root", published.root, "--state", tmp_path / "state", "--num", 4)
    assert "condition" in str(sample(*words, "--out", tmp_path / "a.npz", "--class", 1))
