"""Data that use a small part of their range, or are enlarged: said by `silo scan` and at `silo init`."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from silo.data.first_look import look_at
from tests.support.case import case
from tests.support.cohorts import source_at
from tests.support.commands import run_command

RNG = np.random.default_rng(0)


def images(low: float, high: float, dtype: str, num: int = 40) -> np.ndarray:
    """Images that each reach from `low` to `high`."""
    array = RNG.uniform(low, high, (num, 1, 8, 8))
    array[:, 0, 0, 0] = low
    array[:, 0, 0, 1] = high
    return array.astype(dtype)


CASES = {
    "zero to one": (images(0, 1, "f2"), "fill 50% of the declared range -1 to 1: 0 to 1"),
    "zero to one in double precision": (
        images(0, 1, "f8"),
        "fill 50% of the declared range -1 to 1: 0 to 1",
    ),
    "twelve bits": (
        images(0, 4095, "u2"),
        "fill 6% of the range of their type, 0 to 65535: 0 to 4095",
    ),
    "half of eight bits": (
        images(0, 100, "u1"),
        "fill 39% of the range of their type, 0 to 255: 0 to 100",
    ),
    "whole range": (images(-1, 1, "f4"), ""),
    "eight bits": (images(0, 255, "u1"), ""),
}


def test_scan_and_init_say_how_little_of_the_range_arrays_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, (array, expected) in CASES.items():
        np.savez(tmp_path / "data.npz", images=array)
        with case(name):
            remarks = look_at(source_at(tmp_path / "data.npz", tmp_path / "look")).remarks
            assert len(remarks) == bool(expected)
            assert expected in " ".join(remarks)
            scanned = run_command("silo", "scan", "--data", tmp_path / "data.npz", "--processes", 1)
            assert scanned.code == 0, scanned.err
            said = " ".join(scanned.out.split())
            assert ("% of the" in said) == bool(expected)
            assert expected in said


def test_range_that_the_site_declares_is_the_one_that_counts(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", images=images(0, 1, "f4"))
    source = source_at(tmp_path / "data.npz", tmp_path / "look")
    assert look_at(source).remarks
    assert not look_at(type(source)(source.data, source.folder, declared_range=(0.0, 1.0))).remarks


def test_preview_says_how_many_pictures_the_plan_enlarges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "data").mkdir()
    for number, side in enumerate((10, 12, 40)):
        noise = RNG.integers(0, 256, (side, side), np.uint8)
        Image.fromarray(noise).save(tmp_path / "data" / f"{number}.png")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[data]\nshape = [1, 32, 32]\nrange = [-1.0, 1.0]\n[transform]\nrange = {kind = "full"}\n'
    )
    finished = run_command(
        "silo",
        "scan",
        "--data",
        tmp_path / "data",
        "--plan",
        recipe,
        "--preview",
        tmp_path / "sheet.png",
        "--processes",
        1,
    )
    assert finished.code == 0, finished.err
    assert (
        "2 of 3 pictures on the sheet are enlarged more than 2 times, up to 3.2 times (10 x 10 to 32 x 32)"
        in finished.out
    )
