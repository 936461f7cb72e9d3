"""The samples of one page of TIFF: tifffile reads its tags and lays them out, imagecodecs unpacks strips and tiles.

A tag that cannot be obeyed is refused by its name. imagecodecs returns what it could unpack of a broken stream without
a word (LZW, PackBits), so that each strip or tile is held to the number of its bytes.
"""

# Shape legend: H height, W width, S samples of a pixel.
from collections.abc import Iterator
from math import ceil

import imagecodecs
import numpy as np
import tifffile

from ddm.images import jpeg
from ddm.images.picture import DecodeLimits
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Numbers, Shape

NONE = 1
LZW = 5
JPEG = 7
PACK_BITS = 32773
WHITE_IS_ZERO = 0
BLACK_IS_ZERO = 1
RGB = 2
PALETTE = 3
CMYK = 5
YCBCR = 6
NUM_COLOURS = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, PALETTE: 1, CMYK: 4, YCBCR: 3}
_DECODERS = {
    8: imagecodecs.zlib_decode,
    32946: imagecodecs.zlib_decode,
    PACK_BITS: imagecodecs.packbits_decode,
    50000: imagecodecs.zstd_decode,
}
# More than 4096 codes of 12 bits: one code stands for 4096 bytes at most.
_LONGEST_LZW_BYTES = 1 << 13
_NO_PREDICTOR = 1
_HORIZONTAL = 2
_FLOATING_POINT = 3
# SampleFormat; 4 means undefined, which counts as unsigned (section 19)
UNSIGNED = (1, 4)
SIGNED = 2
FLOATING = 3
_SEGMENT_TAGS = (273, 279, 324, 325)  # StripOffsets, StripByteCounts, TileOffsets, TileByteCounts
_FULL_RANGES = (  # of ReferenceBlackWhite; the second is its default for RGB, which some writers leave there
    (0, 255, 128, 255, 128, 255),
    (0, 255, 0, 255, 0, 255),
)


def check_page(page: tifffile.TiffPage, limits: DecodeLimits) -> None:
    """Refuse a page that is too large, or with a tag that contradicts another or that is not obeyed here.

    Raises:
        ImageError: with the tag's name.
    """
    limits.check(page.imagelength, page.imagewidth, page.samplesperpixel)
    height, width = _segment(page)
    num_down = ceil(page.imagelength / max(1, height))
    num_across = ceil(page.imagewidth / max(1, width))
    # Tiles may be larger than the image.
    limits.check(num_down * height, num_across * width)
    if 262 not in page.tags or page.photometric not in NUM_COLOURS:
        raise ImageError(
            Reason.UNSUPPORTED,
            "PhotometricInterpretation: missing, or not grey, RGB, YCbCr, palette or CMYK",
        )
    for name in ("BitsPerSample", "SampleFormat"):
        tag = page.tags.get(name)
        if tag is None:
            continue
        values = set(np.atleast_1d(tag.value))
        # Some writers give one number for all samples.
        if tag.count not in (1, page.samplesperpixel) or len(values) > 1:
            raise ImageError(Reason.UNSUPPORTED, f"{name}: not the same for all samples")
    if page.sampleformat not in (*UNSIGNED, SIGNED, FLOATING):
        raise ImageError(
            Reason.UNSUPPORTED, "SampleFormat: neither whole numbers nor floating point"
        )
    if page.dtype is None or page.bitspersample not in (*range(1, 17), 32, 64):
        raise ImageError(Reason.UNSUPPORTED, "BitsPerSample: not supported")
    if page.planarconfig not in (1, 2):
        raise ImageError(Reason.DAMAGED, "PlanarConfiguration")
    _check_coding(page)
    if page.compression == JPEG:
        _check_jpeg(page)
    if page.photometric == YCBCR:
        _check_ycbcr(page)


def _check_jpeg(page: tifffile.TiffPage) -> None:
    if page.bitspersample != 8 or page.sampleformat not in UNSIGNED:
        raise ImageError(Reason.UNSUPPORTED, "Compression: JPEG of other than 8 bits")
    is_known = page.photometric in (WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, YCBCR)
    if not is_known or page.samplesperpixel != NUM_COLOURS[page.photometric]:
        raise ImageError(Reason.UNSUPPORTED, "Compression: JPEG of other than grey, RGB and YCbCr")


