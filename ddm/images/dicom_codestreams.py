"""Compressed frames of DICOM: JPEG, JPEG-LS and JPEG 2000, whose own header decides what their values are.

The header of a code stream holds its size, its number of components, their bits and sign, and often how colours were
transformed. DICOM's tags repeat some of that. Decoders differ in which of the two they obey, so that this module reads
the header itself and gives each decoder exact instructions. See PS3.5 8.2 and A.4.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np

from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Values

Colours = Literal["RGB", "YBR", "unknown"]

_JPEG_START = b"\xff\xd8"
_JPEG_2000_START = b"\xff\x4f\xff\x51"
_JP2_START = b"\0\0\0\x0cjP  \r\n\x87\n"
_END = b"\xff\xd9"  # of all three kinds of code stream
_SYCC = 18  # enumerated colour space of JP2: YCbCr
# Start of frame: baseline, extended, progressive (ISO/IEC 10918-1 table B.1).
_DCT = (
    0xC0,
    0xC1,
    0xC2,
)
_LOSSLESS = 0xC3
_JPEG_LS = 0xF7
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), _JPEG_LS)
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
_SCAN = 0xDA


@dataclass(frozen=True)
class CodeStream:
    """What the header of a code stream says.

    Attributes:
        kind: the family of decoders that reads it.
        data: from its first marker.
        shape: rows and columns.
        components: number of samples per pixel.
        bits: the bits of each sample.
        signed: whether the code stream says that samples are signed; JPEG and JPEG-LS have no way to say it.
        colours: what the header says about three components. The decoders of this module undo the transform of
            JPEG 2000 and that of JPEG's DCT processes, so that "RGB" is what comes out.
        transformed: whether JPEG 2000's own colour transform was used (RCT or ICT).
    """

    kind: Literal["DCT", "lossless JPEG", "JPEG-LS", "JPEG 2000"]
    data: bytes
    shape: tuple[int, int]
    components: int
    bits: int
    signed: bool = False
    colours: Colours = "unknown"
    transformed: bool = False


def code_stream_of(data: bytes) -> CodeStream:
    """Return what the header of a code stream says.

    Raises:
        ImageError: no code stream of these kinds, one that ends too early, or one that nothing here decodes.
    """
    if data.startswith(_JP2_START):
        code_stream = _jpeg_2000(*_unboxed(data))
    elif data.startswith(_JPEG_2000_START):
        code_stream = _jpeg_2000(data, is_ycc=False)
    elif data.startswith(_JPEG_START):
        code_stream = _jpeg(data)
    else:
        raise ImageError(Reason.DAMAGED, "no code stream that belongs to TransferSyntaxUID")
    return code_stream


def decoded(code_stream: CodeStream, *, as_ybr: bool) -> Values:
    """Return the samples of a code stream: (H, W), or (H, W, C) where it has several components.

    Args:
        code_stream: with one or three components.
        as_ybr: whether the three components of a DCT process are luminance and chrominance, which become RGB; not
            used for the others.

    Raises:
        ImageError: a code stream that its decoder does not read.
    """
    match code_stream.kind:
        case "DCT" if code_stream.bits == 8:
            samples = _by_pillow(code_stream, as_ybr=as_ybr)
        case "DCT" | "lossless JPEG":
            samples = _by_gdcm(code_stream)
        case "JPEG-LS":
            samples = _by_charls(code_stream)
        case "JPEG 2000":
            samples = _by_openjpeg(code_stream)
    return samples


def _segments(data: bytes) -> Any:
    """Yield marker and content of each segment of a JPEG header, up to that of its first scan."""
    position = 2
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            raise ImageError(Reason.DAMAGED, "a code stream without its markers")
        marker = data[position + 1]
        if marker == 0xFF:  # any marker may be preceded by fill bytes
            position += 1
            continue
        if marker in _WITHOUT_LENGTH:
            position += 2
            continue
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, data[position + 4 : position + 2 + length]
        position += 2 + length
        if marker == _SCAN:
            # The end of image cannot occur within entropy-coded data, which escapes every 0xFF.
            if data.find(_END, position) < 0:
                break
            return
    raise ImageError(Reason.TRUNCATED, "a code stream that ends too early")


def _jpeg(data: bytes) -> CodeStream:
    frame = b""
    process = 0
    adobe_transform: int | None = None
    has_jfif = False
    for marker, content in _segments(data):
        if marker in _FRAMES and not frame:
            process = marker
            frame = content
        elif marker == 0xE0 and content.startswith(b"JFIF\0"):
            has_jfif = True
        elif marker == 0xEE and content.startswith(b"Adobe") and len(content) >= 12:
            # 0 for RGB, 1 for YCbCr, 2 for YCCK (Adobe's technical note 5116).
            adobe_transform = content[11]
    if len(frame) < 6 or len(frame) < 6 + 3 * frame[5]:
        raise ImageError(Reason.DAMAGED, "a code stream without the start of its frame")
    # T.81, B.2.2: precision, height, width, number of components.
    bits = frame[0]
    height = int.from_bytes(frame[1:3], "big")
    width = int.from_bytes(frame[3:5], "big")
    shape = (height, width)
    components = frame[5]
    identifiers = bytes(frame[6 : 6 + 3 * components : 3])
    sampling = set(frame[7 : 6 + 3 * components : 3])
    if process == _JPEG_LS:
        return CodeStream("JPEG-LS", data, shape, components, bits)
    colours: Colours = "unknown"
    if adobe_transform is not None:
        colours = "YBR"
        if adobe_transform == 0:
            colours = "RGB"
    elif identifiers == b"RGB":
        colours = "RGB"
    elif process in _DCT and (has_jfif or len(sampling) > 1):
        # JFIF allows no other colours, and no encoder subsamples the green and the blue of an image.
        colours = "YBR"
    if process in _DCT:
        if bits not in (8, 12):
            # Some versions of GDCM state 16, and shift the levels as of 12 or of 16: the two cannot be distinguished.
            raise ImageError(
                Reason.UNSUPPORTED, "a code stream of a precision that lossy JPEG does not have"
            )
        return CodeStream("DCT", data, shape, components, bits, colours=colours)
    if process == _LOSSLESS:
        return CodeStream("lossless JPEG", data, shape, components, bits, colours=colours)
    raise ImageError(Reason.UNSUPPORTED, "a process of JPEG that is not supported")


def _unboxed(data: bytes) -> tuple[bytes, bool]:
    """Return the code stream of a JP2 file, and whether the file says that its colours are YCbCr."""
    is_ycc = False
    spans = [(0, len(data))]
    while spans:
        position, end = spans.pop()
        while position + 8 <= end:
            length = int.from_bytes(data[position : position + 4], "big")
            kind = data[position + 4 : position + 8]
            start = position + 8
            if length == 1:
                # The length is too large for 32 bits, and follows in 64.
                length = int.from_bytes(data[position + 8 : position + 16], "big")
                start = position + 16
            if length == 0:
                # The last box continues to the end.
                length = end - position
            box_end = position + length
            if kind == b"jp2c":
                return data[start:box_end], is_ycc
            if kind == b"jp2h":
                # The boxes in this one first, then those behind it.
                spans.append((box_end, end))
                position = start
                end = box_end
                continue
            if kind == b"colr" and data[start : start + 1] == b"\1":
                colour_space = int.from_bytes(data[start + 3 : start + 7], "big")
                is_ycc = is_ycc or colour_space == _SYCC
            # At least the header of a box, or a damaged length would keep this loop in place.
            position += max(length, 8)
    raise ImageError(Reason.DAMAGED, "a JP2 file without a code stream")


def _jpeg_2000(data: bytes, is_ycc: bool) -> CodeStream:
    """Read SIZ and COD (ISO/IEC 15444-1 A.5.1 and A.6.1)."""
    size_length = int.from_bytes(data[4:6], "big")
    header = data[4 : 4 + size_length]
    if len(header) < 38:
        raise ImageError(Reason.TRUNCATED, "a code stream that ends too early")
    right = int.from_bytes(header[4:8], "big")
    bottom = int.from_bytes(header[8:12], "big")
    left = int.from_bytes(header[12:16], "big")
    top = int.from_bytes(header[16:20], "big")
    components = int.from_bytes(header[36:38], "big")
    # Of each component its depth and how it is subsampled across and down; 1 and 1 for a component of full size.
    descriptions_end = 38 + 3 * components
    if not components or len(header) < descriptions_end:
        raise ImageError(Reason.DAMAGED, "a code stream that describes too few components")
    first = header[38:41]
    if header[38:descriptions_end] != first * components or first[1:] != b"\1\1":
        raise ImageError(Reason.UNSUPPORTED, "a code stream whose components differ")
    depth = first[0]
    if data.rfind(_END) < 0:
        raise ImageError(Reason.TRUNCATED, "a code stream that ends too early")
    transformed = _has_colour_transform(data, 4 + size_length)
    colours: Colours = "unknown"
    if transformed:
        colours = "RGB"
    elif is_ycc:
        colours = "YBR"
    return CodeStream(
        "JPEG 2000",
        data,
        (bottom - top, right - left),
        components,
        bits=(depth & 0x7F) + 1,
        signed=depth >= 0x80,
        colours=colours,
        transformed=transformed,
    )


def _has_colour_transform(data: bytes, position: int) -> bool:
    """Whether the coding style of a JPEG 2000 code stream has the transform of multiple components."""
    while position + 4 <= len(data):
        marker = data[position : position + 2]
        if marker == b"\xff\x52":
            # Lcod, Scod, progression, layers (2 bytes), transform
            return data[position + 8] == 1
        if marker == b"\xff\x90":  # the first tile: the main header is over
            break
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    raise ImageError(Reason.DAMAGED, "a code stream without its coding style")


def _by_pillow(code_stream: CodeStream, *, as_ybr: bool) -> Values:
    from PIL import Image

    image = Image.open(BytesIO(code_stream.data), formats=("JPEG",))
    if code_stream.components == 3:
        # Left to itself, libjpeg guesses the colours from markers and identifiers; "RGB" here is what comes out, and
        # the second word what the components are.
        stored_colours = "RGB"
        if as_ybr:
            stored_colours = "YCbCr"
        tile = image.tile[0]
        image.tile = [tile._replace(args=("RGB", stored_colours))]
    return np.asarray(image)


def _by_gdcm(code_stream: CodeStream) -> Values:
    """Decode by GDCM, which is given what the code stream says about itself, so that it has nothing to reconcile."""
    import gdcm

    rows, columns = code_stream.shape
    fragment = gdcm.Fragment()
    fragment.SetByteStringValue(code_stream.data)
    fragments = gdcm.SequenceOfFragments.New()
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((columns, rows, 1))
    image.SetDataElement(element)
    colours = gdcm.PhotometricInterpretation.MONOCHROME2
    if code_stream.components == 3:
        colours = gdcm.PhotometricInterpretation.RGB
        image.SetPlanarConfiguration(0)
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(colours))
    syntax = gdcm.TransferSyntax.JPEGExtendedProcess2_4
    if code_stream.kind == "lossless JPEG":
        syntax = gdcm.TransferSyntax.JPEGLosslessProcess14
    image.SetTransferSyntax(gdcm.TransferSyntax(syntax))
    allocated = 16
    if code_stream.bits <= 8:
        allocated = 8
    image.SetPixelFormat(
        gdcm.PixelFormat(
            code_stream.components,
            allocated,
            code_stream.bits,
            code_stream.bits - 1,
            0,
        )
    )
    # GDCM returns bytes as a text whose characters stand for them.
    buffer = image.GetBuffer().encode("utf-8", "surrogateescape")
    return _shaped(np.frombuffer(buffer, f"<u{allocated // 8}"), code_stream)


def _by_charls(code_stream: CodeStream) -> Values:
    import jpeg_ls

    buffer, header = jpeg_ls.decode_pixel_data(code_stream.data)
    kind = "<u2"
    if code_stream.bits <= 8:
        kind = "<u1"
    samples = np.frombuffer(buffer, kind)
    # In mode 0 each component has a scan of its own, so that whole planes follow one another.
    is_by_plane = code_stream.components > 1 and header["interleave_mode"] == 0
    if is_by_plane:
        planes = samples.reshape(code_stream.components, *code_stream.shape)
        return np.moveaxis(planes, 0, -1)
    return _shaped(samples, code_stream)


def _by_openjpeg(code_stream: CodeStream) -> Values:
    from openjpeg.utils import decode_pixel_data

    buffer: Any = decode_pixel_data(code_stream.data, version=2)
    num_bytes = 1
    while 8 * num_bytes < code_stream.bits:
        num_bytes *= 2
    sign = "u"
    if code_stream.signed:
        sign = "i"
    samples = np.frombuffer(buffer, f"<{sign}{num_bytes}")
    return _shaped(samples, code_stream)


def _shaped(samples: Values, code_stream: CodeStream) -> Values:
    if samples.size != code_stream.components * code_stream.shape[0] * code_stream.shape[1]:
        raise ImageError(
            Reason.DAMAGED, "a code stream with another number of samples than its header states"
        )
    if code_stream.components == 1:
        return samples.reshape(code_stream.shape)
    return samples.reshape(*code_stream.shape, code_stream.components)
