"""What NIfTI and MGH share: voxels behind a header, perhaps packed by gzip, turned to the patient's axes."""

# Shape legend: C channels, I J K axes of a file, D slices, H height, W width.
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from ddm.images.content import FileContent
from ddm.images.orientation import flattened, oriented
from ddm.images.picture import DecodedPicture, Picture, supported
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Bounds, Numbers, Shape, Values

_GZIP = b"\x1f\x8b"
_BLOCK_BYTES = 1 << 20
_MAX_TRAILER_BYTES = 1 << 26  # behind the voxels; footers and padding are much shorter


def read_header(content: FileContent, size: int) -> bytes:
    """Return the first bytes of a file, unpacked."""
    with _unpacked(content) as stream:
        data = stream.read(size)
    if len(data) < size:
        raise ImageError(Reason.TRUNCATED, "header")
    return data


def read_volumes(
    content: FileContent,
    start: int,
    shape: Shape,
    kind: np.dtype[Any],
    num: int,
) -> Iterator[Numbers]:
    """Yield volumes that follow each other in a file, one in memory at a time.

    Args:
        content: the file.
        start: where the voxels begin, unpacked.
        shape: the shape of one volume, in the axes of the file, the first of which moves fastest.
        kind: type of a voxel.
        num: the number of volumes.

    Raises:
        ImageError: truncated, much more than a footer behind the voxels, or a wrong check sum of gzip.
    """
    size = prod(shape) * kind.itemsize
    if num > 1:
        # A file that ends too early, or a wrong check sum, spoils all volumes.
        read_footer(content, start + num * size)
    with _unpacked(content) as stream:
        _skip(stream, start)
        for number in range(num):
            data = stream.read(size)
            if len(data) != size:
                raise ImageError(Reason.TRUNCATED, "fewer voxels than its header says")
            if number == num - 1:
                _read_rest(stream)
            yield np.frombuffer(data, kind).reshape(shape, order="F")


def read_footer(content: FileContent, start: int) -> bytes:
    """Return what is behind the voxels, after reading to the end of the file, where gzip has its check sum."""
    with _unpacked(content) as stream:
        _skip(stream, start)
        return _read_rest(stream)


@contextmanager
def _unpacked(content: FileContent) -> Iterator[BinaryIO]:
    """Open a file that gzip may have packed, in one member or several."""
    with content.open() as file:
        if content.head(2) != _GZIP:
            yield file
            return
        with gzip.open(file) as stream:
            yield cast(BinaryIO, stream)


def _skip(stream: BinaryIO, size: int) -> None:
    while size > 0:
        block = stream.read(min(size, _BLOCK_BYTES))
        if not block:
            raise ImageError(Reason.TRUNCATED, "fewer voxels than its header says")
        size -= len(block)


def _read_rest(stream: BinaryIO) -> bytes:
    first = stream.read(_BLOCK_BYTES)
    size = len(first)
    while block := stream.read(_BLOCK_BYTES):
        size += len(block)
        if size > _MAX_TRAILER_BYTES:
            raise ImageError(
                Reason.DAMAGED, "many more bytes than the voxels that its header states"
            )
    return first


def picture_of_volume(
    values: Values,
    matrix: NDArray[np.float64],
    kind: str,
    *,
    window: Bounds | None,
    full: Bounds | None,
) -> DecodedPicture:
    """Return a volume (C, D, H, W), or the image (C, H, W) of its one slice.

    Args:
        values: shape (I, J, K, C).
        matrix: from voxels (i, j, k, 1) to mm to the patient's right, front and top.
        kind: the format.
        window: the window that the file states.
        full: bounds of the file's type.
    """
    native_type = values.dtype.newbyteorder("=")
    native = values.astype(native_type, copy=False)
    channels_first = np.moveaxis(native, -1, 0)
    turned, spacing = oriented(channels_first, matrix)
    if 1 in turned.shape[1:]:
        image, image_spacing = flattened(turned, spacing)
        picture = Picture(supported(image), image_spacing, window, full)
    else:
        picture = Picture(supported(turned), spacing, window, full)
    return DecodedPicture.of(picture, kind=kind)


def bounds_of(
    kind: np.dtype[Any],
    slope: float = 1.0,
    intercept: float = 0.0,
) -> Bounds | None:
    """Return the bounds of whole numbers of 8 or 16 bits, rescaled; None for other types."""
    if kind.kind not in "iu" or kind.itemsize > 2:
        return None
    limits = np.iinfo(kind)
    ends = (limits.min * slope + intercept, limits.max * slope + intercept)
    return min(ends), max(ends)
