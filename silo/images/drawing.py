"""Draws a picture for a person's eyes, as a PNG: all of it, as its file holds it, before any transform."""

# Shape legend: C channels, D slices, H height, W width.
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddm.images.picture import Picture
from ddm.images.types import Bounds, Spacing, Values

MAX_SIDE = 2048  # pixels; what is larger is shrunk
_GAP = 6  # pixels between the planes of a volume
_GAP_TONE = 60
_PERCENTILES = (0.5, 99.5)  # the values that are drawn where a file states no window
_MAX_SAMPLED_VALUES = 1 << 20  # that percentiles are taken from


def drawn(picture: Picture, *, window: bool) -> bytes:
    """Return a picture as a PNG of greys or colours.

    Of a volume the three middle planes are drawn, and below them the brightest values along each axis, in which text on
    any slice is visible. If the channels are not colours, the first is drawn.

    Args:
        picture: the values.
        window: draw the values of its window, or all but the lowest and highest half percent; else all of them.
    """
    values = picture.values
    num_channels = values.shape[0]
    if num_channels != 3:
        values = values[:1]
    low, high = _bounds(picture, values, window)
    if values.ndim == 4:
        # Without a spacing in the file, voxels are drawn as cubes.
        spacing = picture.spacing or (1.0, 1.0, 1.0)
        image = _drawn_volume(values, spacing, low, high)
    else:
        image = Image.fromarray(_tones(values, low, high))
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BOX)
    encoded = BytesIO()
    # The page is on the same machine, so that time counts here, not size.
    image.save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def _bounds(
    picture: Picture,
    values: Values,
    window: bool,
) -> Bounds:
    """Return the values that are drawn black and white."""
    if window and picture.window is not None:
        return picture.window
    if values.dtype == np.uint8:
        return 0.0, 255.0
    if window:
        step = 1 + values.size // _MAX_SAMPLED_VALUES
        flat: Values = values.reshape(-1)
        sampled = flat[::step].astype(np.float64)
        low, high = np.percentile(sampled, _PERCENTILES)
        return float(low), float(high)
    low = float(values.min())
    high = float(values.max())
    return low, high


def _tones(
    image_CHW: Values,
    low: float,
    high: float,
) -> NDArray[np.uint8]:
    """Return an image as greys (H, W) or colours (H, W, 3) of eight bits."""
    # An image of one value has no width between black and white.
    width = max(high - low, 1e-30)
    share_CHW = (image_CHW.astype(np.float32) - low) / width
    visible_CHW = share_CHW.clip(0, 1)
    tones_CHW = np.rint(visible_CHW * 255)
    bytes_CHW: NDArray[np.uint8] = tones_CHW.astype(np.uint8)
    if len(bytes_CHW) == 1:
        grey_HW: NDArray[np.uint8] = bytes_CHW[0]
        return grey_HW
    bytes_HWC = np.moveaxis(bytes_CHW, 0, -1)
    return np.ascontiguousarray(bytes_HWC)


def _drawn_volume(
    values_CDHW: Values,
    spacing: tuple[float, ...],
    low: float,
    high: float,
) -> Image.Image:
    planes = [*_middle_planes(values_CDHW), *_brightest_planes(values_CDHW)]
    depth_mm, height_mm, width_mm = spacing
    # Axial, coronal, sagittal; once for the middle planes and once for the brightest values.
    spacings = [
        (height_mm, width_mm),
        (depth_mm, width_mm),
        (depth_mm, height_mm),
    ]
    longest_side = max(values_CDHW.shape[1:])
    # Three tiles are beside each other.
    side = min(MAX_SIDE // 3, longest_side)
    tiles = []
    for plane, plane_spacing in zip(planes, spacings * 2, strict=True):
        tones = _tones(plane, low, high)
        tile = _fitted(tones, plane_spacing, side)
        tiles.append(tile)
    return _sheet(tiles, side)


def _middle_planes(values_CDHW: Values) -> list[Values]:
    """Return the middle planes, the top of the body up: axial, coronal, sagittal."""
    _, depth, height, width = values_CDHW.shape
    # D points to the top of the body, but the rows of a picture go down.
    upright = values_CDHW[:, ::-1]
    return [
        values_CDHW[:, depth // 2],
        upright[:, :, height // 2],
        upright[..., width // 2],
    ]


def _brightest_planes(values_CDHW: Values) -> list[Values]:
    """Return the brightest values along each axis, the top of the body up."""
    upright = values_CDHW[:, ::-1]
    axial = values_CDHW.max(1)
    coronal = upright.max(2)
    sagittal = upright.max(3)
    return [axial, coronal, sagittal]


def _fitted(
    tones: NDArray[np.uint8],
    spacing: Spacing,
    side: int,
) -> Image.Image:
    """Return a plane in its true proportions, its longer side of this length."""
    num_rows, num_columns = tones.shape[:2]
    row_mm, column_mm = spacing
    height_mm = num_rows * row_mm
    width_mm = num_columns * column_mm
    scale = side / max(height_mm, width_mm)
    # A plane that is very thin keeps one pixel.
    width = max(1, round(width_mm * scale))
    height = max(1, round(height_mm * scale))
    image = Image.fromarray(tones)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _sheet(tiles: list[Image.Image], side: int) -> Image.Image:
    """Arrange six planes in two rows."""
    pitch = side + _GAP
    # No gap after the last column and the last row.
    width = 3 * pitch - _GAP
    height = 2 * pitch - _GAP
    first = tiles[0]
    background = (_GAP_TONE,) * len(first.getbands())
    sheet = Image.new(first.mode, (width, height), background)
    for number, tile in enumerate(tiles):
        # Three in a row.
        row, column = divmod(number, 3)
        # Each tile is in the middle of its square.
        left_margin = (side - tile.width) // 2
        top_margin = (side - tile.height) // 2
        left = column * pitch + left_margin
        top = row * pitch + top_margin
        sheet.paste(tile, (left, top))
    return sheet
