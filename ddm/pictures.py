"""Samples on disk: a grid a person can look at, single pictures, or numbers."""

from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from ddm.errors import SetupError

CELL_PIXELS = 64
GAP_PIXELS = 4
BACKGROUND = (24, 24, 28)
PALETTE = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))


def to_pixels(images: Tensor) -> np.ndarray:
    """Turn images in [-1, 1], shape (N, C, H, W) with C 1 or 3, into uint8 (N, H, W, 3).

    Raises:
        SetupError: another number of channels.
    """
    array = ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    if array.shape[-1] not in (1, 3):
        raise SetupError("pictures", expected="1 or 3 channels", got=f"{array.shape[-1]}", remedy="Write .npz instead.")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array


def grid(images: Tensor, owners: Sequence[int] | None = None) -> Image.Image:
    """Lay images out in a square grid, enlarged to be readable; a coloured edge tells each one's expert."""
    pixels = to_pixels(images)
    columns = ceil(sqrt(len(pixels)))
    rows = ceil(len(pixels) / columns)
    scale = max(1, CELL_PIXELS // max(pixels.shape[1:3]))
    height, width = pixels.shape[1] * scale, pixels.shape[2] * scale
    pitch_y, pitch_x = height + GAP_PIXELS, width + GAP_PIXELS
    canvas = Image.new("RGB", (columns * pitch_x + GAP_PIXELS, rows * pitch_y + GAP_PIXELS), BACKGROUND)
    pen = ImageDraw.Draw(canvas)
    for index, picture in enumerate(pixels):
        row, column = divmod(index, columns)
        x, y = GAP_PIXELS + column * pitch_x, GAP_PIXELS + row * pitch_y
        if owners is not None:
            colour = PALETTE[owners[index] % len(PALETTE)]
            pen.rectangle((x - 2, y - 2, x + width + 1, y + height + 1), fill=colour)
        canvas.paste(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC), (x, y))
    return canvas


def write_samples(images: Tensor, owners: Sequence[int], out: Path) -> str:
    """Write samples as a PNG grid, an npz, or a folder of PNG files, by the name of `out`.

    Returns:
        What was written, in words.

    Raises:
        SetupError: another ending.
    """
    if out.suffix == ".png":
        out.parent.mkdir(parents=True, exist_ok=True)
        grid(images, owners).save(out)
        return "a grid"
    if out.suffix == ".npz":
        out.parent.mkdir(parents=True, exist_ok=True)
        np.savez(out, images=images.clamp(-1, 1).numpy(), expert=np.asarray(owners, dtype=np.int64))
        return "float32 images in [-1, 1]"
    if out.suffix:
        raise SetupError(str(out), expected="a name ending in .png or .npz, or a folder", got=out.suffix)
    out.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(to_pixels(images)):
        Image.fromarray(picture).save(out / f"{index:05d}.png")
    return f"{len(images)} PNG files"
