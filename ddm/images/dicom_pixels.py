"""The image pixel module of DICOM (PS3.3 C.7.6.3): which stored values a frame consists of.

Every tag of the module is used or checked. Uncompressed and run-length encoded pixels are cells of BitsAllocated bits,
which the tags describe. Of all other compressed pixels the code stream decides: HighBit and PlanarConfiguration mean
nothing there, and a tag that would change the values is a contradiction.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.images.dicom_codestreams import CodeStream, code_stream_of, decoded
from ddm.images.dicom_tags import has_tag, sequence_of, tag_of, text_of, texts_of, value_of, word_of
from ddm.images.picture import DecodeLimits
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Numbers, Values

# Transfer syntaxes (PS3.6 A).
IMPLICIT_LITTLE_ENDIAN = "1.2.840.10008.1.2"
EXPLICIT_LITTLE_ENDIAN = "1.2.840.10008.1.2.1"
EXPLICIT_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_RLE = "1.2.840.10008.1.2.5"
_NATIVE = (IMPLICIT_LITTLE_ENDIAN, EXPLICIT_LITTLE_ENDIAN, EXPLICIT_BIG_ENDIAN, _DEFLATED)
_ENCAPSULATED_CELLS = "1.2.840.10008.1.2.1.98"
_DEFLATED_CELLS = "1.2.840.10008.1.2.8.1"
_CODE_STREAMS = "1.2.840.10008.1.2.4."
_CODE_STREAM_NUMBERS = frozenset(map(str, (*range(50, 71), 80, 81, 90, 91, 92, 93, 201, 202, 203)))
_LOSSLESS_NUMBERS = frozenset(map(str, (57, 58, 65, 66, 70, 80, 90, 92, 201, 202)))
_SAMPLES = {
    "MONOCHROME1": 1,
    "MONOCHROME2": 1,
    "PALETTE COLOR": 1,
    "RGB": 3,
    "YBR_FULL": 3,
    "YBR_FULL_422": 3,
    "YBR_RCT": 3,
    "YBR_ICT": 3,
}
_YBR = ("YBR_FULL", "YBR_FULL_422")
_FLOATS = {"FloatPixelData": 32, "DoubleFloatPixelData": 64}
_UNDEFINED = 0xFFFFFFFF  # a length that only the end of the value tells
_ITEM = b"\xfe\xff\x00\xe0"
_SEQUENCE_END = b"\xfe\xff\xdd\xe0"
_STARTS = (b"\xff\xd8\xff", b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  ")  # of a code stream
_RLE_HEADER_BYTES = 64
_OVERSHOOT = 1 / 16  # of the range: lossy compression may leave it at sharp edges


@dataclass(frozen=True)
class PixelFormat:
    """What a file says about its pixels.

    Attributes:
        syntax: transfer syntax.
        keyword: the tag that holds the pixels.
        num_frames: NumberOfFrames.
        rows: Rows.
        columns: Columns.
        samples: SamplesPerPixel.
        photometric: PhotometricInterpretation.
        allocated: BitsAllocated; 0 where a code stream decides.
        stored: BitsStored; 0 of floating point, or where a code stream decides and the file does not say.
        high_bit: HighBit; of no meaning where a code stream decides.
        signed: PixelRepresentation.
        planar: PlanarConfiguration; of no meaning for compressed pixels.
    """

    syntax: str
    keyword: str
    num_frames: int
    rows: int
    columns: int
    samples: int
    photometric: str
    allocated: int = 0
    stored: int = 0
    high_bit: int = 0
    signed: bool = False
    planar: int = 0

    @property
    def has_code_streams(self) -> bool:
        """Whether each frame is a code stream of JPEG, JPEG-LS or JPEG 2000."""
        return self.syntax.startswith(_CODE_STREAMS)

    @property
    def row_bits(self) -> int:
        """The bits of one row of cells; of YBR_FULL_422, two pixels share their chrominance."""
        samples = self.samples
        if self.photometric == "YBR_FULL_422":
            samples = 2
        return self.columns * samples * self.allocated

    @property
    def is_float(self) -> bool:
        """Whether the pixels are floating point numbers."""
        return self.keyword in _FLOATS


@dataclass(frozen=True)
class StoredFrame:
    """The stored values of one frame.

    Attributes:
        values: (H, W), or red, green and blue (H, W, 3); they may be a read-only part of the file.
        bounds: lowest and highest number that the stored bits can hold; None for floating point.
    """

    values: Numbers
    bounds: tuple[int, int] | None


def contradiction(*keywords: str) -> ImageError:
    """Return the error about tags that contradict each other, or the code stream."""
    return ImageError(Reason.DAMAGED, f"{' and '.join(keywords)} contradict each other")


def pixel_format_of(
    tags: Any,
    syntax: str,
    limits: DecodeLimits,
) -> PixelFormat:
    """Return what a file says about its pixels, checked against itself and within the limits.

    Raises:
        ImageError: no pixels, too many, tags that are missing or contradict each other, or an encoding that nothing
            here decodes.
    """
    rows = word_of(tags, "Rows")
    columns = word_of(tags, "Columns")
    if rows is None or columns is None:
        raise ImageError(Reason.NO_PIXELS)
    num_frames = _num_frames(tags)
    # Some writers put several spaces between the words, or write small letters.
    words = text_of(tags, "PhotometricInterpretation").upper().split()
    photometric = " ".join(words)
    samples = word_of(tags, "SamplesPerPixel")
    limits.check_pictures(num_frames)
    limits.check(samples or 1, rows, columns)
    num_groups = len(sequence_of(tags, "PerFrameFunctionalGroupsSequence"))
    if num_groups not in (0, num_frames):
        # One item for each frame (PS3.3 C.7.6.16): otherwise some frames would be left without their own rescaling.
        raise contradiction("NumberOfFrames", "PerFrameFunctionalGroupsSequence")
    keyword = _pixel_keyword(tags)
    if samples is None:
        raise _missing("SamplesPerPixel")
    if not photometric:
        raise _missing("PhotometricInterpretation")
    if photometric not in _SAMPLES:
        raise ImageError(Reason.UNSUPPORTED, "PhotometricInterpretation is not supported")
    if samples != _SAMPLES[photometric]:
        raise contradiction("SamplesPerPixel", "PhotometricInterpretation")
    pixel_format = PixelFormat(
        syntax=syntax,
        keyword=keyword,
        num_frames=num_frames,
        rows=rows,
        columns=columns,
        samples=samples,
        photometric=photometric,
    )
    if pixel_format.is_float:
        return _float_format(tags, pixel_format)
    pixel_format = replace(
        pixel_format,
        allocated=word_of(tags, "BitsAllocated") or 0,
        stored=word_of(tags, "BitsStored") or 0,
        signed=_is_signed(tags),
    )
    if pixel_format.has_code_streams:
        return pixel_format
    return _cell_format(tags, pixel_format)


def _num_frames(tags: Any) -> int:
    texts = texts_of(tags, "NumberOfFrames")
    try:
        # Some files of a single image state 0; the length of the pixels is checked in any case.
        if not texts:
            return 1
        return int(texts[0]) or 1
    except ValueError as error:
        raise ImageError(Reason.DAMAGED, "NumberOfFrames is not a whole number") from error


def _missing(keyword: str) -> ImageError:
    return ImageError(Reason.DAMAGED, f"{keyword} is missing")


def _pixel_keyword(tags: Any) -> str:
    keywords = [name for name in ("PixelData", *_FLOATS) if has_tag(tags, name)]
    if not keywords:
        # pydicom returns what came before the end of a file; an image with rows and without pixels was cut off there.
        raise ImageError(Reason.TRUNCATED, "rows and columns, but no pixels")
    if len(keywords) > 1:
        raise contradiction(*keywords)
    return keywords[0]


def _is_signed(tags: Any) -> bool:
    representation = word_of(tags, "PixelRepresentation")
    if representation is None:
        raise _missing("PixelRepresentation")
    if representation > 1:
        raise ImageError(Reason.DAMAGED, "PixelRepresentation is neither 0 nor 1")
    return representation == 1


def _float_format(tags: Any, described: PixelFormat) -> PixelFormat:
    keyword = described.keyword
    num_bits = _FLOATS[keyword]
    allocated = word_of(tags, "BitsAllocated")
    if allocated not in (None, num_bits):
        raise contradiction("BitsAllocated", keyword)
    if described.syntax not in _NATIVE:
        raise contradiction("TransferSyntaxUID", keyword)
    if described.photometric not in ("MONOCHROME1", "MONOCHROME2"):
        raise contradiction("PhotometricInterpretation", keyword)
    return replace(described, allocated=num_bits)


def _cell_format(tags: Any, described: PixelFormat) -> PixelFormat:
    """Return the format of pixels in cells, of which every bit counts (PS3.5 8.1.1)."""
    high_bit = _high_bit(tags, described)
    _check_colours_of_cells(described)
    has_colours = described.samples > 1
    is_run_length_encoded = described.syntax == _RLE
    planar = 0
    if has_colours and not is_run_length_encoded:
        planar = _planar_configuration(tags)
    if described.photometric == "YBR_FULL_422":
        if is_run_length_encoded:
            raise contradiction("PhotometricInterpretation", "TransferSyntaxUID")
        if planar == 1:
            raise contradiction("PhotometricInterpretation", "PlanarConfiguration")
        if described.columns % 2:
            raise contradiction("PhotometricInterpretation", "Columns")
    return replace(described, high_bit=high_bit, planar=planar)


def _high_bit(tags: Any, described: PixelFormat) -> int:
    """Return HighBit, checked together with BitsAllocated and BitsStored."""
    allocated = described.allocated
    stored = described.stored
    if not allocated:
        raise _missing("BitsAllocated")
    if allocated not in (1, 8, 16, 32, 64):
        raise ImageError(Reason.UNSUPPORTED, "BitsAllocated is neither 1, 8, 16, 32 nor 64")
    if not stored:
        raise _missing("BitsStored")
    if stored > allocated:
        raise contradiction("BitsStored", "BitsAllocated")
    lowest_high_bit = stored - 1
    high_bit = word_of(tags, "HighBit")
    if high_bit is None:
        # PS3.5 8.1.1 allows no other one today.
        return lowest_high_bit
    if high_bit < lowest_high_bit:
        raise contradiction("HighBit", "BitsStored")
    if high_bit >= allocated:
        raise contradiction("HighBit", "BitsAllocated")
    return high_bit


def _check_colours_of_cells(described: PixelFormat) -> None:
    has_colours = described.samples > 1
    if described.photometric in ("YBR_RCT", "YBR_ICT"):
        # Only the encoder of JPEG 2000 makes these colours.
        raise contradiction("PhotometricInterpretation", "TransferSyntaxUID")
    if has_colours and described.signed:
        raise contradiction("PixelRepresentation", "PhotometricInterpretation")
    has_bytes = described.stored == 8 and described.allocated == 8
    if described.photometric in _YBR and not has_bytes:
        raise ImageError(Reason.UNSUPPORTED, "PhotometricInterpretation YBR of other than 8 bits")
    if described.allocated == 1 and has_colours:
        raise contradiction("BitsAllocated", "SamplesPerPixel")


def _planar_configuration(tags: Any) -> int:
    planar = word_of(tags, "PlanarConfiguration")
    if planar is None:
        raise _missing("PlanarConfiguration")
    if planar > 1:
        raise ImageError(Reason.DAMAGED, "PlanarConfiguration is neither 0 nor 1")
    return planar


def frames_of(tags: Any, pixel_format: PixelFormat) -> Iterator[StoredFrame]:
    """Yield the stored values of each frame; colours as RGB.

    Raises:
        ImageError: pixels that are missing, damaged or other than the tags say.
    """
    syntax = pixel_format.syntax
    if syntax in _NATIVE:
        return _native_frames(tags, pixel_format)
    if syntax in (_ENCAPSULATED_CELLS, _DEFLATED_CELLS, _RLE):
        return _packed_frames(tags, pixel_format)
    is_supported = _last_number(syntax) in _CODE_STREAM_NUMBERS
    if pixel_format.has_code_streams and is_supported:
        return _code_stream_frames(tags, pixel_format)
    raise ImageError(Reason.UNSUPPORTED, "TransferSyntaxUID is not supported")


def _last_number(syntax: str) -> str:
    return syntax.removeprefix(_CODE_STREAMS)


def pixel_bytes(tags: Any, keyword: str) -> bytes | memoryview:
    """Return what the file holds as the value of a tag of bytes; nothing where it holds nothing.

    A value that pydicom left in memory where it was (`defer_size`) is returned as the part of the file that it is,
    which is shorter than announced where the file ends within it, and which continues to the end of the file where only
    the end of the value tells its length.
    """
    element = tags.get_item(tag_of(keyword), keep_deferred=True)
    if element is None:
        return b""
    buffer = getattr(tags, "buffer", None)
    if element.value is None and isinstance(buffer, BytesIO):
        start = element.value_tell
        end = None
        if element.length != _UNDEFINED:
            end = start + element.length
        return memoryview(buffer.getvalue())[start:end]
    value = element.value
    if value is None:
        value = value_of(tags, keyword)
    if not isinstance(value, bytes):
        return b""
    return value


def _native_frames(tags: Any, pixel_format: PixelFormat) -> Iterator[StoredFrame]:
    """Yield frames that follow each other without a gap, even where a frame of single bits ends within a byte."""
    element = tags.get_item(tag_of(pixel_format.keyword), keep_deferred=True)
    # pydicom states it in one way for an element that it left in the file, and in another for one that it has read.
    has_undefined_length = getattr(element, "length", 0) == _UNDEFINED
    if has_undefined_length or getattr(element, "is_undefined_length", False):
        raise contradiction("TransferSyntaxUID", pixel_format.keyword)
    data: Any = pixel_bytes(tags, pixel_format.keyword)
    row_bits = pixel_format.row_bits
    frame_bits = row_bits * pixel_format.rows
    total_bits = frame_bits * pixel_format.num_frames
    num_padding_bits = 8 * len(data) - total_bits
    if num_padding_bits < 0:
        raise ImageError(Reason.TRUNCATED, "fewer pixels than rows, columns and frames")
    # A byte that makes the length even is padding, and some writers pad to a block with zeros. Anything else means that
    # there are more pixels than the tags announce.
    is_block = False
    if num_padding_bits < frame_bits:
        num_pixel_bytes = (total_bits + 7) // 8
        padding = np.frombuffer(data, np.uint8, offset=num_pixel_bytes)
        is_block = not np.any(padding)
    if num_padding_bits >= max(row_bits, 16) and not is_block:
        keywords = "NumberOfFrames, Rows, Columns, PhotometricInterpretation"
        raise contradiction(keywords, f"the length of {pixel_format.keyword}")
    if pixel_format.syntax == EXPLICIT_BIG_ENDIAN and not pixel_format.is_float:
        data = _from_big_endian(data, tags, pixel_format)
    for number in range(pixel_format.num_frames):
        # Frames of single bits may begin within a byte.
        start = number * frame_bits
        end = start + frame_bits
        first_byte = start // 8
        end_byte = (end + 7) // 8
        cells = _cells(data[first_byte:end_byte], pixel_format, bit_offset=start % 8)
        yield _frame_of_cells(tags, cells, pixel_format)


def _from_big_endian(
    data: Any,
    tags: Any,
    pixel_format: PixelFormat,
) -> Any:
    """Return bytes as they would be in little endian, where words of 16 bits are what was swapped (PS3.5 7.3, 8.1)."""
    element = tags.get_item(tag_of("PixelData"), keep_deferred=True)
    has_words = element.VR == "OW"
    if pixel_format.allocated <= 8 and not has_words:
        return data
    if pixel_format.allocated > 16 or not has_words:
        raise ImageError(Reason.UNSUPPORTED, "BitsAllocated of this size in big endian")
    # A last byte without a partner stays where it is.
    num_bytes_of_pairs = len(data) // 2 * 2
    pairs = np.frombuffer(data, np.uint8, num_bytes_of_pairs).reshape(-1, 2)
    swapped = pairs[:, ::-1].reshape(-1)
    return swapped.tobytes() + bytes(data[num_bytes_of_pairs:])


def _cells(
    data: Any,
    pixel_format: PixelFormat,
    bit_offset: int = 0,
) -> Numbers:
    """Return the cells of one frame: (H, W), or (H, W, 3)."""
    rows = pixel_format.rows
    columns = pixel_format.columns
    num_pixels = rows * columns
    num_cell_bytes = pixel_format.allocated // 8
    if pixel_format.is_float:
        order = "<"
        if pixel_format.syntax == EXPLICIT_BIG_ENDIAN:
            order = ">"
        floats = np.frombuffer(data, f"{order}f{num_cell_bytes}", num_pixels)
        return floats.reshape(rows, columns)
    if pixel_format.allocated == 1:
        packed = np.frombuffer(data, np.uint8)
        bits = np.unpackbits(packed, bitorder="little")
        # The first byte may begin with bits of the frame before.
        own_bits = bits[bit_offset : bit_offset + num_pixels]
        return own_bits.reshape(rows, columns)
    if pixel_format.photometric == "YBR_FULL_422":
        # Two pixels in four bytes.
        subsampled = np.frombuffer(data, np.uint8, 2 * num_pixels)
        return _without_subsampling(subsampled, rows, columns)
    kind = _integer_type(num_cell_bytes, pixel_format.signed)
    num_samples = pixel_format.samples
    cells = np.frombuffer(data, f"<{kind}", num_pixels * num_samples)
    if num_samples == 1:
        return cells.reshape(rows, columns)
    if pixel_format.planar == 1:
        planes = cells.reshape(num_samples, rows, columns)
        return np.moveaxis(planes, 0, -1)
    return cells.reshape(rows, columns, num_samples)


def _integer_type(num_bytes: int, signed: bool) -> str:
    """Return NumPy's name of a whole number of this many bytes, without the order of its bytes."""
    if signed:
        return f"i{num_bytes}"
    return f"u{num_bytes}"


