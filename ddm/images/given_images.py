"""Images that a user gives samples to begin from, and masks of where to draw."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddm.errors import DataError
from ddm.images.array_files import read_images
from ddm.images.npz import read_array
from ddm.io.files import require_file
from ddm.protocol.plan import DataSpec


def read_pictures(path: Path, spec: DataSpec) -> Tensor:
    """Read images to begin from: a PNG file of the plan's size, or the array `images` of an npz.

    Returns:
        Shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not a picture, one of another size, or see `ddm.images.array_files.read_images`.
    """
    if path.suffix.lower() == ".npz":
        return read_images(path, spec)
    if len(spec.shape) != 3 or spec.shape[0] not in (1, 3):
        raise DataError("data file", expected=f"an npz of images {spec.shape}", got="a picture")
    pixels = _pixels(path, "L" if spec.shape[0] == 1 else "RGB", spec.shape[1:])
    low, high = spec.range
    array = low + (high - low) * torch.from_numpy(pixels).float() / 255
    return array[None, None] if array.dim() == 2 else array.permute(2, 0, 1)[None].contiguous()


def read_mask(path: Path, spec: DataSpec) -> Tensor:
    """Read where an image shall be drawn: white pixels of a picture, or what is not 0 in the array `mask` of an npz.

    Returns:
        Bool, shape (H, W), or (D, H, W).

    Raises:
        MissingFileError: nothing at `path`.
        DataError: not a mask, one of another size, or one that leaves nothing to draw.
    """
    if path.suffix.lower() == ".npz":
        array = read_array(require_file(path, "a mask"), "mask", max_bytes=16 * spec.dim + 4096)
        if array.dtype.kind not in "bui" or array.shape != spec.shape[1:]:
            got = f"{array.dtype} {array.shape}"
            raise DataError("mask", expected=f"bool or whole numbers, {spec.shape[1:]}", got=got)
    else:
        array = _pixels(path, "L", spec.shape[1:])
        if not bool(np.isin(array, (0, 255)).all()):
            raise DataError("mask", expected="black and white pixels alone", got="grey ones")
    if not array.any():
        raise DataError("mask", expected="pixels that are not black, where to draw", got="black pixels alone")
    return torch.from_numpy(array != 0)


def _pixels(path: Path, mode: str, size: tuple[int, ...]) -> np.ndarray:
    require_file(path, "a picture")
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as picture:  # reads the header alone
            if (picture.height, picture.width) != size:
                got = f"{picture.height} x {picture.width}"
                raise DataError("picture", expected=f"{' x '.join(map(str, size))} pixels, height by width", got=got)
            return np.array(picture.convert(mode))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            "picture", expected="a PNG or JPEG file", got=f"{type(error).__name__} in reading it"
        ) from error
