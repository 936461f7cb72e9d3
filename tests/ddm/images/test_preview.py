"""The contact sheet: what it shows before and after, what it says of pictures that are not taken."""

import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm.errors import DataError
from ddm.images.picture import Picture
from ddm.images.preview import contact_sheet
from ddm.images.transform import Transform
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import CentreFit, FullRange, PadFit, Slices, TransformSpec
from tests.support.errors import has_subject

BYTES = (0.0, 255.0)


def halves() -> Picture:
    """Left dark, right bright."""
    values = np.full((1, 20, 20), 10, np.uint8)
    values[:, :, 10:] = 240
    return Picture(values, full=BYTES)


def rgb(path: Path) -> np.ndarray:
    with Image.open(path) as sheet:
        return np.asarray(sheet.convert("RGB"))


def cells(path: Path, side: int, columns: int, gap: int = 4) -> list[np.ndarray]:
    """The cells of the sheet's first row, cut out below its text."""
    sheet = rgb(path)
    edge = np.array((230, 159, 0))
    top = (
        int(np.flatnonzero((sheet[:, : side + 2 * gap] == edge).all(-1).sum(1) > side // 2)[0]) + 2
    )
    return [
        sheet[top : top + side, gap + n * (side + gap) : gap + n * (side + gap) + side]
        for n in range(columns)
    ]


def test_the_sheet_shows_each_picture_before_and_after_side_by_side(tmp_path: Path) -> None:
    transform = Transform(
        TransformSpec(range=FullRange(), fit=CentreFit()),
        DataSpec(shape=(1, 8, 8), range=(0.0, 1.0)),
    )
    assert contact_sheet([halves()], transform, tmp_path / "a.png") == []
    before, after = cells(tmp_path / "a.png", 160, 2)
    for cell in (before, after):
        assert (
            abs(float(cell[:, :70].mean()) - 10) < 2 and abs(float(cell[:, 90:].mean()) - 240) < 2
        )
    edge_before, edge_after = (
        int((np.abs(np.diff(c[80, :, 0].astype(int))) > 40).sum()) for c in (before, after)
    )
    assert edge_after == 1 and edge_before <= 8  # samples are enlarged by whole pixels
    assert stat.S_IMODE((tmp_path / "a.png").stat().st_mode) == 0o600


def test_each_picture_has_its_number_in_the_corner_of_the_cell_that_shows_its_file(
    tmp_path: Path,
) -> None:
    transform = Transform(
        TransformSpec(range=FullRange(), fit=CentreFit()),
        DataSpec(shape=(1, 8, 8), range=(0.0, 1.0)),
    )
    contact_sheet([halves()] * 5, transform, tmp_path / "a.png")
    first, after_first, second, after_second = cells(tmp_path / "a.png", 160, 4)
    for cell in (first, second):
        assert cell[:20, :20].max() > 240 and (cell[20:, :70] < 30).all()
    assert (first[:20, :20] != second[:20, :20]).any()
    for cell in (after_first, after_second):
        assert cell[:20, :20].max() < 30


def test_a_picture_without_a_window_whose_values_use_little_of_their_type_is_drawn_with_contrast(
    tmp_path: Path,
) -> None:
    values = np.repeat(np.linspace(-1000, 1000, 80), 80).reshape(1, 80, 80).round().astype(np.int16)
    transform = Transform(
        TransformSpec(range=FullRange(), fit=CentreFit()),
        DataSpec(shape=(1, 8, 8), range=(0.0, 1.0)),
    )
    contact_sheet([Picture(values, full=(-32768.0, 32767.0))], transform, tmp_path / "a.png")
    before, _ = cells(tmp_path / "a.png", 160, 2)
    assert before[20:].min() < 40 and before[20:].max() > 215


def test_a_picture_that_is_not_taken_is_crossed_out_and_its_reason_returned(tmp_path: Path) -> None:
    transform = Transform(TransformSpec(), DataSpec(shape=(1, 16, 16), range=(-1.0, 1.0)))
    flat = Picture(np.full((1, 9, 9), 7, np.uint8), full=BYTES)
    reasons = contact_sheet([halves(), flat, halves()], transform, tmp_path / "a.png")
    assert len(reasons) == 1 and reasons[0].startswith("picture 2: ") and "differ" in reasons[0]
    red = (rgb(tmp_path / "a.png") == (255, 0, 0)).all(-1).sum()
    assert red > 200
    (reason,) = contact_sheet([flat, halves(), flat], transform, tmp_path / "a.png")
    assert reason.startswith("pictures 1, 3: ") and "differ" in reason
    with pytest.raises(DataError, check=has_subject("preview")):
        contact_sheet([], transform, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_slices_and_volumes_and_colours_of_any_shape_have_a_sheet(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    volume = Picture(rng.random((1, 6, 20, 30), np.float32), spacing=(3.0, 1.0, 1.0))
    colour = Picture(rng.integers(0, 256, (3, 20, 300), np.uint8), full=BYTES)
    for number, (pictures, spec, shape) in enumerate(
        (
            ([volume] * 3, TransformSpec(slices=Slices(count=5), fit=PadFit()), (1, 64, 32)),
            ([volume], TransformSpec(), (1, 4, 100, 8)),
            ([colour] * 70, TransformSpec(), (3, 8, 8)),
            ([colour], TransformSpec(channels="pick", pick=(0, 1)), (2, 8, 8)),
        )
    ):
        transform = Transform(spec, DataSpec(shape=shape, range=(-1.0, 1.0)))
        assert contact_sheet(pictures, transform, tmp_path / f"{number}.png") == []
        with Image.open(tmp_path / f"{number}.png") as sheet:
            assert max(sheet.size) < 4000
