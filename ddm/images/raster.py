"""PNG, JPEG, TIFF and WebP: pixels through Pillow, 16-bit colours through pypng and tifffile; no metadata leave.

Transparency is laid over black, palettes become RGB, a camera's orientation is applied. Pages of a TIFF and frames of
an animation are images of their own; a TIFF's reduced pages, and the further pictures in a JPEG, are thumbnails.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, Limits, Picture, supported
from ddm.images.reasons import Flag, ImageError, Reason

_GREYS = {"L": (0.0, 255.0), "I;16": (0.0, 65535.0), "I;16L": (0.0, 65535.0), "I;16B": (0.0, 65535.0)}
_SCREENS = {  # width and height of common screens; of telephones upright
    *((1024, 768), (1280, 720), (1280, 800), (1280, 1024), (1366, 768), (1440, 900), (1536, 864), (1600, 900)),
    *((1680, 1050), (1920, 1080), (1920, 1200), (2560, 1440), (2560, 1600), (2880, 1800), (3440, 1440), (3840, 2160)),
    *((750, 1334), (828, 1792), (1080, 1920), (1080, 2340), (1080, 2400), (1125, 2436), (1170, 2532), (1179, 2556)),
    *((1284, 2778), (1290, 2796), (1440, 3200), (1536, 2048), (1620, 2160), (2048, 2732)),
}
_EXIF_ORIENTATION, _EXIF_COMMENT, _EXIF_PREVIEW = 0x0112, 0x9286, 0x0201
_PNG_HEAD_BYTES = 26  # to the depth and the type of colours
_SUBFILE, _BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 254, 258, 262, 339
_UNSIGNED, _SIGNED = 1, 2  # sample formats


def read(content: FileContent, kind: str, limits: Limits) -> Iterator[DecodedPicture]:
    """Yield the images of one file.

    Args:
        content: the file.
        kind: PNG, JPEG, TIFF or WEBP, as its first bytes tell.
        limits: the most that it may ask for.

    Raises:
        ImageError: pixels that cannot be decoded, with the true reason.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # `limits` stand in its place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "PNG" and (direct := _deep_png(content, limits)) is not None:
            yield _decoded(direct, (0.0, 65535.0), kind, frozenset())
            return
        with content.open() as stream, Image.open(stream, formats=[kind]) as image:
            pages = 1 if kind == "JPEG" else int(getattr(image, "n_frames", 1))
            limits.check_pictures(pages)
            flags = _flags(image, pages)
            for page in range(pages):
                if pages > 1:
                    image.seek(page)
                if kind == "TIFF" and _is_reduced(image):
                    continue
                limits.check(image.height, image.width, len(image.getbands()))
                values, full = _values(image, content, page)
                yield _decoded(values, full, kind, flags)


def _decoded(
    values: NDArray[np.generic], full: tuple[float, float] | None, kind: str, flags: frozenset[Flag]
) -> DecodedPicture:
    return DecodedPicture.of(Picture(supported(values), full=full), flags, kind)


def _values(
    image: Image.Image, content: FileContent, page: int
) -> tuple[NDArray[np.generic], tuple[float, float] | None]:
    """Return one page, shape (C, H, W), and the bounds of its type."""
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS, (8,))
    if image.format == "TIFF" and len(bits) > 1 and max(bits) > 8:
        return _deep_tiff(content, page), (0.0, 65535.0)
    clear = image.info.get("transparency") if image.mode != "P" else None
    if image.mode in ("I", "F"):
        if image.format == "TIFF":
            return _unbounded_tiff(image)[None], None
        return np.asarray(image).astype(np.uint16)[None], (0.0, 65535.0)
    if image.mode.startswith("I;16"):
        values: NDArray[Any] = np.asarray(image).astype(np.uint16)
        if tags.get(_PHOTOMETRIC) == 0:  # white is zero, which Pillow turns at 8 bits alone
            values = np.iinfo(np.uint16).max - values
        if isinstance(clear, int):
            values = np.where(values == clear, np.uint16(0), values)
        return _upright(image, values)[None], _GREYS[image.mode]
    if image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or clear is not None:
        return _over_black(ImageOps.exif_transpose(image).convert("RGBA"), grey=image.mode in ("L", "LA", "La"))
    if image.mode == "1":
        image = image.convert("L")
    if image.mode in ("CMYK", "YCbCr", "HSV"):
        image = image.convert("RGB")
    if image.mode not in ("L", "RGB"):
        raise ImageError(Reason.UNSUPPORTED, "a colour space other than grey, RGB, CMYK and YCbCr")
    image.load()
    pixels = np.asarray(ImageOps.exif_transpose(image) if image.getexif() else image)
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()):  # greys alone, whose sign Pillow drops
        return pixels.view(np.int8)[None], (-128.0, 127.0)
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0), (0.0, 255.0)


def _unbounded_tiff(image: Any) -> NDArray[np.generic]:
    """Return greys of a type without bounds; inverted ones turned within their own, as in DICOM."""
    tags = image.tag_v2
    if tags.prefix == b"MM" and image.tile[0].codec_name == "libtiff":  # Pillow leaves their bytes reversed
        raise ImageError(Reason.UNSUPPORTED, "big-endian values, with a sign or of 32 bits, in a compression")
    values: NDArray[Any] = np.asarray(image)
    if image.mode == "I" and _UNSIGNED in tags.get(_SAMPLE_FORMAT, (_UNSIGNED,)):
        values = values.view(np.uint32)
    return values.max() + values.min() - values if tags.get(_PHOTOMETRIC) == 0 else values


