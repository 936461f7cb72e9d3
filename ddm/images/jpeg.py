"""JPEG: markers are checked here, libjpeg decodes baseline, extended and progressive images of 8 bits through Pillow.

libjpeg fills gaps with grey and continues, and Pillow does not report it: gaps that the markers reveal are refused.
Pillow gets a file without metadata, so that none can change the pixels or ask for memory.
"""

# Shape legend: C channels, H height, W width.
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from math import ceil

import numpy as np

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.pillow import opened
from ddm.images.raster import BYTE_RANGE, Metadata, picture_of, rgb_of_inks, spacing_of
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Numbers, Spacing

# Markers: ITU-T T.81, table B.1.
_EOI = 0xD9
_SOS = 0xDA
_DNL = 0xDC
_DRI = 0xDD
_APP0 = 0xE0
_APP1 = 0xE1
_APP2 = 0xE2
_APP13 = 0xED
_APP14 = 0xEE
_COM = 0xFE
_FRAMES = {0xC0, 0xC1, 0xC2}  # sequential and progressive, Huffman
_OTHER_FRAMES = {
    **dict.fromkeys((0xC3, 0xC7, 0xCB, 0xCF), "SOF: lossless JPEG"),
    **dict.fromkeys((0xC5, 0xC6, 0xCD, 0xCE, 0xDE), "SOF: hierarchical JPEG"),
    **dict.fromkeys((0xC9, 0xCA), "SOF: JPEG with arithmetic coding"),
    0xF7: "SOF: JPEG-LS",
}
_TABLES_AND_PIXELS = {0xC4, 0xDB, _DRI, _APP0, _APP14, *_FRAMES}  # what Pillow gets
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff([\xd0-\xd7])")
_UNITS_MM = {1: 25.4, 2: 10.0}  # JFIF: pixels in an inch, in a centimetre


@dataclass
class Markers:
    """What the markers of one JPEG image say.

    Attributes:
        pixels: the file without metadata.
        height: the height of the image.
        width: the width of the image.
        sampling: horizontal and vertical sampling factor of each component, by its number.
        adobe: whether there is a marker of Adobe's, by which four colours are inverted.
        jfif: content of the marker of JFIF, or nothing.
        metadata: what the metadata declares.
    """

    pixels: bytes = b""
    height: int = 0
    width: int = 0
    sampling: dict[int, tuple[int, int]] = field(default_factory=dict)
    adobe: bool = False
    jfif: bytes = b""
    metadata: Metadata = field(default_factory=Metadata)
    restart_interval: int = 0
    num_scans: int = 0

    @property
    def num_channels(self) -> int:
        """How many colours a pixel has."""
        return len(self.sampling)


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture]:
    """Yield the image of one file.

    Args:
        content: the file.
        kind: JPEG.
        limits: the most that it may ask for.

    Raises:
        ImageError: pixels that cannot be decoded, with the true reason.
    """
    with content.open() as stream:
        markers = parse(stream.read())
    limits.check(markers.height, markers.width, markers.num_channels)
    values = decoded(markers)
    if markers.num_channels == 4:
        values = _rgb_of_four(values, markers)
    yield picture_of(
        values,
        kind,
        full=BYTE_RANGE,
        orientation=markers.metadata.orientation,
        spacing=_spacing(markers.jfif),
        flags=markers.metadata.flags(colours=markers.num_channels > 1),
    )


def decoded(markers: Markers, colour_space: str | None = None) -> Numbers:
    """Return the pixels, shape (H, W, C): greys, RGB, or four colours as Pillow inverts them.

    Args:
        markers: the markers of the image.
        colour_space: in which the file has its colours, `RGB` or `YCbCr`; None to decide by its markers, as T.871 and
            Adobe's technical note 5116 say.
    """
    try:
        with opened(BytesIO(markers.pixels), "JPEG") as image:
            if colour_space is not None:
                # Pillow passes the second word on to libjpeg, which otherwise decides by the markers.
                tile = image.tile[0]
                image.tile = [tile._replace(args=(image.mode, colour_space))]
            values: Numbers = np.asarray(image)
    except (OSError, SyntaxError) as error:
        if "truncated" in str(error):
            raise ImageError(Reason.TRUNCATED, "scan") from error
        raise ImageError(Reason.DAMAGED, "scan") from error
    return values.reshape(markers.height, markers.width, markers.num_channels)


