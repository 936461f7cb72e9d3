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
from ddm.io.files import write_atomic
from ddm.io.pictures import BACKGROUND, grid
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import PadFit, Slices, TransformSpec, WindowRange

MOST = 64  # pictures on one sheet
CELL = 160  # pixels along a side, fewer for a whole factor, more where the plan's samples are larger
_SLICES = 3  # of one volume
_BESIDE = -0.6  # the tone of what a sample that is not square leaves of its cell
_LINE = 14  # pixels of a line of text
_LEGEND = "orange edge: as its file shows it; blue edge: as the plan makes it; crossed out: not taken"


def contact_sheet(pictures: Iterable[Picture], transform: Transform, path: Path) -> list[str]:
    """Write a PNG that shows each picture as its file shows it, and beside it what the plan makes of it.

    Of a volume the middle axial slice is shown, and of slices the first, the middle and the last. The file shows
    private images: it is for its owner alone, mode 0600.

    Args:
        pictures: of which the first 64 are shown.
        transform: the plan's.
        path: of the PNG.

    Returns:
        Why each picture was not taken that was not, by its number on the sheet from 1.

    Raises:
        DataError: no picture.
        OSError: the file cannot be written.
    """
    largest = max(transform.data.shape[-2:])
    side = largest * max(1, CELL // largest)
    after = min(_SLICES, transform.num)
    cells: list[Floats] = []
    reasons: list[str] = []
    for number, picture in enumerate(islice(pictures, MOST), 1):
        cells.append(_before(picture, side))
        try:
            samples = transform.apply(picture)
        except DataError as error:
            reasons.append(f"picture {number}: {error}")
            cells += [_crossed(side)] * after
            continue
        chosen = np.linspace(0, len(samples) - 1, min(after, len(samples))).round().astype(int)
        found = [_shown(samples[index], transform.data, side) for index in chosen]
        cells += [*found, *[_empty(side)] * (after - len(found))]
    if not cells:
        raise DataError("preview", expected="at least one picture", got="an empty folder or array")
    _write(cells, 1 + after, [_LEGEND, *transform.spec.words], path)
    return reasons


def _write(cells: Sequence[Floats], together: int, lines: Sequence[str], path: Path) -> None:
    """Lay the cells out, those of one picture side by side, below lines of text."""
    strips = ceil(sqrt(len(cells)) / together)
    owners = [0 if number % together == 0 else 4 for number in range(len(cells))]
    sheet = grid(torch.from_numpy(np.stack(cells)), owners, strips * together)
    whole = Image.new("RGB", (max(sheet.width, 8 + 6 * max(map(len, lines))), sheet.height + _LINE * len(lines) + 8))
    whole.paste(BACKGROUND, (0, 0, *whole.size))
    pen = ImageDraw.Draw(whole)
    for number, line in enumerate(lines):
        pen.text((6, 4 + _LINE * number), line, fill=(220, 220, 220), font_size=11)
    whole.paste(sheet, (0, _LINE * len(lines) + 8))
    encoded = BytesIO()
    whole.save(encoded, format="PNG")
    write_atomic(path, encoded.getvalue(), mode=0o600)


def _before(picture: Picture, side: int) -> Floats:
    """Return a picture as its file asks to be shown, whole, (3, side, side) in [-1, 1]."""
    channels = picture.values.shape[0]
    spec = TransformSpec(
        channels="pick",
        pick=(0, 1, 2) if channels == 3 else (0, 0, 0),
        range=WindowRange(fallback="percentiles" if picture.full is None else "full"),
        slices=Slices(count=1),
        fit=PadFit(),
    )
    try:
        (shown,) = Transform(spec, DataSpec(shape=(3, side, side), range=(-1.0, 1.0))).apply(picture)
    except DataError:  # nothing to be seen in it
        return _empty(side)
    return shown


def _shown(sample: Floats, data: DataSpec, side: int) -> Floats:
    """Return a sample enlarged by a whole factor, (3, side, side) in [-1, 1]; of a volume, its middle slice."""
    low, high = data.range
    image = sample[:, sample.shape[1] // 2] if sample.ndim == 4 else sample
    image = image if len(image) == 3 else np.repeat(image[:1], 3, 0)
    shown = ((image - low) / (high - low) * 2 - 1).astype(np.float32)
    factor = side // max(data.shape[-2:])
    return padded(shown.repeat(factor, 1).repeat(factor, 2), (side, side), _BESIDE)


def _empty(side: int) -> Floats:
    return np.full((3, side, side), -1.0, np.float32)


def _crossed(side: int) -> Floats:
    cell = _empty(side)
    both = np.eye(side, dtype=bool) | np.eye(side, dtype=bool)[::-1]
    cell[0][both] = 1.0
    return cell
