"""A contact sheet of pictures before and after a plan's transform, to be looked at before anything is signed."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import islice
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from ddm.errors import DataError
from ddm.images.geometry import Floats, padded
from ddm.images.picture import Picture
from ddm.images.transform import Transform
from ddm.io import pictures
from ddm.io.files import write_atomic
from ddm.io.pictures import BACKGROUND
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import PadFit, Slices, TransformSpec, WindowRange

MAX_PICTURES = 64  # on one sheet
# Pixels along a side, fewer for a whole factor, more where the plan's samples are larger.
CELL = 160
_MAX_SLICES = 3  # of one volume
_PADDING_TONE = -0.6  # of the part of a cell that a sample which is not square leaves free
_LINE_PIXELS = 14  # of a line of text
_NUMBER_PIXELS = 12  # of the number of a picture
_UNTOUCHED = 128  # where no letter is drawn
# Of the edges of cells, in `ddm.io.pictures.PALETTE`.
_BEFORE_COLOUR = 0
_AFTER_COLOUR = 4
_LEGEND = (
    "orange edge: as its file shows it, with its number on this sheet; blue edge: as the plan makes it; "
    "crossed out: not taken"
)


def contact_sheet(
    pictures: Iterable[Picture],
    transform: Transform,
    path: Path,
) -> list[str]:
    """Write a PNG that shows each picture with its number from 1, and beside it what the plan makes of it.

    Of a volume the middle axial slice is shown, and of slices the first, the middle and the last. The file shows
    private images: it is for its owner alone, mode 0600.

    Args:
        pictures: the pictures of which the first 64 are shown.
        transform: the plan's.
        path: the path of the PNG.

    Returns:
        For each picture that the transform does not take, its number and the reason.

    Raises:
        DataError: no picture.
        OSError: the file cannot be written.
    """
    longest_side = max(transform.data.shape[-2:])
    side = longest_side * max(1, CELL // longest_side)
    num_after = min(_MAX_SLICES, transform.num)
    cells: list[Floats] = []
    numbers_by_reason: dict[str, list[str]] = {}
    for number, picture in enumerate(islice(pictures, MAX_PICTURES), 1):
        before = _picture_cell(picture, side)
        cells.append(_numbered(before, number))
        try:
            samples = transform.apply(picture)
        except DataError as error:
            numbers_by_reason.setdefault(str(error), []).append(str(number))
            cells += [_crossed_cell(side)] * num_after
            continue
        num_shown = min(num_after, len(samples))
        # Of many slices, some that are evenly spread.
        places = np.linspace(0, len(samples) - 1, num_shown).round()
        for index in places.astype(int):
            cells.append(_sample_cell(samples[index], transform.data, side))
        num_empty = num_after - num_shown
        cells += [_empty_cell(side)] * num_empty
    if not cells:
        raise DataError(
            "preview",
            expected="at least one picture",
            got="an empty folder or array",
            remedy="Name a file or a folder with at least one picture.",
        )
    _write(cells, 1 + num_after, [_LEGEND, *transform.spec.words], path)
    reasons = []
    for reason, numbers in numbers_by_reason.items():
        noun = "pictures"
        if len(numbers) == 1:
            noun = "picture"
        listed = ", ".join(numbers)
        reason = reason.removeprefix("picture: ")
        reasons.append(f"{noun} {listed}: {reason}")
    return reasons


def _write(
    cells: Sequence[Floats],
    cells_of_picture: int,
    lines: Sequence[str],
    path: Path,
) -> None:
    """Arrange the cells in a grid below lines of text, those of one picture side by side."""
    pictures_in_row = ceil(sqrt(len(cells)) / cells_of_picture)
    colours = []
    for number in range(len(cells)):
        colour = _AFTER_COLOUR
        if number % cells_of_picture == 0:
            colour = _BEFORE_COLOUR
        colours.append(colour)
    images = torch.from_numpy(np.stack(cells))
    grid = pictures.grid(images, colours, pictures_in_row * cells_of_picture)
    longest_line = max(len(line) for line in lines)
    text_width = 8 + 6 * longest_line
    text_height = _LINE_PIXELS * len(lines) + 8
    width = max(grid.width, text_width)
    height = grid.height + text_height
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        place = (6, 4 + _LINE_PIXELS * number)
        pen.text(place, line, fill=(220, 220, 220), font_size=11)
    sheet.paste(grid, (0, text_height))
    encoded = BytesIO()
    sheet.save(encoded, format="PNG")
    write_atomic(path, encoded.getvalue(), mode=0o600)


def _picture_cell(picture: Picture, side: int) -> Floats:
    """Return a picture in the window of its file, whole, (3, side, side) in [-1, 1]."""
    num_channels = picture.values.shape[0]
    # Without a window, values of more than eight bits use a small part of their type's range: CT would be one grey.
    has_eight_bits = picture.values.dtype == np.uint8 and picture.full is not None
    window = WindowRange(fallback="percentiles")
    if has_eight_bits:
        window = WindowRange(fallback="full")
    # Grey is shown as equal red, green and blue.
    pick = (0, 0, 0)
    if num_channels == 3:
        pick = (0, 1, 2)
    spec = TransformSpec(
        channels="pick",
        pick=pick,
        range=window,
        slices=Slices(count=1),
        fit=PadFit(),
    )
    data = DataSpec(shape=(3, side, side), range=(-1.0, 1.0))
    transform = Transform(spec, data)
    try:
        (sample,) = transform.apply(picture)
    except DataError:
        # All of its values are equal, so that they have no range.
        return _empty_cell(side)
    return sample


def _numbered(cell: Floats, number: int) -> Floats:
    """Return a cell with a number in its corner: letters without a box, which hide little of the picture."""
    _, height, width = cell.shape
    image = Image.new("L", (width, height), _UNTOUCHED)
    pen = ImageDraw.Draw(image)
    pen.text(
        (3, 1),
        str(number),
        fill=255,
        stroke_fill=0,
        stroke_width=1,
        font_size=_NUMBER_PIXELS,
    )
    tones = np.asarray(image)
    letters = tones.astype(np.float32) / 127.5 - 1
    drawn = np.where(tones == _UNTOUCHED, cell, letters[None])
    return drawn.astype(np.float32)


def _sample_cell(
    sample: Floats,
    data: DataSpec,
    side: int,
) -> Floats:
    """Return a sample enlarged by a whole factor, (3, side, side) in [-1, 1]; of a volume, its middle slice."""
    low, high = data.range
    image = sample
    if sample.ndim == 4:
        depth = sample.shape[1]
        image = sample[:, depth // 2]
    if len(image) != 3:
        image = np.repeat(image[:1], 3, 0)
    share_of_range = (image - low) / (high - low)
    tones = (share_of_range * 2 - 1).astype(np.float32)
    longest_side = max(data.shape[-2:])
    factor = side // longest_side
    # Without interpolation: what an expert learns is shown pixel by pixel.
    taller = tones.repeat(factor, 1)
    enlarged = taller.repeat(factor, 2)
    return padded(enlarged, (side, side), _PADDING_TONE)


def _empty_cell(side: int) -> Floats:
    return np.full((3, side, side), -1.0, np.float32)


def _crossed_cell(side: int) -> Floats:
    cell = _empty_cell(side)
    diagonal = np.eye(side, dtype=bool)
    cross = diagonal | diagonal[::-1]
    cell[0][cross] = 1.0
    return cell