def parse(data: bytes) -> Markers:
    """Read the markers of an image up to its end (EOI); further images may follow in the file.

    Raises:
        ImageError: damaged, truncated, or a process of coding that is not decoded here.
    """
    markers = Markers()
    parts = [b"\xff\xd8"]
    position = 2
    while True:
        marker, position = _next_marker(data, position)
        if marker == _EOI:
            break
        if marker in _OTHER_FRAMES:
            raise ImageError(Reason.UNSUPPORTED, _OTHER_FRAMES[marker])
        if marker == _DNL:
            raise ImageError(Reason.UNSUPPORTED, "DNL: a height that follows the pixels")
        end = position + int.from_bytes(data[position : position + 2])
        if end > len(data):
            raise ImageError(Reason.TRUNCATED, "markers")
        if end < position + 2:
            raise ImageError(Reason.DAMAGED, "markers")
        segment = data[position + 2 : end]
        _note(markers, marker, segment)
        if marker == _SOS:
            scan_end = _end_of_scan(data, end)
            scan = data[end:scan_end]
            _check_restarts(markers, segment, scan)
            # With the two bytes of the marker.
            parts.append(data[position - 2 : scan_end])
            position = scan_end
        else:
            if marker in _TABLES_AND_PIXELS:
                parts.append(data[position - 2 : end])
            position = end
    if not markers.sampling or not markers.num_scans:
        raise ImageError(Reason.NO_PIXELS, "neither SOF nor SOS")
    markers.pixels = b"".join((*parts, b"\xff\xd9"))
    return markers


def _next_marker(data: bytes, position: int) -> tuple[int, int]:
    """Return the marker at a position, which fill bytes may precede, and where its segment begins."""
    if data[position : position + 1] not in (b"\xff", b""):
        raise ImageError(Reason.DAMAGED, "markers")
    while data[position : position + 1] == b"\xff":
        position += 1
    if position >= len(data):
        raise ImageError(Reason.TRUNCATED, "no EOI")
    return data[position], position + 1


def _note(
    markers: Markers,
    marker: int,
    segment: bytes,
) -> None:
    metadata = markers.metadata
    if marker in _FRAMES:
        _note_frame(markers, segment)
    elif marker == _SOS:
        markers.num_scans += 1
        if not markers.sampling:
            raise ImageError(Reason.DAMAGED, "SOS before SOF")
    elif marker == _DRI:
        markers.restart_interval = int.from_bytes(segment[:2])
    elif marker == _APP0:
        if segment.startswith(b"JFIF\0"):
            markers.jfif = segment
            # Width and height of a thumbnail; 0 where there is none.
            thumbnail_size = segment[12:14]
            if any(thumbnail_size):
                metadata.add_thumbnail()
        elif segment.startswith(b"JFXX\0"):
            metadata.add_thumbnail()
    elif marker == _APP1 and segment.startswith(b"Exif\0"):
        metadata.add_exif(segment[6:])
    elif marker == _APP2 and segment.startswith(b"MPF\0"):
        metadata.add_thumbnail()  # further pictures follow (CIPA DC-007), often smaller copies of this one
    elif marker == _APP13:
        metadata.add_photoshop(segment)
    elif marker == _APP14 and segment.startswith(b"Adobe"):
        markers.adobe = True
    if marker in (_APP1, _COM):
        metadata.add_text(segment)


