"""Draws a picture for a person's eyes, as a PNG: all of it, as its file holds it, before any transform."""

# Shape legend: C channels, D slices, H height, W width.
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddm.images.picture import Picture

MOST_SIDE = 2048  # pixels; what is larger is shrunk
_GAP = 6
_BESIDE = 60
_SHARE = (0.5, 99.5)  # percentiles, where a file states no window
_AT_MOST = 1 << 20  # values that percentiles are taken from


def drawn(picture: Picture, *, window: bool) -> bytes:
    """Return a picture as a PNG of greys or colours.

    Of a volume the three middle planes are drawn, and below them the brightest values along each axis, in which text on
    any slice stands out. Of channels that are no colours the first counts.

    Args:
        picture: the values.
        window: draw the values of its window, or all but the lowest and highest half percent; else all of them.
    """
    values = picture.values if picture.values.shape[0] == 3 else picture.values[:1]
    low, high = _bounds(picture, values, window)
    if values.ndim == 4:
        spacing = picture.spacing or (1.0, 1.0, 1.0)
        planes = [*_middles(values), *(_highest(values))]
        sides = [(spacing[1], spacing[2]), (spacing[0], spacing[2]), (spacing[0], spacing[1])] * 2
        side = min(MOST_SIDE // 3, max(values.shape[1:]))
        tiles = [_fitted(_tones(plane, low, high), each, side) for plane, each in zip(planes, sides, strict=True)]
        image = _sheet(tiles, side)
    else:
        image = Image.fromarray(_tones(values, low, high))
        image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.BOX)
    encoded = BytesIO()
    image.save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def _bounds(picture: Picture, values: NDArray[np.generic], window: bool) -> tuple[float, float]:
    if window and picture.window is not None:
        return picture.window
    if window and values.dtype != np.uint8:
        numbers: NDArray[np.generic] = values.reshape(-1)[:: 1 + values.size // _AT_MOST]
        low, high = np.percentile(numbers.astype(np.float64), _SHARE)
        return float(low), float(high)
    return (0.0, 255.0) if values.dtype == np.uint8 else (float(values.min()), float(values.max()))


def _tones(image_CHW: NDArray[np.generic], low: float, high: float) -> NDArray[np.uint8]:
    share = (image_CHW.astype(np.float32) - low) / max(high - low, 1e-30)
    tones = np.rint(share.clip(0, 1) * 255).astype(np.uint8)
    return tones[0] if len(tones) == 1 else np.ascontiguousarray(np.moveaxis(tones, 0, -1))


def _middles(values_CDHW: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Return the middle planes, the top of the body up: axial, coronal, sagittal."""
    _, depth, height, width = values_CDHW.shape
    upright = values_CDHW[:, ::-1]
    return [values_CDHW[:, depth // 2], upright[:, :, height // 2], upright[..., width // 2]]


def _highest(values_CDHW: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    upright = values_CDHW[:, ::-1]
    return [values_CDHW.max(1), upright.max(2), upright.max(3)]


def _fitted(tones: NDArray[np.uint8], spacing: tuple[float, float], side: int) -> Image.Image:
    height, width = tones.shape[0] * spacing[0], tones.shape[1] * spacing[1]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return Image.fromarray(tones).resize(size, Image.Resampling.BILINEAR)


def _sheet(tiles: list[Image.Image], side: int) -> Image.Image:
    """Lay six planes out in two rows."""
    pitch = side + _GAP
    sheet = Image.new(
        tiles[0].mode, (3 * pitch - _GAP, 2 * pitch - _GAP), _BESIDE if tiles[0].mode == "L" else (_BESIDE,) * 3
    )
    for number, tile in enumerate(tiles):
        row, column = divmod(number, 3)
        sheet.paste(tile, (column * pitch + (side - tile.width) // 2, row * pitch + (side - tile.height) // 2))
    return sheet
