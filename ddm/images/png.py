"""PNG (third edition): chunks are checked here, Pillow unpacks the pixels, and every sample keeps all its bits.

Pillow gets a file with nothing but the pixels in it, so that no other chunk can change them or ask for memory.
"""

# Shape legend: C channels, H height, W width.
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.pillow import opened
from ddm.images.raster import BYTE_RANGE, WORD_RANGE, Metadata, over_black, picture_of, spacing_of
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Numbers, Spacing

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Colour types: table 11.1.
_GREY = 0
_RGB = 2
_PALETTE = 3
_GREY_ALPHA = 4
_RGB_ALPHA = 6
_DEPTHS = {
    _GREY: (1, 2, 4, 8, 16),
    _RGB: (8, 16),
    _PALETTE: (1, 2, 4, 8),
    _GREY_ALPHA: (8, 16),
    _RGB_ALPHA: (8, 16),
}
_CHANNELS = {_GREY: 1, _RGB: 3, _PALETTE: 1, _GREY_ALPHA: 2, _RGB_ALPHA: 4}
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_ONCE = (b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"pHYs")
_MAX_TEXT_BYTES = 1 << 16  # of a packed text that is looked at
_MM_PER_METRE = 1000.0


@dataclass(frozen=True)
class _PngHeader:
    """IHDR: section 11.2.1."""

    width: int
    height: int
    depth: int
    colour: int
    interlace: int

    @property
    def top(self) -> int:
        """The value of white."""
        return (1 << self.depth) - 1


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
    """Yield the image of one file.

    Args:
        content: the file.
        kind: PNG.
        limits: the most that it may ask for.

    Raises:
        ImageError: pixels that cannot be decoded, with the true reason.
    """
    with content.open() as stream:
        chunks = _chunks(stream.read())
    header = _header(chunks)
    num_channels = _CHANNELS[header.colour]
    if header.colour == _PALETTE:
        # Its entries may be transparent.
        num_channels = 4
    limits.check(header.height, header.width, num_channels)
    samples = _samples(header, chunks)
    values = _colours(header, samples, chunks)
    metadata = _metadata(chunks)
    full = BYTE_RANGE
    if header.depth == 16:
        full = WORD_RANGE
    has_colours = header.colour not in (_GREY, _GREY_ALPHA)
    yield picture_of(
        values,
        kind,
        full=full,
        orientation=metadata.orientation,
        spacing=_spacing(chunks),
        flags=metadata.flags(colours=has_colours),
    )


def _chunks(data: bytes) -> dict[bytes, list[bytes]]:
    """Return the content of the chunks by their names, up to IEND; what follows is not part of the image."""
    chunks: dict[bytes, list[bytes]] = {}
    position = len(_SIGNATURE)
    while b"IEND" not in chunks:
        if position + 12 > len(data):
            raise ImageError(Reason.TRUNCATED, "chunks")
        length = int.from_bytes(data[position : position + 4])
        end = position + 8 + length
        if end + 4 > len(data):
            raise ImageError(Reason.TRUNCATED, "chunks")
        name = data[position + 4 : position + 8]
        if not chunks and name == b"CgBI":
            raise ImageError(Reason.UNSUPPORTED, "CgBI: Apple's variant of PNG")
        if not chunks and name != b"IHDR":
            raise ImageError(Reason.DAMAGED, "IHDR is not the first chunk")
        # Of every chunk: a flipped bit in a name turns a known chunk into an unknown one.
        # The sum is over name and content; a view, since content may be the whole image.
        name_and_content = memoryview(data)[position + 4 : end]
        stated_sum = int.from_bytes(data[end : end + 4])
        if zlib.crc32(name_and_content) != stated_sum:
            raise ImageError(Reason.DAMAGED, "check sum of a chunk")
        # The fifth bit of the first letter marks chunks that a decoder must know: section 5.4.
        is_critical = not name[0] & 0x20
        if name not in _CRITICAL and is_critical:
            raise ImageError(Reason.UNSUPPORTED, "an unknown critical chunk")
        if name in _ONCE and name in chunks:
            raise ImageError(Reason.DAMAGED, f"{name.decode()} twice")
        content = data[position + 8 : end]
        chunks.setdefault(name, []).append(content)
        position = end + 4
    return chunks


