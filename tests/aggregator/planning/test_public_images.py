"""The public images of `aggregator plan`: read as a silo reads its own, with what a person should know of them."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

from tests.support.commands import CommandResult, run_command
from tests.support.federation import PASSPHRASE, TinyFederation, images, recipe

TRANSFORM = {"channels": "grey", "range": {"kind": "full"}, "storage": "uint8"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    made = TinyFederation.create(tmp_path_factory.mktemp("public"), {"north": 40})
    (made.path / "passphrase").write_bytes(PASSPHRASE)
    return made


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in files of their own, dark ones, with what lies in such folders."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, values in enumerate(images(100, 0.0, seed=4)):
        grey = np.round((values[0] + 1) / 2 * 120).astype(np.uint8)
        Image.fromarray(grey[:1, :1] if number == 0 else grey).save(folder / f"p{number:03}.png")
    (folder / "README.txt").write_text("Where these pictures come from.")
    (folder / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    return folder


def plan(tiny: TinyFederation, path: Path, public: Path, **changes: object) -> CommandResult:
    chosen = recipe(**changes).model_dump(mode="json", exclude_none=True)
    (path / "recipe.toml").write_text(tomli_w.dumps(chosen))
    return run_command(
        "aggregator",
        "plan",
        tiny.federation.path,
        "--recipe",
        path / "recipe.toml",
        "--public",
        public,
        "--yes",
        "--passphrase-file",
        tiny.path / "passphrase",
    )


def test_clutter_is_skipped_and_named_and_remarks_are_printed(
    tiny: TinyFederation, public: Path, tmp_path: Path
) -> None:
    result = plan(tiny, tmp_path, public, transform=TRANSFORM)
    assert result.code == 0, result.err
    output = " ".join(result.out.split())
    assert "2 files that hold no image were skipped: README.txt, Thumbs.db." in output
    assert (
        "1 of 100 public images are enlarged more than 2 times, up to 4 times (1 x 1 to 4 x 4)"
        in output
    )
    assert "fill 4" in output
    assert "of the plan's range -1 to 1: -1 to -0." in output
    assert "Signed plan" in output


def test_bad_public_image_is_named_with_its_reason(
    tiny: TinyFederation, public: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in public.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    (bad / "p017.png").write_bytes(b"<html>not found</html>")
    result = plan(tiny, tmp_path, bad, transform=TRANSFORM)
    assert result.code == 7
    assert "p017.png: not an image" in " ".join(result.err.split())
    assert "Signed" not in result.out


def test_arrays_that_use_half_of_the_declared_range_are_remarked(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    array = (images(100, 0.0, seed=4) + 1) / 2
    array[:, 0, 0, 0] = 0.0
    array[:, 0, 0, 1] = 1.0
    np.savez(tmp_path / "public.npz", images=array)
    result = plan(tiny, tmp_path, tmp_path / "public.npz")
    assert result.code == 0, result.err
    assert "fill 50% of the declared range -1 to 1: 0 to 1" in " ".join(result.out.split())