def _check_ycbcr(page: tifffile.TiffPage) -> None:
    if page.compression != JPEG or page.planarconfig == 2:
        raise ImageError(
            Reason.UNSUPPORTED, "PhotometricInterpretation: YCbCr without JPEG, or in planes"
        )
    bounds = page.tags.valueof("ReferenceBlackWhite", ())
    full_ranges_as_fractions = [_as_fractions(full) for full in _FULL_RANGES]
    if bounds and bounds not in (*full_ranges_as_fractions, *_FULL_RANGES):
        raise ImageError(Reason.UNSUPPORTED, "ReferenceBlackWhite: other than the full range")


def _as_fractions(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return whole numbers as tifffile returns fractions: each with its denominator behind it."""
    fractions: list[int] = []
    for number in numbers:
        fractions += (number, 1)
    return tuple(fractions)


def _check_coding(page: tifffile.TiffPage) -> None:
    """Refuse compressions, predictors and orders of bits that are not decoded."""
    if page.compression not in (NONE, LZW, JPEG, *_DECODERS):
        raise ImageError(Reason.UNSUPPORTED, "Compression: not supported")
    if page.predictor not in (_NO_PREDICTOR, _HORIZONTAL, _FLOATING_POINT):
        raise ImageError(Reason.UNSUPPORTED, "Predictor")
    if page.predictor != _NO_PREDICTOR and page.compression in (NONE, JPEG, PACK_BITS):
        raise ImageError(Reason.DAMAGED, "Predictor: allowed only with LZW, Deflate and Zstandard")
    if page.predictor == _HORIZONTAL and page.bitspersample % 8:
        raise ImageError(Reason.UNSUPPORTED, "Predictor: 2 for samples that are not whole bytes")
    if page.predictor == _FLOATING_POINT and page.sampleformat != FLOATING:
        raise ImageError(Reason.UNSUPPORTED, "Predictor: 3 for samples that are not floating point")
    # TIFF 6.0 wants 2 for one bit a sample alone, uncompressed or in CCITT. Writers differ in what else they reverse.
    is_uncompressed_bits = page.bitspersample == 1 and page.compression == NONE
    is_allowed_reversal = page.fillorder == 2 and is_uncompressed_bits
    if page.fillorder != 1 and not is_allowed_reversal:
        raise ImageError(
            Reason.UNSUPPORTED, "FillOrder: other than 1, or 2 for uncompressed samples of one bit"
        )


def _segment(page: tifffile.TiffPage) -> tuple[int, int]:
    """Return height and width of a strip or tile."""
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return page.rowsperstrip, page.imagewidth


def samples_of(page: tifffile.TiffPage) -> Numbers:
    """Return the samples of a page, shape (H, W, S), in the type of the file and the byte order of the machine.

    Raises:
        ImageError: damaged or truncated.
    """
    is_planar = page.planarconfig == 2 and page.samplesperpixel > 1
    compression = page.compression
    segments = _packed_segments(page)
    if compression != JPEG:
        # tifffile gets unpacked bytes, since its own way fills gaps without a word.
        page.compression = NONE
        page.subsampling = None
    image_shape = (page.imagelength, page.imagewidth, page.samplesperpixel)
    samples = np.empty(image_shape, page.dtype)
    for number, data in enumerate(segments):
        _, place, shape = page.decode(None, number)
        if compression == JPEG:
            unpacked = _of_jpeg(page, data, shape)
        else:
            data = _decompressed(page, compression, data, shape)
            segment, *_ = page.decode(data, number)
            # Its first axis is that of slices, of which there is one.
            unpacked = np.asarray(segment)[0]
        plane, _, top, left, *_ = place
        if is_planar:
            planes = slice(plane, plane + 1)
        else:
            planes = slice(None)
        _, height, width, *_ = shape
        # The last tiles of a row or column reach beyond the image.
        part = samples[top : top + height, left : left + width, planes]
        num_rows, num_columns, _ = part.shape
        part[...] = unpacked[:num_rows, :num_columns]
    if samples.dtype == bool:
        return samples.view(np.uint8)
    return samples


def _packed_segments(page: tifffile.TiffPage) -> Iterator[bytes]:
    """Yield the packed bytes of the strips or tiles."""
    if not page.dataoffsets:
        raise ImageError(Reason.NO_PIXELS, "StripOffsets and TileOffsets are missing")
    height, width = _segment(page)
    if not height or not width:
        raise ImageError(Reason.DAMAGED, "RowsPerStrip, TileLength or TileWidth: 0")
    num_segments = ceil(page.imagelength / height) * ceil(page.imagewidth / width)
    if page.planarconfig == 2:
        num_segments *= page.samplesperpixel
    counts = {len(page.databytecounts)}
    for code in _SEGMENT_TAGS:
        if code in page.tags:
            counts.add(page.tags[code].count)
    if counts != {num_segments}:
        raise ImageError(
            Reason.DAMAGED, "Offsets or ByteCounts: not as many as there are strips or tiles"
        )
    if not all(page.dataoffsets) or not all(page.databytecounts):
        raise ImageError(Reason.DAMAGED, "Offsets or ByteCounts: a strip or tile without content")
    handle = page.parent.filehandle
    if sum(page.databytecounts) > handle.size:
        # Many segments in the same place would make memory of nothing.
        raise ImageError(Reason.TRUNCATED, "ByteCounts: more than the file has")
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        handle.seek(offset)
        data = handle.read(count)
        if len(data) != count:
            raise ImageError(Reason.TRUNCATED, "Offsets: outside of the file")
        yield data


def _decompressed(
    page: tifffile.TiffPage,
    compression: int,
    data: bytes,
    shape: Shape,
) -> bytes:
    """Return the bytes of a strip or tile of this shape (1, H, W, S), which may be packed with more rows."""
    _, height, width, num_samples = shape
    row_bytes = ceil(width * num_samples * page.bitspersample / 8)
    segment_height, _ = _segment(page)
    max_bytes = segment_height * row_bytes
    try:
        if compression == LZW:
            # A stream ends with a code of its own. Without it, the zeros behind it give more bytes than there may be.
            padded = data + bytes(_LONGEST_LZW_BYTES)
            data = bytes(imagecodecs.lzw_decode(padded, out=max_bytes + 1))
        elif compression != NONE:
            data = bytes(_DECODERS[compression](data, out=max_bytes))
    except (ValueError, RuntimeError) as error:
        raise ImageError(
            Reason.DAMAGED, "Compression: a strip or tile that does not unpack"
        ) from error
    num_bytes = height * row_bytes
    # One of LZW has all its rows or those within the image: the zeros behind a broken stream give another number.
    has_odd_length = compression == LZW and len(data) not in (num_bytes, max_bytes)
    if len(data) < num_bytes or has_odd_length:
        raise ImageError(Reason.TRUNCATED, "a strip or tile with fewer pixels than its page says")
    return data[:num_bytes]


def _of_jpeg(
    page: tifffile.TiffPage,
    data: bytes,
    shape: Shape,
) -> Numbers:
    """Return the samples of a strip or tile that is a stream of JPEG: TIFF Technical Note 2."""
    if page.jpegtables:
        # The tables end with an end of image and the data begin with a start of image: without the two, both are one
        # stream.
        tables = page.jpegtables.removesuffix(b"\xff\xd9")
        data = tables + data.removeprefix(b"\xff\xd8")
    markers = jpeg.parse(data)
    _, height, width, num_samples = shape
    if markers.num_channels != num_samples:
        raise ImageError(
            Reason.DAMAGED, "SamplesPerPixel: the stream of JPEG has another number of components"
        )
    segment_height, _ = _segment(page)
    # The last strip may have all its rows, or those within the image.
    if markers.width != width or markers.height not in (height, segment_height):
        raise ImageError(
            Reason.DAMAGED, "the stream of JPEG has another size than its strip or tile"
        )
    # The colour space is that of PhotometricInterpretation, whatever the stream's own markers say.
    colour_space = None
    if num_samples == 3:
        colour_space = {RGB: "RGB", YCBCR: "YCbCr"}.get(page.photometric)
    pixels = np.asarray(jpeg.decoded(markers, colour_space))
    return pixels.reshape(markers.height, markers.width, num_samples)
