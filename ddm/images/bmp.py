"""BMP: uncompressed images of 1, 4, 8, 24 and 32 bits of a pixel, through Pillow; other encodings are refused."""

# Shape legend: H height, W width.
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.pillow import opened
from ddm.images.raster import BYTE_RANGE, picture_of, spacing_of
from ddm.images.reasons import ImageError, Reason

_MIN_BYTES = 54
_CORE_HEADER = 12  # OS/2's and Windows 2's; the others have BITMAPINFOHEADER's fields first
_OS2_HEADER = 64
_HEADERS = (_CORE_HEADER, 40, 52, 56, _OS2_HEADER, 108, 124)
_BITS_OF_GREYS = {"1": 1, "L": 8}  # by Pillow's modes
_RGB = 0
_BITFIELDS = 3
_USUAL_MASKS = (0x00FF0000, 0x0000FF00, 0x000000FF)
_MM_PER_METRE = 1000.0


@dataclass(frozen=True)
class _BmpHeader:
    """The fields of the file's header and of the image's, with the names of Windows in comments."""

    pixels_at: int  # bfOffBits
    size: int  # biSize
    width: int  # biWidth
    height: int  # biHeight; below 0 where rows descend
    bits: int  # biBitCount
    compression: int = _RGB  # biCompression
    per_column: int = 0  # biXPelsPerMeter
    per_row: int = 0  # biYPelsPerMeter
    num_colours: int = 0  # biClrUsed; 0 means all that the bits can number

    @property
    def palette_size(self) -> int:
        """The number of colours in the palette."""
        return self.num_colours or 1 << self.bits


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
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
    header = _parse_header(data)
    _check_encoding(header, data)
    # No mode that Pillow decodes a BMP into has more than four bytes a pixel.
    limits.check(abs(header.height), header.width, 4)
    _check_lengths(header, len(data))
    with opened(BytesIO(data), "BMP") as image:
        if image.mode == "P":
            indices = np.asarray(image)
            if indices.max() >= header.palette_size:
                raise ImageError(Reason.DAMAGED, "an index beyond the end of the palette")
        is_grey = image.mode in _BITS_OF_GREYS
        if is_grey and header.bits != _BITS_OF_GREYS[image.mode]:
            raise ImageError(
                Reason.UNSUPPORTED, "biClrUsed: a palette of few greys that Pillow misreads"
            )
        # What Pillow takes for transparency is a fourth byte that means nothing.
        mode = "RGB"
        if is_grey:
            mode = "L"
        pixels = np.asarray(image.convert(mode))
    height, width, *_ = pixels.shape
    values = pixels.reshape(height, width, -1)
    first_channel = values[..., :1]
    if header.bits <= 8 and (values == first_channel).all():
        values = first_channel  # BMP has no other way to store greys
    spacing = spacing_of(header.per_row, header.per_column, _MM_PER_METRE)
    yield picture_of(values, kind, full=BYTE_RANGE, spacing=spacing)


def _parse_header(data: bytes) -> _BmpHeader:
    if len(data) < _MIN_BYTES:
        raise ImageError(Reason.TRUNCATED, "header of BMP")
    pixels_at, size = struct.unpack("<II", data[10:18])
    if size == _CORE_HEADER:
        width, height, _, bits = struct.unpack("<HHHH", data[18:26])
        return _BmpHeader(pixels_at, size, width, height, bits)
    width, height, _, bits, compression, _, per_column, per_row, num_colours = struct.unpack(
        "<iiHHIIiiI", data[18:50]
    )
    return _BmpHeader(
        pixels_at,
        size,
        width,
        height,
        bits,
        compression,
        per_column,
        per_row,
        num_colours,
    )


def _check_encoding(header: _BmpHeader, data: bytes) -> None:
    """Refuse encodings that Pillow would misread."""
    if header.size not in _HEADERS or header.bits not in (1, 4, 8, 24, 32):
        raise ImageError(Reason.UNSUPPORTED, "biSize or biBitCount")
    has_masks = header.compression == _BITFIELDS and header.size != _OS2_HEADER
    if has_masks and header.bits == 32:
        # They follow the first 40 bytes of the header, in which all headers but OS/2's agree.
        masks = data[54:66].ljust(12)
        mask_of_transparency = data[66:70]
        if struct.unpack("<III", masks) != _USUAL_MASKS:
            raise ImageError(Reason.UNSUPPORTED, "unusual colour masks")
        if header.size >= 56 and any(mask_of_transparency):
            raise ImageError(Reason.UNSUPPORTED, "a mask of transparency")
    elif header.compression != _RGB:
        raise ImageError(Reason.UNSUPPORTED, "biCompression")


def _check_lengths(header: _BmpHeader, num_bytes: int) -> None:
    # The oldest header has a palette without the fourth, reserved byte.
    colour_bytes = 4
    if header.size == _CORE_HEADER:
        colour_bytes = 3
    palette_bytes = 0
    if header.bits <= 8:
        palette_bytes = header.palette_size * colour_bytes
    if header.num_colours > 256 or header.pixels_at < 14 + header.size + palette_bytes:
        raise ImageError(Reason.DAMAGED, "bfOffBits or palette")
    # Rows are padded to words of 32 bits.
    row_bytes = (header.width * header.bits + 31) // 32 * 4
    if header.pixels_at + row_bytes * abs(header.height) > num_bytes:
        raise ImageError(Reason.TRUNCATED, "fewer pixels than its header says")
