"""Reads public images: arrays of the plan's shape, or pictures of any kind through the plan's transform."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.imaging.geometry import Floats
from ddm.imaging.pictures import pictures
from ddm.imaging.transform import Transform, about
from ddm.io.fitting import fit
from ddm.io.images import BLOCK_BYTES, rows_of
from ddm.io.sources import read_images
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec


def samples_at(path: Path, transform: Transform, *, seen: bool) -> Iterator[list[Floats]]:
    """Yield the samples of each picture.

    Args:
        path: whatever `ddm.imaging.pictures.pictures` takes.
        transform: the plan's.
        seen: see `ddm.imaging.pictures.pictures`.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: a picture that does not decode or that the plan does not take, by its number and never by its name.
    """
    found, number = pictures(path, seen=seen), 0
    while True:
        number += 1
        with about(f"image {number}, by name"):
            picture = next(found, None)
            if picture is None:
                return
            samples = transform.apply(picture)
        yield samples


def read_transformed(path: Path, data: DataSpec, spec: TransformSpec | None) -> Tensor:
    """Read all images into memory, as a silo of the plan sees its own.

    Args:
        path: with a transform, whatever `ddm.imaging.pictures.pictures` takes; without one, arrays as
            `ddm.io.sources.read_images` takes them.
        data: the plan's shape and range.
        spec: the plan's transform.

    Returns:
        Shape (N, C, H, W) or (N, C, D, H, W), float32, in the plan's range, with the rounding of the compact type.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no image, one that cannot be used, by its number, or more than memory holds.
    """
    if spec is None:
        return read_images(path, data)
    transform = Transform(spec, data)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept: list[NDArray[np.generic]] = []
    for samples in samples_at(path, transform, seen=True):
        kept += map(transform.stored, samples)
        if (needed := len(kept) * data.dim * (4 + transform.dtype.itemsize)) > memory:
            raise DataError("images", expected=f"at most {memory} bytes of memory", got=f"{needed} bytes")
    if not kept:
        raise DataError("images", expected="at least one", got="an empty folder or array")
    images, size = torch.empty(len(kept), *data.shape), rows_of(BLOCK_BYTES, data.shape)
    for start in range(0, len(kept), size):
        block = np.stack(kept[start : start + size])
        images[start : start + size] = fit(block, range(start, start + len(block)), spec=data)
    return images
