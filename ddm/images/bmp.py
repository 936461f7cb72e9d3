"""BMP: uncompressed images of 1, 4, 8, 24 and 32 bits of a pixel, through Pillow; other encodings are refused."""

# Shape legend: H height, W width.
import struct
from collections.abc import Iterator
from io import BytesIO

import numpy as np

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, Limits
from ddm.images.pillow import opened
from ddm.images.raster import BYTE_RANGE, picture_of, spacing_of
from ddm.images.reasons import ImageError, Reason

_CORE_HEADER = 12  # OS/2's and Windows 2's; the others have BITMAPINFOHEADER's fields first
_HEADERS = (_CORE_HEADER, 40, 52, 56, 64, 108, 124)
_BITS_OF_GREYS = {"1": 1, "L": 8}  # by Pillow's modes
_RGB = 0
_BITFIELDS = 3
_USUAL_MASKS = (0x00FF0000, 0x0000FF00, 0x000000FF)
_MM_PER_METRE = 1000.0


def read(content: FileContent, kind: str, limits: Limits) -> Iterator[DecodedPicture]:
    """Yield the image of one file.

    Args:
        content: the file.
        kind: BMP.
        limits: the most that it may ask for.

    Raises:
        ImageError: pixels that cannot be decoded, with the true reason.
    """
    with content.open() as stream:
        data = stream.read()
    if len(data) < 54:
        raise ImageError(Reason.TRUNCATED, "header of BMP")
    pixels_at, header_size = struct.unpack("<II", data[10:18])
    width, height, _, bits, compression, _, per_column, per_row, num_colours = struct.unpack(
        "<iiHHIIiiI", data[18:50]
    )
    if header_size == _CORE_HEADER:
        width, height, _, bits = struct.unpack("<HHHH", data[18:26])
        compression = per_column = per_row = num_colours = 0
    if header_size not in _HEADERS or bits not in (1, 4, 8, 24, 32):
        raise ImageError(Reason.UNSUPPORTED, "biSize or biBitCount")
    if compression == _BITFIELDS and bits == 32 and header_size != 64:
        if struct.unpack("<III", data[54:66].ljust(12)) != _USUAL_MASKS:
            raise ImageError(Reason.UNSUPPORTED, "unusual colour masks")
        if header_size >= 56 and any(data[66:70]):
            raise ImageError(Reason.UNSUPPORTED, "a mask of transparency")
    elif compression != _RGB:
        raise ImageError(Reason.UNSUPPORTED, "biCompression")
    limits.check(abs(height), width, 4)
    # The oldest header has a palette without the fourth, reserved byte.
    colour_bytes = 4
    if header_size == _CORE_HEADER:
        colour_bytes = 3
    palette_bytes = 0
    if bits <= 8:
        palette_bytes = (num_colours or 1 << bits) * colour_bytes
    if num_colours > 256 or pixels_at < 14 + header_size + palette_bytes:
        raise ImageError(Reason.DAMAGED, "bfOffBits or palette")
    if pixels_at + (width * bits + 31) // 32 * 4 * abs(height) > len(data):
        raise ImageError(Reason.TRUNCATED, "fewer pixels than its header says")
    with opened(BytesIO(data), "BMP") as image:
        if image.mode == "P" and np.asarray(image).max() >= (num_colours or 1 << bits):
            raise ImageError(Reason.DAMAGED, "an index beyond the end of the palette")
        if image.mode in _BITS_OF_GREYS and bits != _BITS_OF_GREYS[image.mode]:
            raise ImageError(
                Reason.UNSUPPORTED, "biClrUsed: a palette of few greys that Pillow misreads"
            )
        # What Pillow takes for transparency is a fourth byte that means nothing.
        values = np.asarray(image.convert("L" if image.mode in _BITS_OF_GREYS else "RGB"))[
            ..., None
        ]
    values = values.reshape(*values.shape[:2], -1)
    if bits <= 8 and (values == values[..., :1]).all():
        values = values[..., :1]  # BMP has no other way to store greys
    yield picture_of(
        values, kind, full=BYTE_RANGE, spacing=spacing_of(per_row, per_column, _MM_PER_METRE)
    )
