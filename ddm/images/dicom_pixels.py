"""Uncompressed pixels of DICOM, without the copies that pydicom makes of them."""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.images.dicom_tags import tag_of, value_of

_UNDEFINED = 0xFFFFFFFF  # a length that only the end of the value tells


def stored(tags: Any, name: str) -> bytes | memoryview | None:
    """Return what the file holds as the value of a tag of bytes; None or nothing where it holds none.

    A value that pydicom left in memory where it was (`defer_size`) is returned as the part of the file that it is,
    which is shorter than announced where the file ends within it.
    """
    element, buffer = tags.get_item(tag_of(name), keep_deferred=True), getattr(tags, "buffer", None)
    if element is None or element.value is not None or element.length == _UNDEFINED or not isinstance(buffer, BytesIO):
        return value_of(tags, name) or None
    return memoryview(buffer.getvalue())[element.value_tell : element.value_tell + element.length]


def greys(tags: Any, num: int, shape: tuple[int, ...], photometric: str) -> NDArray[Any] | None:
    """Return greys of 8 or 16 bits in place, (N, H, W), of a file in little endian; None of all else.

    Args:
        tags: of the file.
        num: of its frames.
        shape: of one of them, (C, H, W).
        photometric: what its values mean.
    """
    if photometric not in ("MONOCHROME1", "MONOCHROME2") or shape[0] != 1:
        return None
    allocated, bits = value_of(tags, "BitsAllocated"), value_of(tags, "BitsStored")
    pixels, sign = stored(tags, "PixelData"), value_of(tags, "PixelRepresentation")
    if (
        allocated not in (8, 16)
        or sign not in (0, 1)
        or not isinstance(bits, int)
        or not 1 <= bits <= allocated
        or not isinstance(pixels, bytes | memoryview)
        or value_of(tags, "SamplesPerPixel") is None
    ):
        return None
    return np.frombuffer(pixels, f"<{'ui'[sign]}{allocated // 8}", num * shape[1] * shape[2]).reshape(num, *shape[1:])


def without_unused_bits(frame: NDArray[Any], bits: int) -> NDArray[Any]:
    """Return a frame whose values are those of the bits that are stored; the others may hold anything."""
    sign, unused = frame.dtype.kind == "i", 8 * frame.itemsize - bits
    high = (1 << bits - sign) - 1
    if not unused or (int(frame.max()) <= high and (not sign or int(frame.min()) >= -high - 1)):
        return frame
    values: NDArray[Any] = np.left_shift(frame, unused)
    np.right_shift(values, unused, out=values)
    return values
