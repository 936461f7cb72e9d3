"""`silo scan --preview`: which pictures the sheet shows, and what it says where none can be made."""

import csv
import stat
from pathlib import Path

import numpy as np
from PIL import Image

from ddm.errors import MissingFileError, SetupError
from ddm.images.record import PictureRecord
from silo.images.preview import PreviewSelection
from silo.images.scanned_image import ScannedImage
from tests.support.commands import run_command
from tests.support.dicom_files import tags_of, waves, write
from tests.test_architecture import ROOT

RECIPE = """
valid_days = 3
[data]
shape = [1, 16, 16]
range = [-1.0, 1.0]
[transform]
channels = "grey"
[statistics]
unit = "image"
"""


def made(folder: Path) -> Path:
    data = folder / "data"
    data.mkdir()
    for number in range(3):
        Image.fromarray(waves((40, 40 + number), high=255, dtype=np.uint8)).save(
            data / f"{number}.png"
        )
    Image.fromarray(waves((40, 40), high=255, dtype=np.uint8)).save(data / "copy.png")
    Image.fromarray(np.full((40, 40, 3), (200, 20, 20), np.uint8)).save(data / "red.png")
    Image.fromarray(waves((40, 44), high=255, dtype=np.uint8)).convert("RGBA").save(
        data / "alpha.png"
    )
    write(tags_of(waves(), Modality="US"), data / "flagged.dcm")
    (folder / "recipe.toml").write_text(RECIPE)
    return data


def test_the_sheet_shows_accepted_pictures_once_each_and_says_what_is_not_taken(
    tmp_path: Path,
) -> None:
    data = made(tmp_path)
    sheet = tmp_path / "sheet.png"
    scan = ("silo", "scan", "--data", data, "--private", tmp_path / "private")
    finished = run_command(*scan, "--preview", sheet, "--plan", tmp_path / "recipe.toml")
    assert finished.code == 0, finished.err
    assert (
        str(sheet) in finished.out
        and "1 in quarantine" in finished.out
        and "picture 5: values" in finished.out
    )
    assert stat.S_IMODE(sheet.stat().st_mode) == 0o600
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    edges = (pixels == (230, 159, 0)).all(-1)  # around each picture as its file shows it
    assert edges.sum() == 5 * (164**2 - 160**2)
    index = tmp_path / "sheet.png.csv"
    rows = list(csv.DictReader(index.read_text().splitlines()))
    assert [(row["number"], Path(row["path"]).name, row["image"]) for row in rows] == [
        ("1", "0.png", "0"),
        ("2", "1.png", "0"),
        ("3", "2.png", "0"),
        ("4", "alpha.png", "0"),
        ("5", "red.png", "0"),
    ]
    for path in (index, tmp_path / "private/preview.csv"):
        assert (
            stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == index.read_bytes()
        )
    quiet = run_command(*scan, "--json", "--preview", sheet, "--plan", tmp_path / "recipe.toml")
    assert quiet.out.count("\n") == 1 and quiet.out.startswith("{")


def test_no_sheet_without_a_transform_that_fits_and_a_place_for_it(tmp_path: Path) -> None:
    scan = ("silo", "scan", "--data", made(tmp_path), "--private", tmp_path / "private")
    recipe = tmp_path / "recipe.toml"
    sheet = tmp_path / "sheet.png"
    assert run_command(*scan, "--preview", sheet).code == SetupError.exit_code
    assert run_command(*scan, "--plan", recipe).code == SetupError.exit_code
    assert (
        run_command(*scan, "--preview", sheet, "--plan", tmp_path / "none").code
        == MissingFileError.exit_code
    )
    assert (
        run_command(*scan, "--preview", tmp_path / "x/y.png", "--plan", recipe).code
        == MissingFileError.exit_code
    )
    demo = run_command(
        *scan, "--preview", sheet, "--plan", ROOT / "examples/digits_three_silos/plan.toml"
    )
    assert demo.code == SetupError.exit_code and "field transform" in demo.err
    recipe.write_text(RECIPE.replace("[1, 16", "[3, 16"))
    unfit = run_command(*scan, "--preview", sheet, "--plan", recipe)
    assert unfit.code == SetupError.exit_code and "1 channels in data.shape" in unfit.err
    recipe.write_bytes(b"\xff\xfe")
    assert run_command(*scan, "--preview", sheet, "--plan", recipe).code == SetupError.exit_code
    assert not sheet.exists() and not (tmp_path / "private").exists()


def test_the_same_pictures_are_chosen_whatever_their_order_and_bad_ones_never() -> None:
    actual = [
        ScannedImage(
            f"{number}.png",
            None,
            0,
            PictureRecord(shape=(1, 2, 2), pixels=f"{(7919 * number) % 1009:032x}"),
            reason,
        )
        for number in range(300)
        for reason in (None, "damaged")
    ]
    one = PreviewSelection()
    other = PreviewSelection()
    for record in actual:
        one.take(record)
    for record in reversed(actual):
        other.take(record)
    one.take(ScannedImage("gone.png", None, reason="no such file"))
    assert one.pictures() == other.pictures() and len(one.pictures()) == 64