def _note_frame(markers: Markers, segment: bytes) -> None:
    if markers.sampling:
        raise ImageError(Reason.DAMAGED, "SOF twice")
    # T.81, B.2.2: precision, height, width, number of components, then three bytes for each of these.
    if len(segment) < 6:
        raise ImageError(Reason.DAMAGED, "SOF")
    precision = segment[0]
    num_components = segment[5]
    if len(segment) != 6 + 3 * num_components:
        raise ImageError(Reason.DAMAGED, "SOF")
    if precision != 8:
        raise ImageError(Reason.UNSUPPORTED, "SOF: a precision other than 8 bits")
    if num_components not in (1, 3, 4):
        raise ImageError(
            Reason.UNSUPPORTED, "SOF: another number of components than one, three or four"
        )
    markers.height = int.from_bytes(segment[1:3])
    markers.width = int.from_bytes(segment[3:5])
    for number, factors in zip(segment[6::3], segment[7::3], strict=True):
        across = factors >> 4
        down = factors & 15
        if across == 0 or down == 0:
            raise ImageError(Reason.DAMAGED, "SOF: components")
        markers.sampling[number] = (across, down)
    # Two components of one number would be one here.
    if len(markers.sampling) != num_components:
        raise ImageError(Reason.DAMAGED, "SOF: components")


def _end_of_scan(data: bytes, start: int) -> int:
    """Return where the next marker is that is neither a restart nor a stuffed byte."""
    match = _AFTER_SCAN.search(data, start)
    if match is None:
        raise ImageError(Reason.TRUNCATED, "no EOI")
    return match.start()


def _check_restarts(
    markers: Markers,
    scan_header: bytes,
    scan: bytes,
) -> None:
    """Refuse a scan whose restart markers are not all there: libjpeg would guess what belongs where."""
    restarts = _RESTART.findall(scan)
    if not markers.restart_interval:
        if restarts:
            raise ImageError(Reason.DAMAGED, "restart markers without an interval (DRI)")
        return
    num_units = _num_coded_units(markers, scan_header)
    num_intervals = ceil(num_units / markers.restart_interval)
    # There is one between two intervals.
    if len(restarts) != num_intervals - 1:
        raise ImageError(Reason.DAMAGED, "number of restart markers")
    for number, restart in enumerate(restarts):
        # Restart markers count modulo 8 (T.81, table B.1): another order means that data are missing.
        next_restart = 0xD0 + number % 8
        if restart[0] != next_restart:
            raise ImageError(Reason.DAMAGED, "order of restart markers")


def _num_coded_units(markers: Markers, scan_header: bytes) -> int:
    """Return the number of coded units (MCU) of a scan: T.81, A.2."""
    if not scan_header:
        raise ImageError(Reason.DAMAGED, "SOS")
    # The number of components, then two bytes for each: its number, and its tables.
    components_end = 1 + 2 * scan_header[0]
    if len(scan_header) < components_end:
        raise ImageError(Reason.DAMAGED, "SOS")
    components = scan_header[1:components_end:2]
    if not components or not set(components) <= set(markers.sampling):
        raise ImageError(Reason.DAMAGED, "SOS: components")
    max_across = max(across for across, _ in markers.sampling.values())
    max_down = max(down for _, down in markers.sampling.values())
    if len(components) > 1:
        # Interleaved: a unit has blocks of 8 x 8 samples of every component.
        units_across = ceil(markers.width / (8 * max_across))
        units_down = ceil(markers.height / (8 * max_down))
    else:
        # A single component: a unit is one of its blocks.
        across, down = markers.sampling[components[0]]
        samples_across = ceil(markers.width * across / max_across)
        samples_down = ceil(markers.height * down / max_down)
        units_across = ceil(samples_across / 8)
        units_down = ceil(samples_down / 8)
    return units_across * units_down


def _rgb_of_four(values: Numbers, markers: Markers) -> Numbers:
    """Return RGB of CMYK or YCCK, which libjpeg turned into CMYK."""
    if not markers.adobe:
        raise ImageError(
            Reason.UNSUPPORTED, "four colours without Adobe's marker (APP14): ink or its inverse"
        )
    # Pillow has turned Adobe's inverted values into ink.
    return rgb_of_inks(values, 255)


def _spacing(jfif: bytes) -> Spacing | None:
    if len(jfif) < 12:
        return None
    per_column = int.from_bytes(jfif[8:10])
    per_row = int.from_bytes(jfif[10:12])
    return spacing_of(per_row, per_column, _UNITS_MM.get(jfif[7]))
