"""What the formats of flat images share: turns, transparency, the shape of pixels, and flags from metadata."""

# Shape legend: C channels, H height, W width.
import re
import struct
import warnings
from contextlib import suppress

import numpy as np
from PIL import ExifTags, Image

from ddm.images.picture import DecodedPicture, Picture, supported
from ddm.images.reasons import Flag, ImageError, Reason
from ddm.images.types import Bounds, Numbers, Spacing, Values

BYTE_RANGE = (0.0, 255.0)
WORD_RANGE = (0.0, 65535.0)
UPRIGHT = 1  # the orientation of an image that needs no turn
_SCREENS = {  # width and height of common screens; of telephones upright
    *(
        (1024, 768),
        (1280, 720),
        (1280, 800),
        (1280, 1024),
        (1366, 768),
        (1440, 900),
        (1536, 864),
        (1600, 900),
    ),
    *(
        (1680, 1050),
        (1920, 1080),
        (1920, 1200),
        (2560, 1440),
        (2560, 1600),
        (2880, 1800),
        (3440, 1440),
        (3840, 2160),
    ),
    *(
        (750, 1334),
        (828, 1792),
        (1080, 1920),
        (1080, 2340),
        (1080, 2400),
        (1125, 2436),
        (1170, 2532),
        (1179, 2556),
    ),
    *((1284, 2778), (1290, 2796), (1440, 3200), (1536, 2048), (1620, 2160), (2048, 2732)),
}
_PHOTOSHOP_THUMBNAIL = re.compile(rb"8BIM\x04[\x09\x0c]")  # image resources 1033 and 1036
_XMP_THUMBNAIL = b"xmpGImg"


def picture_of(
    values: Values,
    kind: str,
    *,
    full: Bounds | None,
    orientation: int = UPRIGHT,
    spacing: Spacing | None = None,
    flags: frozenset[Flag] = frozenset(),
) -> DecodedPicture:
    """Return an image as it is on a screen.

    Args:
        values: shape (H, W) or (H, W, C), as the file stores them.
        kind: the format.
        full: bounds of the file's type.
        orientation: how to turn it, as tag 274 of TIFF counts.
        spacing: between rows and between columns, before the turn.
        flags: what the file declares.
    """
    if values.ndim == 2:
        channels_first = values[None]
    else:
        channels_first = np.moveaxis(values, -1, 0)
    turned = upright(channels_first, orientation)
    if spacing is not None and swaps_sides(orientation):
        spacing = (spacing[1], spacing[0])
    height, width = turned.shape[1:]
    if turned.shape[0] == 3 and (width, height) in _SCREENS:
        flags = flags | {Flag.SCREENSHOT}
    # Such files state how large an image is in print or on a screen, which says nothing about lengths in the body.
    picture = Picture(supported(turned), spacing, full=full, spacing_in_mm=spacing is None)
    return DecodedPicture.of(picture, flags, kind)


def upright(values: Values, orientation: int) -> Values:
    """Turn an image, shape (C, H, W), so that its visual top is the first row and its visual left the first column.

    Tag 274 of TIFF 6.0 and EXIF says where the first row and the first column of the file are: 2 top, right; 3 bottom,
    right; 4 bottom, left; 5 left, top; 6 right, top; 7 right, bottom; 8 left, bottom. Any other number counts as 1.
    """
    match orientation:
        case 2:
            return values[:, :, ::-1]
        case 3:
            return values[:, ::-1, ::-1]
        case 4:
            return values[:, ::-1]
        case 5:
            return values.swapaxes(1, 2)
        case 6:
            return values.swapaxes(1, 2)[:, :, ::-1]
        case 7:
            return values.swapaxes(1, 2)[:, ::-1, ::-1]
        case 8:
            return values.swapaxes(1, 2)[:, ::-1]
        case _:
            return values


def swaps_sides(orientation: int) -> bool:
    """Whether rows become columns."""
    return orientation in (5, 6, 7, 8)


def over_black(
    colours: Numbers,
    alpha: Numbers,
    top: int,
) -> Numbers:
    """Lay colours over black, rounded to the nearest: what is transparent becomes invisible.

    Args:
        colours: shape (H, W, C), not multiplied by alpha.
        alpha: shape (H, W), from 0 to `top`.
        top: white, and full opacity; below 2^16.
    """
    product = colours.astype(np.uint32)
    product *= alpha[..., None]
    product += top // 2  # below 2^32, since colour and alpha are below 2^16
    product //= top
    return product.astype(colours.dtype)


