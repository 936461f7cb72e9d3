"""Reads public images: arrays of the plan's shape, or pictures of any kind through the plan's transform."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.images.array_files import open_arrays, read_images
from ddm.images.fit import fit
from ddm.images.geometry import Floats
from ddm.images.public import picture_files, pictures
from ddm.images.rows import BLOCK_BYTES, rows_of
from ddm.images.transform import Transform, about
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec


def samples_at(path: Path, transform: Transform) -> Iterator[list[Floats]]:
    """Yield the samples of each picture.

    Args:
        path: whatever `ddm.images.public.pictures` takes.
        transform: the plan's.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: a picture that does not decode or that the plan does not take, by its number and never by its name.
    """
    found, number = pictures(path), 0
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
        path: with a transform, whatever `ddm.images.public.pictures` takes; without one, arrays as
            `ddm.images.array_files.read_images` takes them.
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
    found = Transformed.read(path, data, spec)
    images, start = torch.empty(len(found.kept), *data.shape), 0
    for block in found.blocks():
        images[start : start + len(block)] = block
        start += len(block)
    return images


@dataclass(frozen=True)
class Transformed:
    """What a transform made of pictures, in memory, in its compact type.

    Attributes:
        kept: the samples.
        count_P: how many each picture became.
        data: the plan's shape and range.
    """

    kept: list[NDArray[np.generic]]
    count_P: list[int]
    data: DataSpec

    @classmethod
    def read(cls, path: Path, data: DataSpec, spec: TransformSpec) -> "Transformed":
        """Read pictures that people have seen; see `read_transformed`."""
        transform = Transform(spec, data)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = cls([], [], data)
        for samples in samples_at(path, transform):
            found.kept.extend(map(transform.stored, samples))
            found.count_P.append(len(samples))
            if (needed := len(found.kept) * data.dim * (4 + transform.dtype.itemsize)) > memory:
                raise DataError("images", expected=f"at most {memory} bytes of memory", got=f"{needed} bytes")
        if not found.kept:
            raise DataError("images", expected="at least one", got="an empty folder or array")
        return found

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return sum(each.nbytes for each in self.kept)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the samples in blocks, float32, in the plan's range."""
        size = rows_of(BLOCK_BYTES, self.data.shape)
        for start in range(0, len(self.kept), size):
            block = np.stack(self.kept[start : start + size])
            yield fit(block, range(start, start + len(block)), spec=self.data)


def is_prepared(path: Path, data: DataSpec) -> bool:
    """Whether these are arrays in floating point of the plan's shape: samples already, that no transform is for.

    Raises:
        MissingFileError, DataError: see `ddm.images.public.picture_files` and `ddm.images.array_files.open_arrays`.
    """
    if picture_files(path) is not None:
        return False
    dtype, shape = open_arrays(path).row
    return dtype.kind == "f" and shape == data.shape


def files_at(path: Path) -> tuple[Path, ...]:
    """Return the files that hold the pictures or arrays at `path`, in order.

    Raises:
        MissingFileError, DataError: see `ddm.images.public.picture_files` and `ddm.images.array_files.open_arrays`.
    """
    return picture_files(path) or open_arrays(path).files
