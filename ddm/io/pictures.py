"""Samples on disk, marked as synthetic: a grid a person can look at, single pictures, volumes, or numbers."""

import errno
import os
from collections.abc import Sequence
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from ddm.errors import SetupError
from ddm.io.files import write_atomic
from ddm.io.nifti import encode_volumes

if TYPE_CHECKING:
    from torch import Tensor

CELL_PIXELS = 64
GAP_PIXELS = 4
BACKGROUND = (24, 24, 28)
ENDINGS = (".png", ".npz", ".nii", ".nii.gz")
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)


def to_pixels(images: "Tensor", value_range: tuple[float, float] = (-1.0, 1.0)) -> np.ndarray:
    """Turn images, shape (N, C, H, W) with C 1 or 3, into uint8 (N, H, W, 3); of a volume, its middle slice.

    Args:
        images: whose values are clipped.
        value_range: what becomes of them 0 and 255.
    """
    if images.dim() == 5:  # (N, C, D, H, W)
        images = images[:, :, images.shape[2] // 2]
    low, high = value_range
    array = (
        ((images.clamp(low, high) - low) * (255 / (high - low)))
        .round()
        .byte()
        .permute(0, 2, 3, 1)
        .numpy()
    )
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array


def grid(
    images: "Tensor",
    owners: Sequence[int] | None = None,
    columns: int | None = None,
    value_range: tuple[float, float] = (-1.0, 1.0),
) -> Image.Image:
    """Lay images out in a grid, square by default, enlarged to be readable; a coloured edge tells each one's expert."""
    pixels = to_pixels(images, value_range)
    columns = columns or ceil(sqrt(len(pixels)))
    rows = ceil(len(pixels) / columns)
    scale = max(1, CELL_PIXELS // max(pixels.shape[1:3]))
    height, width = pixels.shape[1] * scale, pixels.shape[2] * scale
    pitch_y, pitch_x = height + GAP_PIXELS, width + GAP_PIXELS
    canvas = Image.new(
        "RGB", (columns * pitch_x + GAP_PIXELS, rows * pitch_y + GAP_PIXELS), BACKGROUND
    )
    pen = ImageDraw.Draw(canvas)
    for index, picture in enumerate(pixels):
        row, column = divmod(index, columns)
        x, y = GAP_PIXELS + column * pitch_x, GAP_PIXELS + row * pitch_y
        if owners is not None:
            colour = PALETTE[owners[index] % len(PALETTE)]
            pen.rectangle((x - 2, y - 2, x + width + 1, y + height + 1), fill=colour)
        canvas.paste(
            Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC), (x, y)
        )
    return canvas


def write_samples(
    images: "Tensor",
    owners: Sequence[int],
    out: Path,
    release: str = "",
    classes: Sequence[str] = (),
    value_range: tuple[float, float] = (-1.0, 1.0),
) -> str:
    """Write samples by the name of `out`, and mark every file as synthetic.

    Args:
        images: samples, in `value_range` but not clipped to it.
        owners: each one's expert.
        out: FILE.png, a grid; FILE.npz, numbers; FILE.nii or FILE.nii.gz, volumes; or a name without an ending, a
            folder with a PNG file, or for a volume a NIfTI file, for each.
        release: digest of the manifest of the release that they come from, if there is one.
        classes: the class that each was asked for, if any was.
        value_range: the data's; black and white of pictures.

    Returns:
        What was written, in words.

    Raises:
        SetupError: as `prepare` raises it.
    """
    prepare(out, images.shape[1:])
    images = images.clamp(*value_range)
    basic, ending = (
        {"Synthetic": "true", "Software": "Archipelago", "Release": release},
        _ending(out),
    )
    each = [{"Class": name} for name in classes] or [{}] * len(images)
    basic = {name: value for name, value in basic.items() if value}
    marks = basic | ({"Class": ", ".join(dict.fromkeys(classes))} if classes else {})
    if ending in (".nii", ".nii.gz"):
        write_atomic(out, encode_volumes(images, marks, compress=ending == ".nii.gz"))
        return "volumes in one file"
    if ending == ".png":
        write_atomic(out, _png(grid(images, owners, value_range=value_range), marks))
        return "a grid"
    if ending == ".npz":
        archive = BytesIO()
        arrays = {"images": images.numpy(), "expert": np.asarray(owners, dtype=np.int64)}
        arrays |= {"class": np.array(classes)} if classes else {}
        np.savez(archive, **arrays, synthetic=np.array(True), release=np.array(release))  # type: ignore[arg-type]
        write_atomic(out, archive.getvalue())
        return f"{images.dtype} images in [{value_range[0]:g}, {value_range[1]:g}]".removeprefix(
            "torch."
        )
    if images.dim() == 5:
        for index in range(len(images)):
            data = encode_volumes(images[index : index + 1], basic | each[index], compress=True)
            write_atomic(out / f"{index:05d}.nii.gz", data)
        return f"{len(images)} NIfTI files"
    for index, picture in enumerate(to_pixels(images, value_range)):
        write_atomic(out / f"{index:05d}.png", _png(Image.fromarray(picture), basic | each[index]))
    return f"{len(images)} PNG files"


def prepare(out: Path, shape: Sequence[int] | None = None) -> None:
    """Check the name that samples shall have and make its folder: before sampling, which may take long.

    Args:
        out: as in `write_samples`.
        shape: of a sample; None where it is not known yet.

    Raises:
        SetupError: another ending, a folder with an ending, a file without one, NIfTI for images that are not volumes,
            or PNG for channels that no picture has.
        OSError: the folder cannot be made or written.
    """
    ending = _ending(out)
    if ending not in ("", *ENDINGS):
        raise SetupError(
            str(out), expected=f"a name ending in {', '.join(ENDINGS)}, or a folder", got=ending
        )
    if out.is_dir() if ending else out.is_file():
        got = "a folder of that name" if ending else "a file of that name"
        raise SetupError(str(out), expected="a file, or a folder by a name without ending", got=got)
    flat = shape is not None and len(shape) == 3
    if flat and ending in (".nii", ".nii.gz"):
        raise SetupError(
            str(out), expected="volumes", got="flat images", remedy="Write .png or .npz instead."
        )
    if shape and shape[0] not in (1, 3) and (ending == ".png" or flat and not ending):
        got = f"{shape[0]} channels"
        raise SetupError(
            str(out), expected="samples of 1 or 3 channels", got=got, remedy="Write .npz instead."
        )
    folder = out.parent if ending else out
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _ending(out: Path) -> str:
    return ".nii.gz" if out.name.endswith(".nii.gz") else out.suffix


def _png(picture: Image.Image, marks: dict[str, str]) -> bytes:
    encoded, text = BytesIO(), PngInfo()
    for key, value in marks.items():
        text.add_itxt(key, value) if not value.isascii() else text.add_text(key, value)
    picture.save(encoded, format="PNG", pnginfo=text)
    return encoded.getvalue()