def rgb_of_inks(inks: Numbers, top: int) -> Numbers:
    """Return RGB of cyan, magenta, yellow and black, shape (H, W, 4), where 0 is no ink: the formula without a profile.

    Red is (1 - cyan) (1 - black), and so on: PostScript Language Reference, 7.2.4 in its multiplicative form, as
    programs without colour management show such images.
    """
    light = top - inks.astype(np.uint32)
    # Black ink dims the other three, as transparency over black does.
    colours = light[..., :3]
    lightness = light[..., 3]
    return over_black(colours, lightness, top).astype(inks.dtype)


def spacing_of(
    per_row: float,
    per_column: float,
    unit_mm: float | None,
) -> Bounds | None:
    """Return the spacing of pixels that are not square; None for square ones, whose resolution is that of a screen.

    Args:
        per_row: pixels in a unit of length downwards.
        per_column: pixels in a unit of length to the right.
        unit_mm: the unit; None if the file states the ratio alone, and the shorter side counts as 1.
    """
    if not (per_row > 0 and per_column > 0):
        return None
    ratio = per_row / per_column
    if 0.99 < ratio < 1.01:  # such as 72.009 and 72 pixels in an inch
        return None
    if unit_mm is None:
        return max(1.0, 1 / ratio), max(1.0, ratio)
    return unit_mm / per_row, unit_mm / per_column


class Metadata:
    """What metadata declares that a person must know about, gathered from whatever blocks a format has."""

    def __init__(self) -> None:
        self.orientation = UPRIGHT
        self._flags: set[Flag] = set()
        self._screenshot = False

    def flags(self, *, colours: bool) -> frozenset[Flag]:
        """Return the flags; greys are not screenshots."""
        flags = frozenset(self._flags)
        if colours and self._screenshot:
            return flags | {Flag.SCREENSHOT}
        return flags

    def add_thumbnail(self) -> None:
        """Note that a smaller copy is in the file: it may show what was cut away or blackened in the picture."""
        self._flags.add(Flag.THUMBNAIL)

    def add_text(self, data: bytes) -> None:
        """Look at a block of text, such as a comment or XMP, for words on screenshots and for thumbnails."""
        if b"screenshot" in data.replace(b"\0", b"").lower():
            self._screenshot = True
        if _XMP_THUMBNAIL in data:
            self.add_thumbnail()

    def add_photoshop(self, data: bytes) -> None:
        """Look at Photoshop's image resources."""
        if _PHOTOSHOP_THUMBNAIL.search(data):
            self.add_thumbnail()

    def add_exif(self, data: bytes) -> None:
        """Read orientation, thumbnail and comment of a block of EXIF.

        Raises:
            ImageError: its first directory is damaged, so that the orientation is unknown.
        """
        exif = Image.Exif()
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            try:
                exif.load(data)
                orientation = exif.get(ExifTags.Base.Orientation, UPRIGHT)
            except (SyntaxError, OSError, ValueError, struct.error) as error:
                raise ImageError(Reason.DAMAGED, "EXIF") from error
            # Pillow warns of a directory that ends too early, and of single values, most of which are not needed here.
            if any(not str(remark.message).startswith("Possibly") for remark in remarks):
                raise ImageError(Reason.DAMAGED, "EXIF")
            if not isinstance(orientation, int):
                raise ImageError(Reason.DAMAGED, "EXIF: Orientation: not one whole number")
            self.orientation = orientation
            # Programs that rewrite EXIF often leave offsets in the rest that point to nothing.
            with suppress(SyntaxError, OSError, ValueError, struct.error):
                self._add_exif_comment(exif)
            with suppress(SyntaxError, OSError, ValueError, struct.error):
                thumbnail_tags = exif.get_ifd(ExifTags.IFD.IFD1)
                has_jpeg = ExifTags.Base.JpegIFOffset in thumbnail_tags
                if has_jpeg or ExifTags.Base.StripOffsets in thumbnail_tags:
                    self.add_thumbnail()

    def _add_exif_comment(self, exif: Image.Exif) -> None:
        tags = exif.get_ifd(ExifTags.IFD.Exif)
        comment = tags.get(ExifTags.Base.UserComment, b"")
        if not isinstance(comment, bytes):
            comment = str(comment).encode()
        self.add_text(comment)
