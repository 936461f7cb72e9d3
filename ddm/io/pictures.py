"""Samples on disk: a grid a person can look at, single pictures, or numbers."""

import errno
import os
from collections.abc import Sequence
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from ddm.errors import SetupError
from ddm.io.files import write_atomic

if TYPE_CHECKING:
    from torch import Tensor

CELL_PIXELS = 64
GAP_PIXELS = 4
BACKGROUND = (24, 24, 28)
PALETTE = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))


def to_pixels(images: "Tensor") -> np.ndarray:
    """Turn images in [-1, 1], shape (N, C, H, W) with C 1 or 3, into uint8 (N, H, W, 3); of a volume, its middle slice.

    Raises:
        SetupError: another number of channels.
    """
    if images.dim() == 5:  # (N, C, D, H, W)
        images = images[:, :, images.shape[2] // 2]
    array = ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    if array.shape[-1] not in (1, 3):
        raise SetupError("pictures", expected="1 or 3 channels", got=f"{array.shape[-1]}", remedy="Write .npz instead.")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array


def grid(images: "Tensor", owners: Sequence[int] | None = None) -> Image.Image:
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


def write_samples(images: "Tensor", owners: Sequence[int], out: Path) -> str:
    """Write samples as a PNG grid, an npz, or a folder of PNG files, by the name of `out`.

    Returns:
        What was written, in words.

    Raises:
        SetupError: another ending.
    """
    prepare(out)
    if out.suffix == ".png":
        write_atomic(out, _png(grid(images, owners)))
        return "a grid"
    if out.suffix == ".npz":
        archive = BytesIO()
        np.savez(archive, images=images.clamp(-1, 1).numpy(), expert=np.asarray(owners, dtype=np.int64))
        write_atomic(out, archive.getvalue())
        return "float32 images in [-1, 1]"
    for index, picture in enumerate(to_pixels(images)):
        write_atomic(out / f"{index:05d}.png", _png(Image.fromarray(picture)))
    return f"{len(images)} PNG files"


def prepare(out: Path) -> None:
    """Check the name that samples shall have and make its folder: before sampling, which may take long.

    Raises:
        SetupError: another ending, a folder with an ending, or a file without one.
        OSError: the folder cannot be made or written.
    """
    if out.suffix not in ("", ".png", ".npz"):
        raise SetupError(str(out), expected="a name ending in .png or .npz, or a folder", got=out.suffix)
    if out.is_dir() if out.suffix else out.is_file():
        got = "a folder of that name" if out.suffix else "a file of that name"
        raise SetupError(str(out), expected="a file, or a folder by a name without ending", got=got)
    folder = out.parent if out.suffix else out
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _png(picture: Image.Image) -> bytes:
    encoded = BytesIO()
    picture.save(encoded, format="PNG")
    return encoded.getvalue()