def _header(chunks: dict[bytes, list[bytes]]) -> _PngHeader:
    data = chunks[b"IHDR"][0]
    if len(data) != 13:
        raise ImageError(Reason.DAMAGED, "IHDR")
    width, height, depth, colour, compression, filtering, interlace = struct.unpack(
        ">IIBBBBB", data
    )
    if depth not in _DEPTHS.get(colour, ()):
        raise ImageError(Reason.DAMAGED, "IHDR: bit depth and colour type")
    if compression or filtering or interlace > 1:
        raise ImageError(
            Reason.UNSUPPORTED, "IHDR: an unknown compression, filter or interlace method"
        )
    if b"acTL" in chunks:
        raise ImageError(Reason.UNSUPPORTED, "acTL: an animation; save its frames as images")
    if b"IDAT" not in chunks:
        raise ImageError(Reason.NO_PIXELS, "IDAT")
    return _PngHeader(
        width=width,
        height=height,
        depth=depth,
        colour=colour,
        interlace=interlace,
    )


def _samples(header: _PngHeader, chunks: dict[bytes, list[bytes]]) -> Numbers:
    """Return the samples as they are in the file, shape (H, W, C), uint8 or uint16."""
    packed = b"".join(chunks[b"IDAT"])
    if header.depth < 16 or header.colour == _GREY:
        samples = _unpacked(header, packed)
        if header.depth < 8 and header.colour == _GREY:
            # Pillow spreads greys of few bits over 0 to 255, which divides evenly by 1, 3 and 15.
            samples = samples // (255 // header.top)
        return samples
    if header.colour == _GREY_ALPHA:
        # Four bytes a pixel, filtered as four bytes: the same stream read as RGBA of 8 bits keeps every byte.
        header_of_bytes = replace(header, depth=8, colour=_RGB_ALPHA)
        rgba = _unpacked(header_of_bytes, packed)
        words = np.ascontiguousarray(rgba).view(">u2")
        return words.astype(np.uint16)
    # Pillow has 8 bits for a colour: the upper bytes come from one reading, the lower ones from another.
    mode = "RGBA"
    if header.colour == _RGB:
        mode = "RGB"
    upper_bytes = _unpacked(header, packed, f"{mode};16B")
    samples = upper_bytes.astype(np.uint16)
    samples <<= 8
    samples |= _unpacked(header, packed, f"{mode};16L")
    return samples


def _unpacked(
    header: _PngHeader,
    packed: bytes,
    raw_mode: str | None = None,
) -> Numbers:
    """Unpack, unfilter and deinterlace with Pillow, which also reads a raw mode other than the header's."""
    # The two zeros are the only methods of compression and filtering that there are.
    packed_header = struct.pack(
        ">IIBBBBB",
        header.width,
        header.height,
        header.depth,
        header.colour,
        0,
        0,
        header.interlace,
    )
    file = _SIGNATURE + _chunk(b"IHDR", packed_header)
    if header.colour == _PALETTE:
        file += _chunk(b"PLTE", bytes(3))  # Pillow wants one; indices are looked up here
    file += _chunk(b"IDAT", packed)
    file += _chunk(b"IEND", b"")
    try:
        with opened(BytesIO(file), "PNG") as image:
            if raw_mode is not None:
                tile = image.tile[0]
                image.tile = [tile._replace(args=raw_mode)]
            values: Numbers = np.array(image)
    except (OSError, SyntaxError) as error:
        if "truncated" in str(error):
            raise ImageError(Reason.TRUNCATED, "IDAT") from error
        raise ImageError(Reason.DAMAGED, "IDAT") from error
    if values.dtype == np.bool_:
        values = values * np.uint8(255)
    elif values.dtype.itemsize > 1:
        values = values.astype(np.uint16)
    return values.reshape(header.height, header.width, -1)


def _chunk(name: bytes, data: bytes) -> bytes:
    length = len(data)
    # Over name and content, see `_chunks`.
    check_sum = zlib.crc32(data, zlib.crc32(name))
    return length.to_bytes(4) + name + data + check_sum.to_bytes(4)