def _without_subsampling(
    cells: NDArray[np.uint8],
    rows: int,
    columns: int,
) -> NDArray[np.uint8]:
    """Return (H, W, 3) of two luminances, one CB and one CR for each two columns (PS3.3 C.7.6.3.1.2)."""
    quadruples = cells.reshape(rows, columns // 2, 4)
    luminance = quadruples[..., :2]
    blueness = quadruples[..., 2]
    redness = quadruples[..., 3]
    ybr = np.empty((rows, columns, 3), np.uint8)
    ybr[..., 0] = luminance.reshape(rows, columns)
    ybr[..., 1] = blueness.repeat(2, axis=1)
    ybr[..., 2] = redness.repeat(2, axis=1)
    return ybr


def _frame_of_cells(
    tags: Any,
    cells: Numbers,
    pixel_format: PixelFormat,
) -> StoredFrame:
    if pixel_format.is_float:
        return StoredFrame(cells, None)
    values = _stored_values(tags, cells, pixel_format)
    if pixel_format.photometric in _YBR:
        values = rgb_of_ybr(values)
    bounds = _bounds(pixel_format.stored, pixel_format.signed)
    return StoredFrame(values, bounds)


def _bounds(bits: int, signed: bool) -> tuple[int, int]:
    """Return the lowest and the highest whole number of this many bits."""
    if signed:
        half = 1 << (bits - 1)
        return -half, half - 1
    return 0, (1 << bits) - 1


def _stored_values(
    tags: Any,
    cells: Numbers,
    pixel_format: PixelFormat,
) -> Numbers:
    """Return the values of the stored bits, which end at HighBit; other bits of a cell are not part of its value."""
    num_unused = pixel_format.allocated - pixel_format.stored
    if not num_unused:
        return cells
    num_below = pixel_format.high_bit + 1 - pixel_format.stored
    num_above = num_unused - num_below
    lowest, highest = _bounds(pixel_format.stored, pixel_format.signed)
    if num_below:
        _check_bits_below(tags, cells, num_below)
    elif int(cells.max()) <= highest:
        # Cells without a sign are never below the lowest value, which is 0.
        if not pixel_format.signed or int(cells.min()) >= lowest:
            return cells
    _check_padding_cells(tags, cells, pixel_format)
    # Out go the bits above; the shift back extends the sign of signed cells.
    values: Numbers = np.left_shift(cells, num_above)
    np.right_shift(values, num_unused, out=values)
    return values


def _check_bits_below(
    tags: Any,
    cells: Numbers,
    num_below: int,
) -> None:
    """Refuse bits below the stored ones that no overlay declares: HighBit is then likely to be wrong."""
    # OverlayBitPosition of each group of an overlay (PS3.3 C.9.2, as it was until 2004).
    overlay_bits = 0
    for group in range(0x6000, 0x6020, 2):
        tag = (group, 0x0102)
        if tag in tags:
            position = int(tags[tag].value or 0)
            overlay_bits |= 1 << position
    bits_below = (1 << num_below) - 1
    undeclared_bits = bits_below & ~overlay_bits
    if not undeclared_bits:
        return
    undeclared = np.bitwise_and(cells, cells.dtype.type(undeclared_bits))
    if undeclared.any():
        raise contradiction("HighBit", "PixelData")


def _check_padding_cells(
    tags: Any,
    cells: Numbers,
    pixel_format: PixelFormat,
) -> None:
    """Refuse cells of padding whose value needs more bits than are stored: what is left of them is no padding."""
    padding = word_of(tags, "PixelPaddingValue")
    if padding is None or pixel_format.allocated != 16:
        return
    lowest, highest = _bounds(pixel_format.stored, pixel_format.signed)
    cell = int(np.uint16(padding).view(cells.dtype))
    fits = lowest <= cell <= highest
    if not fits and (cells == cells.dtype.type(cell)).any():
        raise contradiction("PixelPaddingValue", "BitsStored")


def rgb_of_ybr(ybr: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return RGB of YBR_FULL, (H, W, 3), by the inverse of the equations of PS3.3 C.7.6.3.1.2."""
    exact = ybr.astype(np.float32)
    luminance = exact[..., 0]
    blueness = exact[..., 1] - 128
    redness = exact[..., 2] - 128
    rgb = np.empty(ybr.shape, np.float32)
    rgb[..., 0] = luminance + 1.402 * redness
    # Green is what the weights 0.299, 0.587 and 0.114 of the luminance leave of it.
    red_and_blue = 0.114 * 1.772 * blueness + 0.299 * 1.402 * redness
    rgb[..., 1] = luminance - red_and_blue / 0.587
    rgb[..., 2] = luminance + 1.772 * blueness
    rounded: NDArray[np.float32] = np.floor(rgb + 0.5)
    return rounded.clip(0, 255).astype(np.uint8)


def _packed_frames(tags: Any, pixel_format: PixelFormat) -> Iterator[StoredFrame]:
    """Yield frames of cells that are run-length encoded, deflated or left as they are, each by itself."""
    if pixel_format.allocated == 1 and pixel_format.syntax == _RLE:
        raise contradiction("BitsAllocated", "TransferSyntaxUID")
    for data in _encapsulated_frames(tags, pixel_format):
        if pixel_format.syntax == _RLE:
            cells = _run_length_cells(data, pixel_format)
        else:
            cells = _cells(_inflated(data, pixel_format), pixel_format)
        yield _frame_of_cells(tags, cells, pixel_format)


def _inflated(data: bytes, pixel_format: PixelFormat) -> bytes:
    """Return the bytes of the cells of one frame, of the length that the tags announce but for a byte of padding."""
    frame_bits = pixel_format.rows * pixel_format.row_bits
    num_bytes = (frame_bits + 7) // 8
    if pixel_format.syntax == _DEFLATED_CELLS:
        # No more is ever unpacked: one byte too many may be padding, a second one shows that the tags are wrong.
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        data = inflater.decompress(data, num_bytes + 2)
    if len(data) < num_bytes:
        raise ImageError(Reason.TRUNCATED, "fewer pixels than rows and columns")
    if len(data) > num_bytes + 1:
        raise contradiction("Rows, Columns", "the length of a frame")
    return data


def _run_length_cells(data: bytes, pixel_format: PixelFormat) -> Numbers:
    """Return the cells of a frame whose bytes are run-length encoded, one segment for each byte of a cell (PS3.5 G)."""
    num_cell_bytes = pixel_format.allocated // 8
    num_segments = pixel_format.samples * num_cell_bytes
    segments = _run_length_segments(data, num_segments)
    shape = (pixel_format.rows, pixel_format.columns)
    # A segment of a row more than there are rows shows that the tags are wrong.
    too_many_bytes = (pixel_format.rows + 1) * pixel_format.columns
    if _has_bytes(segments[0], too_many_bytes):
        raise contradiction("Rows, Columns", "the length of RLE segments")
    planes = []
    for first in range(0, num_segments, num_cell_bytes):
        cells = np.zeros(shape, f"<u{num_cell_bytes}")
        # The most significant byte comes first.
        for segment in segments[first : first + num_cell_bytes]:
            part = _unpacked_bits(segment, shape)
            if num_cell_bytes == 1:
                cells = part
            else:
                np.left_shift(cells, 8, out=cells)
                np.bitwise_or(cells, part, out=cells)
        if pixel_format.signed:
            cells = cells.view(f"<i{num_cell_bytes}")
        planes.append(cells)
    if pixel_format.samples == 1:
        return planes[0]
    return np.stack(planes, -1)


def _run_length_segments(data: bytes, num_segments: int) -> list[bytes]:
    """Return the segments of a frame that has so many."""
    # The header has the number of segments, then the offset of each, as words of 32 bits.
    header = []
    for position in range(0, _RLE_HEADER_BYTES, 4):
        word = data[position : position + 4]
        header.append(int.from_bytes(word, "little"))
    if header[0] != num_segments or num_segments > 15:
        raise ImageError(
            Reason.DAMAGED,
            "BitsAllocated and SamplesPerPixel contradict the number of RLE segments",
        )
    borders = [*header[1 : 1 + num_segments], len(data)]
    if borders[0] < _RLE_HEADER_BYTES or borders != sorted(borders):
        raise ImageError(Reason.DAMAGED, "RLE segments out of order")
    return [data[start:end] for start, end in pairwise(borders)]


def _unpacked_bits(segment: bytes, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the bytes of an RLE segment, which is packed as TIFF's PackBits."""
    from PIL import Image

    # As one long row, since some writers let a run continue into the next row.
    rows, columns = shape
    size = (rows * columns, 1)
    try:
        image = Image.frombytes("L", size, segment, "packbits", "L")
    except ValueError as error:
        raise ImageError(
            Reason.TRUNCATED, "an RLE segment of fewer bytes than there are pixels"
        ) from error
    return np.asarray(image).reshape(shape)


def _has_bytes(segment: bytes, num_bytes: int) -> bool:
    """Whether an RLE segment unpacks to this many bytes, or to more."""
    try:
        _unpacked_bits(segment, (1, num_bytes))
    except ImageError:
        return False
    return True


def _encapsulated_frames(tags: Any, pixel_format: PixelFormat) -> Iterator[bytes]:
    """Yield the bytes of each frame; those of one may be in several fragments (PS3.5 A.4)."""
    fragments, offsets = _fragments(pixel_bytes(tags, pixel_format.keyword))
    lengths: list[int] = []
    extended = value_of(tags, "ExtendedOffsetTable")
    if extended:
        extended_offsets = _integers(extended, 8)
        lengths = _integers(value_of(tags, "ExtendedOffsetTableLengths") or b"", 8)
        tables_differ = bool(offsets) and offsets != extended_offsets
        if len(lengths) != len(extended_offsets) or tables_differ:
            raise contradiction("ExtendedOffsetTable", "ExtendedOffsetTableLengths")
        offsets = extended_offsets
    if offsets:
        first_fragments = _fragments_at(offsets, fragments, pixel_format.num_frames)
    else:
        first_fragments = _first_fragments(fragments, pixel_format)
    borders = [*first_fragments, len(fragments)]
    for number, (first, end) in enumerate(pairwise(borders)):
        frame = b"".join(fragment.content for fragment in fragments[first:end])
        if lengths:
            length = lengths[number]
            # A frame of odd length is padded by a byte, which is not a part of it.
            if not 0 <= len(frame) - length <= 1:
                raise contradiction("ExtendedOffsetTableLengths", "PixelData")
            frame = frame[:length]
        yield frame


@dataclass(frozen=True)
class _Fragment:
    """A part of the encapsulated pixels.

    Attributes:
        offset: the offset of its item, in bytes from the item of the first fragment.
        content: without the head of the item.
    """

    offset: int
    content: bytes


def _integers(data: bytes, num_bytes: int) -> list[int]:
    """Return whole numbers of this many bytes each, in little endian."""
    num_integers = len(data) // num_bytes
    integers: list[int] = np.frombuffer(data, f"<u{num_bytes}", num_integers).tolist()
    return integers


def _fragments(data: Any) -> tuple[list[_Fragment], list[int]]:
    """Return the fragments, and the basic offset table."""
    items: list[_Fragment] = []
    position = 0
    while position + 8 <= len(data):
        start = position + 8
        tag = bytes(data[position : position + 4])
        length = int.from_bytes(data[position + 4 : start], "little")
        if tag == _SEQUENCE_END:
            break
        if tag != _ITEM:
            raise ImageError(
                Reason.DAMAGED, "PixelData without fragments, which TransferSyntaxUID requires"
            )
        content = bytes(data[start : start + length])
        if len(content) < length:
            raise ImageError(Reason.TRUNCATED, "a fragment that ends too early")
        items.append(_Fragment(position, content))
        position = start + length
    if len(items) < 2:
        raise ImageError(Reason.TRUNCATED, "no pixels")
    table, *fragments = items
    # The table counts from the first fragment, which follows the table itself (PS3.5 A.4).
    origin = fragments[0].offset
    moved = [replace(fragment, offset=fragment.offset - origin) for fragment in fragments]
    return moved, _integers(table.content, 4)


def _fragments_at(
    offsets: list[int],
    fragments: list[_Fragment],
    num_frames: int,
) -> list[int]:
    """Return the numbers of the fragments at which frames begin, by a table of their offsets."""
    if len(offsets) != num_frames:
        raise contradiction("NumberOfFrames", "the table of offsets")
    starts = [fragment.offset for fragment in fragments]
    ascends_from_0 = offsets[0] == 0 and offsets == sorted(set(offsets))
    if not ascends_from_0 or not set(offsets) <= set(starts):
        raise ImageError(
            Reason.DAMAGED, "the table of offsets contradicts the fragments of PixelData"
        )
    return [starts.index(offset) for offset in offsets]


def _first_fragments(fragments: list[_Fragment], pixel_format: PixelFormat) -> list[int]:
    """Return where frames begin if no table says it: at each code stream, or at each fragment."""
    num_frames = pixel_format.num_frames
    if pixel_format.has_code_streams:
        starts = []
        for number, fragment in enumerate(fragments):
            if fragment.content.startswith(_STARTS):
                starts.append(number)
        if len(starts) != num_frames or starts[0] != 0:
            raise contradiction("NumberOfFrames", "the code streams of PixelData")
        return starts
    if num_frames == 1 and pixel_format.syntax != _RLE:
        return [0]
    if len(fragments) != num_frames:
        raise contradiction("NumberOfFrames", "the fragments of PixelData")
    return list(range(num_frames))


def _code_stream_frames(tags: Any, pixel_format: PixelFormat) -> Iterator[StoredFrame]:
    for data in _encapsulated_frames(tags, pixel_format):
        code_stream = code_stream_of(data)
        if code_stream.shape != (pixel_format.rows, pixel_format.columns):
            raise contradiction("Rows, Columns", "the code stream")
        if code_stream.components != pixel_format.samples:
            raise contradiction("SamplesPerPixel", "the code stream")
        is_dct = code_stream.kind == "DCT"
        has_colours = code_stream.components == 3
        is_ybr = has_colours and _is_ybr(code_stream, pixel_format)
        if is_ybr and code_stream.bits != 8:
            raise ImageError(
                Reason.UNSUPPORTED, "PhotometricInterpretation YBR of other than 8 bits"
            )
        if pixel_format.photometric == "PALETTE COLOR" and is_dct:
            raise contradiction("PhotometricInterpretation", "the code stream, which is lossy,")
        is_signed = pixel_format.signed or code_stream.signed
        if has_colours and is_signed:
            raise contradiction("PixelRepresentation", "PhotometricInterpretation")
        samples = decoded(code_stream, as_ybr=is_ybr)
        if is_ybr and not is_dct:
            # libjpeg turns colours itself; the decoders of the other kinds do not.
            ybr = samples.astype(np.uint8, copy=False)
            samples = rgb_of_ybr(ybr)
        yield _frame_of_samples(samples, code_stream, pixel_format)


def _is_ybr(code_stream: CodeStream, pixel_format: PixelFormat) -> bool:
    """Whether the components that the decoder puts out are luminance and chrominance.

    The code stream decides where it says something. Without that, PhotometricInterpretation does.
    """
    says_ybr = pixel_format.photometric in _YBR
    if code_stream.kind == "DCT":
        if code_stream.colours != "unknown":
            return code_stream.colours == "YBR"
    elif code_stream.transformed:
        # The decoder returns what the encoder was given, which then must have been RGB.
        if says_ybr:
            raise contradiction("PhotometricInterpretation", "the code stream")
        return False
    elif code_stream.colours != "unknown" and (code_stream.colours == "YBR") != says_ybr:
        # A header of these kinds repeats what DICOM says: neither a decoder nor we can know which of the two is right.
        raise contradiction("PhotometricInterpretation", "the code stream")
    if pixel_format.photometric in ("YBR_RCT", "YBR_ICT"):
        raise contradiction("PhotometricInterpretation", "the code stream")
    return says_ybr


def _frame_of_samples(
    samples: Values,
    code_stream: CodeStream,
    pixel_format: PixelFormat,
) -> StoredFrame:
    """Return the stored values of a decoded code stream.

    Its precision may be larger than BitsStored, such as 16 for values of 12 bits, and JPEG and JPEG-LS hold signed
    values as two's complement without saying so. Whatever would read differently by the tags and by the code stream
    is refused.
    """
    stored = pixel_format.stored or code_stream.bits
    bits = min(stored, code_stream.bits)
    lowest, highest = _bounds(bits, pixel_format.signed)
    values: Numbers = samples
    has_signs = pixel_format.signed or code_stream.signed
    if not has_signs and code_stream.bits <= stored:
        return StoredFrame(values, (lowest, highest))
    if pixel_format.signed and not code_stream.signed and code_stream.kind != "JPEG 2000":
        values = _with_sign(values, code_stream, stored)
    elif pixel_format.signed != code_stream.signed:
        # JPEG 2000 says whether values are signed. As long as none has its highest bit set, both readings agree.
        half = 1 << (code_stream.bits - 1)
        if int(values.min()) < 0 or int(values.max()) >= half:
            raise contradiction("PixelRepresentation", "the code stream")
    smallest = int(values.min())
    largest = int(values.max())
    if smallest < lowest or largest > highest:
        is_lossless = _last_number(pixel_format.syntax) in _LOSSLESS_NUMBERS
        slack = 0.0
        if not is_lossless:
            slack = _OVERSHOOT * (highest - lowest)
        if smallest < lowest - slack or largest > highest + slack:
            raise contradiction("BitsStored", "the code stream")
        values = values.clip(lowest, highest)
    kind = _integer_type(samples.dtype.itemsize, pixel_format.signed)
    values = values.astype(kind, copy=False)
    return StoredFrame(values, (lowest, highest))


def _with_sign(
    values: Numbers,
    code_stream: CodeStream,
    stored: int,
) -> Numbers:
    """Return two's complement of this many stored bits as signed numbers."""
    if stored > code_stream.bits:
        half = 1 << (code_stream.bits - 1)
        if int(values.max()) >= half:
            raise contradiction("BitsStored", "the code stream")
        return values
    wide = values.astype(np.int32)
    num_unused = 32 - stored
    shifted = np.left_shift(wide, num_unused)
    # The shift back extends the sign.
    signed: Numbers = np.right_shift(shifted, num_unused)
    # Bits above the stored ones are zero, or repeat the sign; anything else is not a value of this many bits.
    above = wide >> stored
    num_above = code_stream.bits - stored
    all_ones = (1 << num_above) - 1
    repeats_sign = (above == all_ones) & (signed < 0)
    is_value = (above == 0) | repeats_sign
    if not is_value.all():
        raise contradiction("BitsStored", "the code stream")
    return signed
