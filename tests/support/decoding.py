"""The one picture of a file in memory, or the reason why it is refused; Exif with an orientation."""

import struct

import pytest

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError


def decoded_picture(data: bytes) -> DecodedPicture:
    """Return the only picture of a file, whose content states its format."""
    (picture,) = decode(FileContent(None, data, "picture"))
    assert isinstance(picture, DecodedPicture)
    return picture


def decoding_refusal(data: bytes, limits: DecodeLimits | None = None) -> ImageError:
    """Return the error with which a file is refused."""
    with pytest.raises(ImageError) as caught:
        list(decode(FileContent(None, data, "picture"), limits))
    return caught.value


def exif_of_orientation(orientation: int, order: str = "<") -> bytes:
    """Return the TIFF structure of Exif with one entry, the orientation (tag 274), in a byte order of `struct`."""
    mark = b"MM\0*"
    if order == "<":
        mark = b"II*\0"
    offset_of_first_directory = 8
    entry = (274, 3, 1, orientation, 0)
    return mark + struct.pack(order + "IHHHIHHI", offset_of_first_directory, 1, *entry, 0)