def _upright(image: Image.Image, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Apply a camera's orientation to a type that Pillow does not turn."""
    turns = {2: (0, True), 3: (2, False), 4: (2, True), 5: (1, True), 6: (3, False), 7: (3, True), 8: (1, False)}
    quarter, mirrored = turns.get(int(image.getexif().get(_EXIF_ORIENTATION, 1)), (0, False))
    turned = np.rot90(values, quarter)
    return turned[:, ::-1] if mirrored and quarter in (0, 2) else turned[::-1] if mirrored else turned


def _over_black(image: Image.Image, *, grey: bool) -> tuple[NDArray[np.generic], tuple[float, float]]:
    """Return (1, H, W) or (3, H, W); what nobody sees, since it is transparent, is gone."""
    black = Image.new("RGBA", image.size, (0, 0, 0, 255))
    laid = np.asarray(Image.alpha_composite(black, image))[..., :3]
    return (laid[None, ..., 0] if grey else np.moveaxis(laid, -1, 0)), (0.0, 255.0)


def _deep_png(content: FileContent, limits: Limits) -> NDArray[np.generic] | None:
    """Return a PNG of 16-bit colours, or of 16-bit greys with transparency, which Pillow cuts to 8 bits; else None."""
    head = content.head(_PNG_HEAD_BYTES)
    if len(head) < _PNG_HEAD_BYTES or head[24] != 16 or head[25] not in (2, 4, 6):
        return None
    import png

    limits.check(int.from_bytes(head[16:20]), int.from_bytes(head[20:24]), 4)
    try:
        width, height, rows, info = png.Reader(file=content.open()).asDirect()
        planes = int(info["planes"])
        values = np.empty((height, width * planes), np.uint16)
        num = -1
        for num, row in enumerate(rows):
            values[num] = row
    except (png.FormatError, png.ChunkError) as error:
        raise ImageError(Reason.DAMAGED) from error
    if num + 1 != height:
        raise ImageError(Reason.TRUNCATED)
    return _without_alpha(values.reshape(height, width, planes))


def _deep_tiff(content: FileContent, page: int) -> NDArray[np.generic]:
    """Return a page of 16-bit colours, which Pillow cuts to 8 bits."""
    import tifffile

    try:
        with content.open() as stream, tifffile.TiffFile(stream) as file:
            found: Any = file.pages[page]
            if found.photometric not in (1, 2):
                raise ImageError(Reason.UNSUPPORTED, "16-bit colours other than RGB")
            values, axes = found.asarray(), found.axes
    except ValueError as error:  # a compression that it needs more codecs for is among these
        raise ImageError(Reason.UNSUPPORTED, "16-bit colours in a compression other than Deflate") from error
    values = np.moveaxis(values, axes.index("S"), -1)
    if values.ndim != 3 or values.dtype != np.uint16:
        raise ImageError(Reason.SHAPE, "colours that are not (H, W, C) of 16 bits")
    return _without_alpha(values)


def _without_alpha(values: NDArray[Any]) -> NDArray[np.generic]:
    """Return (C, H, W) of (H, W, C), a last channel of transparency laid over black."""
    if values.shape[-1] in (2, 4):
        share = values[..., -1:].astype(np.float64) / 65535
        values = np.round(values[..., :-1] * share).astype(np.uint16)
    if values.shape[-1] not in (1, 3):
        raise ImageError(Reason.SHAPE, "neither one channel nor three")
    return np.moveaxis(values, -1, 0)


def _is_reduced(image: Any) -> bool:
    return bool(int(image.tag_v2.get(_SUBFILE, 0)) & 1)


def _flags(image: Any, pages: int) -> frozenset[Flag]:
    found = set()
    if _has_thumbnail(image, pages):
        found.add(Flag.THUMBNAIL)
    size = image.size
    if image.mode not in ("L", "I;16", "I;16B", "1", "F") and (size in _SCREENS or "screenshot" in _words(image)):
        found.add(Flag.SCREENSHOT)
    return frozenset(found)


def _has_thumbnail(image: Any, pages: int) -> bool:
    """Whether a smaller copy lies in the file: it may show what was cut away or blackened in the picture."""
    if image.format == "MPO" or b"xmpGImg" in bytes(image.info.get("xmp") or b""):
        return True
    for name, data in getattr(image, "applist", ()):
        if name == "APP0" and (data[:5] == b"JFXX\0" or (data[:5] == b"JFIF\0" and any(data[12:14]))):
            return True
    if 0x040C in image.info.get("photoshop", {}):
        return True
    if image.format == "TIFF":
        for page in range(pages):
            image.seek(page)
            if _is_reduced(image):
                return True
        image.seek(0)
        return False
    return "exif" in image.info and _EXIF_PREVIEW in image.getexif().get_ifd(ExifTags.IFD.IFD1)


def _words(image: Any) -> str:
    texts = [value for value in image.info.values() if isinstance(value, str)]
    if "exif" in image.info:
        comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(_EXIF_COMMENT, b"")
        texts.append(comment.decode("latin-1") if isinstance(comment, bytes) else str(comment))
    xmp = image.info.get("xmp")
    texts.append(xmp.decode("latin-1") if isinstance(xmp, bytes) else "")
    return " ".join(texts).replace("\0", "").lower()