def _colours(
    header: _PngHeader,
    samples: Numbers,
    chunks: dict[bytes, list[bytes]],
) -> Numbers:
    """Return greys or RGB, transparency laid over black; 1, 2 and 4 bits are spread over 0 to 255."""
    transparency = chunks.get(b"tRNS", [None])[0]
    if header.colour == _PALETTE:
        return _from_palette(header, samples[..., 0], chunks, transparency)
    if header.colour in (_GREY_ALPHA, _RGB_ALPHA):
        if transparency is not None:
            raise ImageError(Reason.DAMAGED, "tRNS beside an alpha channel")
        colours = samples[..., :-1]
        alpha = samples[..., -1]
        return over_black(colours, alpha, header.top)
    if transparency is not None:
        # One value, or one colour, in two bytes a sample whatever the depth, is transparent: section 11.3.1.1.
        num_channels = samples.shape[-1]
        if len(transparency) != 2 * num_channels:
            raise ImageError(Reason.DAMAGED, "tRNS")
        clear = np.frombuffer(transparency, ">u2").astype(np.uint16)
        is_clear = (samples == clear).all(-1, keepdims=True)
        black = samples.dtype.type(0)
        samples = np.where(is_clear, black, samples)
    if header.depth < 8:
        factor = 255 // header.top
        samples = samples * np.uint8(factor)
    return samples


def _from_palette(
    header: _PngHeader,
    indices: Numbers,
    chunks: dict[bytes, list[bytes]],
    transparency: bytes | None,
) -> Numbers:
    entries = chunks.get(b"PLTE", [b""])[0]
    num_bytes = len(entries)
    # Three bytes an entry, and no more entries than indices of this depth can name.
    max_bytes = 3 << header.depth
    if num_bytes == 0 or num_bytes % 3 or num_bytes > max_bytes:
        raise ImageError(Reason.DAMAGED, "PLTE")
    palette = np.frombuffer(entries, np.uint8).reshape(-1, 3)
    if indices.size and int(indices.max()) >= len(palette):
        raise ImageError(Reason.DAMAGED, "PLTE: an index beyond its end")
    if transparency is not None:
        if len(transparency) > len(palette):
            raise ImageError(Reason.DAMAGED, "tRNS")
        # Entries behind the last one that it names are opaque.
        num_named = len(transparency)
        alpha = np.full(len(palette), 255, np.uint8)
        alpha[:num_named] = np.frombuffer(transparency, np.uint8)
        palette = over_black(palette, alpha, 255)
    colours: Numbers = palette[indices]
    return colours


def _metadata(chunks: dict[bytes, list[bytes]]) -> Metadata:
    metadata = Metadata()
    for data in chunks.get(b"eXIf", ()):
        metadata.add_exif(data)
    for data in chunks.get(b"tEXt", ()):
        metadata.add_text(data)
    for name in (b"zTXt", b"iTXt"):
        for data in chunks.get(name, ()):
            metadata.add_text(data)
            metadata.add_text(_inflated(name, data))
    return metadata


def _inflated(name: bytes, data: bytes) -> bytes:
    """Return the beginning of a packed text; nothing if it is not packed or damaged, since it is only looked at."""
    _, _, rest = data.partition(b"\0")
    if name == b"zTXt":
        packed = rest[1:]
    elif rest[:1] == b"\1":
        # A flag and a method; then the language and the translated keyword, each ended by a zero.
        _, _, after_language = rest[2:].partition(b"\0")
        _, _, packed = after_language.partition(b"\0")
    else:
        return b""
    try:
        return zlib.decompressobj().decompress(packed, _MAX_TEXT_BYTES)
    except zlib.error:
        return b""


def _spacing(chunks: dict[bytes, list[bytes]]) -> Spacing | None:
    data = chunks.get(b"pHYs", [b""])[0]
    if len(data) != 9:
        return None
    per_column, per_row, unit = struct.unpack(">IIB", data)
    unit_mm = None  # a unit of 0 states only the proportion of a pixel's sides
    if unit == 1:
        unit_mm = _MM_PER_METRE
    return spacing_of(per_row, per_column, unit_mm)
