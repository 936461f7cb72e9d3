"""TIFF 6.0 and BigTIFF: every page is an image of its own, and reduced pages are thumbnails.

tifffile reads directories and tags, `tiff_samples` the samples of a page. Here is what they mean: ExtraSamples says
what further samples are, colours become grey or RGB, and the image is turned.
"""

# Shape legend: C channels, H height, W width.
import re
import struct
from collections.abc import Iterator

import numpy as np
import tifffile

from ddm.images.content import FileContent
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.raster import Metadata, over_black, picture_of, rgb_of_inks, spacing_of
from ddm.images.reasons import ImageError, Reason
from ddm.images.tiff_samples import (
    BLACK_IS_ZERO,
    CMYK,
    FLOATING,
    NUM_COLOURS,
    PALETTE,
    SIGNED,
    UNSIGNED,
    WHITE_IS_ZERO,
    check_page,
    samples_of,
)
from ddm.images.types import Bounds, Numbers, Spacing

# Values of ExtraSamples.
_UNSPECIFIED = 0
_ASSOCIATED = 1
_UNASSOCIATED = 2
_UNITS_MM = {2: 25.4, 3: 10.0}
_MAX_TEXT_BYTES = 1 << 20  # of a block of metadata that is looked at
_SINGLE_NUMBERS = (
    *(
        "NewSubfileType",
        "SubfileType",
        "ImageWidth",
        "ImageLength",
        "Compression",
        "PhotometricInterpretation",
    ),
    *(
        "FillOrder",
        "Orientation",
        "SamplesPerPixel",
        "RowsPerStrip",
        "PlanarConfiguration",
        "ResolutionUnit",
    ),
    *("Predictor", "TileWidth", "TileLength", "InkSet", "ImageDepth"),
)
# Private tags that change what the pixels mean.
_PRIVATE_TAGS = {
    32997,  # ImageDepth
    33629,  # UIC2tag
    34377,  # ImageResources
    42113,  # GDAL_NODATA
}
_IMAGEJ_NUMBER = re.compile(r"^(images|channels)=(\d+)\s*$", re.MULTILINE)
_OME_CHANNEL_COUNT = re.compile(r"""<(?:\w+:)?Channel\b[^>]*?\bSamplesPerPixel=["'](\d+)["']""")
_OME_CHANNELS = re.compile(r"""<(?:\w+:)?Pixels\b[^>]*?\bSizeC=["'](\d+)["']""")


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the images of one file; a page that cannot be used comes as its error if there are others.

    Args:
        content: the file.
        kind: TIFF.
        limits: the most that it may ask for.

    Raises:
        ImageError: no image, with the true reason.
    """
    # Its messages quote the file; the problems they report are checked here.
    tifffile.logger().setLevel("CRITICAL")
    with content.open() as stream:
        try:
            # Without tifffile's exceptions for the programs of some microscopes, which change what tags say.
            file = tifffile.TiffFile(stream, is_ndpi=False, is_lsm=False, is_scanimage=False)
        except Exception as error:
            raise _meaning_of(error) from error
        metadata = Metadata()
        offsets = []
        num_pages = 0
        for page in _pages(file, limits.pictures):
            num_pages += 1
            _note_metadata(file, page, metadata)
            if _is_reduced(page):
                metadata.add_thumbnail()
            else:
                offsets.append(page.offset)
        if not offsets:
            raise ImageError(Reason.NO_PIXELS, "NewSubfileType: only reduced images")
        _check_stack(file.pages.first, num_pages)
        for offset in offsets:
            try:
                # Pages are read again instead of being held: there may be thousands of them.
                page, codes, _ = _page_at(file, offset)
                _check_tags(page, codes)
                picture = _picture(page, kind, limits, metadata)
            except (ImageError, TypeError, ValueError, ArithmeticError, LookupError) as error:
                if isinstance(error, ImageError):
                    problem = error
                else:
                    problem = _meaning_of(error)
                if len(offsets) == 1:
                    raise problem from error
                yield problem
            else:
                yield picture


def _meaning_of(error: Exception) -> ImageError:
    """Return what an exception of tifffile, which raises any kind, says about a directory."""
    if isinstance(error, MemoryError):
        return ImageError(Reason.MEMORY)
    if isinstance(error, tifffile.TiffFileError | struct.error) and "suspicious" not in str(error):
        return ImageError(Reason.TRUNCATED, "header or directory")
    return ImageError(
        Reason.DAMAGED,
        "directory: values that contradict each other, such as those of SampleFormat",
    )


def _pages(file: tifffile.TiffFile, max_pages: int) -> Iterator[tifffile.TiffPage]:
    """Yield the pages; tifffile's own list ends without a word where a directory is outside of the file."""
    if not len(file.pages):
        raise ImageError(Reason.TRUNCATED, "directory: outside of the file")
    visited: set[int] = set()
    offset = file.pages.first.offset
    while offset:
        if offset in visited:
            raise ImageError(Reason.DAMAGED, "directories in a circle")
        if len(visited) == max_pages:
            raise ImageError(Reason.TOO_LARGE, f"more than {max_pages} pages")
        visited.add(offset)
        page, _, offset = _page_at(file, offset)
        yield page


def _page_at(file: tifffile.TiffFile, offset: int) -> tuple[tifffile.TiffPage, list[int], int]:
    """Return the page at an offset, the codes of its tags, and the offset of the next one, which is 0 after the last.

    Raises:
        ImageError: outside of the file, or too damaged for tifffile.
    """
    handle = file.filehandle
    sizes = file.tiff
    try:
        handle.seek(offset)
        page = tifffile.TiffPage(file, index=0)
        handle.seek(offset)
        # The directory is read once more here, since tifffile does not tell which tags it left out.
        packed_num_tags = handle.read(sizes.tagnosize)
        (num_tags,) = struct.unpack(sizes.tagnoformat, packed_num_tags)
        table = handle.read(num_tags * sizes.tagsize)
        packed_offset = handle.read(sizes.offsetsize)
        (next_offset,) = struct.unpack(sizes.offsetformat, packed_offset)
    except Exception as error:
        raise _meaning_of(error) from error
    codes = []
    code_format = f"{sizes.byteorder}H"
    for start in range(0, len(table), sizes.tagsize):
        (code,) = struct.unpack_from(code_format, table, start)
        codes.append(code)
    return page, codes, next_offset


def _check_tags(page: tifffile.TiffPage, codes: list[int]) -> None:
    """Refuse a tag that is there twice, that tifffile left out since it cannot be read, or for which it has a default.

    Args:
        page: as tifffile has read it.
        codes: of the tags that are in the file.
    """
    if len(set(codes)) != len(codes):
        raise ImageError(Reason.DAMAGED, "directory with a tag twice")
    for code in codes:
        # TIFF 6.0 leaves tags from 0x8000 on to private use: most of them say nothing about the pixels.
        may_matter = code < 0x8000 or code in _PRIVATE_TAGS
        if may_matter and code not in page.tags:
            name = tifffile.TIFF.TAGS.get(code, "a tag without a name")
            raise ImageError(Reason.DAMAGED, f"{name}: an unknown type, or outside of the file")
    for name in _SINGLE_NUMBERS:
        value = page.tags.valueof(name, 0)
        # tifffile takes text and lists too, and then goes by a default.
        if not isinstance(value, int):
            raise ImageError(Reason.DAMAGED, f"{name}: not one whole number")


def _is_reduced(page: tifffile.TiffPage) -> bool:
    """Whether a page is a smaller copy of another."""
    if page.is_mask:
        raise ImageError(Reason.UNSUPPORTED, "NewSubfileType: a transparency mask")
    return page.is_reduced


def _note_metadata(
    file: tifffile.TiffFile,
    page: tifffile.TiffPage,
    metadata: Metadata,
) -> None:
    """Look for what a person must know about, and refuse further images that are not in the list of pages."""
    if page.imagedepth != 1:
        raise ImageError(Reason.UNSUPPORTED, "ImageDepth: a volume in one page")
    for name in ("ImageDescription", "Software", "XMP"):
        metadata.add_text(_data(page, name))
    metadata.add_photoshop(_data(page, "ImageResources"))
    for offset in page.subifds or ():
        child, _, _ = _page_at(file, offset)
        is_smaller = child.imagewidth < page.imagewidth or child.imagelength < page.imagelength
        if not _is_reduced(child) and not is_smaller:
            # Such as a camera's raw file, whose first page is the preview.
            raise ImageError(Reason.UNSUPPORTED, "SubIFDs: further images of full size")
        metadata.add_thumbnail()


def _data(page: tifffile.TiffPage, name: str) -> bytes:
    """Return the bytes of a tag, whatever its type; none if it is missing or has too many."""
    tag = page.tags.get(name)
    if tag is None or tag.valuebytecount > _MAX_TEXT_BYTES:
        return b""
    page.parent.filehandle.seek(tag.valueoffset)
    data: bytes = page.parent.filehandle.read(tag.valuebytecount)
    return data


def _check_stack(first: tifffile.TiffPage, num_pages: int) -> None:
    """Refuse stacks of which the pages are not all, or are channels of one image, by what their programs write."""
    if "UIC2tag" in first.tags and first.tags["UIC2tag"].count > 1:
        raise ImageError(
            Reason.UNSUPPORTED, "UIC2Tag: a MetaMorph stack, whose planes have no directories"
        )
    description = first.description
    if first.is_imagej:
        numbers = dict(_IMAGEJ_NUMBER.findall(str(first.imagej_description)))
        if int(numbers.get("images", 1)) > num_pages:
            raise ImageError(
                Reason.UNSUPPORTED,
                "ImageDescription: an ImageJ stack, whose planes have no directories",
            )
        if int(numbers.get("channels", 1)) > 1 and first.samplesperpixel == 1:
            raise ImageError(
                Reason.UNSUPPORTED, "ImageDescription: an ImageJ stack, whose pages are channels"
            )
    elif re.match(r'\{"shape":.*"truncated": *true', description, re.DOTALL):
        raise ImageError(
            Reason.UNSUPPORTED, "ImageDescription: a stack, whose planes have no directories"
        )
    elif "<OME" in description[:2000] or ":OME" in description[:2000]:
        # More channels than a pixel of any page has are in pages of their own.
        samples_per_pixel = max(map(int, _OME_CHANNEL_COUNT.findall(description)), default=1)
        num_channels = max(map(int, _OME_CHANNELS.findall(description)), default=0)
        if num_channels > samples_per_pixel:
            raise ImageError(
                Reason.UNSUPPORTED,
                "ImageDescription: an OME stack, whose pages are channels (SizeC)",
            )


def _picture(
    page: tifffile.TiffPage,
    kind: str,
    limits: DecodeLimits,
    metadata: Metadata,
) -> DecodedPicture:
    check_page(page, limits)
    num_colours = NUM_COLOURS[page.photometric]
    extra_samples = _extra_samples(page, page.samplesperpixel - num_colours)
    palette = None
    if page.photometric == PALETTE:
        palette = _palette(page)
    if page.photometric == CMYK:
        _check_inks(page)
    no_data = _no_data(page)
    samples = samples_of(page)
    colours = samples[..., :num_colours]
    if no_data is not None and (colours == no_data).any():
        raise ImageError(Reason.UNSUPPORTED, "GDAL_NODATA: pixels without a value")
    top = (1 << page.bitspersample) - 1
    full = _bounds(page, top)
    if palette is not None:
        colours = palette[colours[..., 0]]
        full = (0.0, float(np.iinfo(colours.dtype).max))
    elif page.bitspersample in (1, 2, 4):
        colours = colours * np.uint8(255 // top)
        full = (0.0, 255.0)
    if page.photometric == WHITE_IS_ZERO:
        colours = _inverted(colours, full)
    elif page.photometric == CMYK:
        colours = rgb_of_inks(colours, top)
    if _UNASSOCIATED in extra_samples and full is not None:
        alpha = samples[..., num_colours + extra_samples.index(_UNASSOCIATED)].astype(np.uint32)
        # 1, 2 and 4 bits were spread, and a palette's colours may have another depth than its alpha.
        alpha = (alpha * int(full[1]) + top // 2) // top
        colours = over_black(colours, alpha, int(full[1]))
    return picture_of(
        colours,
        kind,
        full=full,
        orientation=page.tags.valueof("Orientation", 1),
        spacing=_spacing(page),
        flags=metadata.flags(colours=page.photometric not in (WHITE_IS_ZERO, BLACK_IS_ZERO)),
    )


def _bounds(page: tifffile.TiffPage, top: int) -> Bounds | None:
    """Return the bounds of the type; None for 32 bits and more, and for floating point."""
    if page.sampleformat == FLOATING or page.bitspersample > 16:
        return None
    if page.sampleformat == SIGNED:
        return float(-top // 2), float(top // 2)
    return 0.0, float(top)


def _spacing(page: tifffile.TiffPage) -> Spacing | None:
    # Fractions: a numerator and a denominator.
    across = page.tags.valueof("XResolution", (0, 0))
    down = page.tags.valueof("YResolution", (0, 0))
    if len(across) != 2 or len(down) != 2 or not across[1] or not down[1]:
        return None
    # 2 is an inch, the default of TIFF 6.0.
    unit = page.tags.valueof("ResolutionUnit", 2)
    return spacing_of(
        per_row=down[0] / down[1],
        per_column=across[0] / across[1],
        unit_mm=_UNITS_MM.get(unit),
    )


def _inverted(colours: Numbers, full: Bounds | None) -> Numbers:
    """Return greys whose white was zero, turned within the bounds of their type.

    Values without bounds are turned within their own lowest and highest, as in DICOM.
    """
    inverted: Numbers
    if full is not None:
        lowest, highest = full
        # Of signed numbers -1 - v, which is lowest + highest - v in two's complement.
        if lowest < 0:
            inverted = ~colours
        else:
            inverted = colours.dtype.type(highest) - colours
        return inverted
    if not np.isfinite(colours).all():
        raise ImageError(Reason.NOT_FINITE)
    if colours.dtype.kind in "iu":
        # Differences of 32 bits need more; of 64 bits, `supported` keeps what float32 holds.
        if colours.dtype.itemsize == 8:
            colours = colours.astype(np.float64)
        else:
            colours = colours.astype(np.int64)
    sum_of_ends = colours.max() + colours.min()
    inverted = sum_of_ends - colours
    return inverted


def _extra_samples(page: tifffile.TiffPage, num: int) -> tuple[int, ...]:
    """Return what the samples beyond the colours are, as ExtraSamples says; their number alone says nothing."""
    kinds = tuple(int(kind) for kind in page.extrasamples)
    if num < 0:
        raise ImageError(
            Reason.DAMAGED, "SamplesPerPixel: fewer than PhotometricInterpretation has colours"
        )
    if len(kinds) != num:
        raise ImageError(
            Reason.DAMAGED, "ExtraSamples: their number does not match SamplesPerPixel"
        )
    if any(kind not in (_UNSPECIFIED, _ASSOCIATED, _UNASSOCIATED) for kind in kinds):
        raise ImageError(Reason.UNSUPPORTED, "ExtraSamples: an unknown kind")
    if num - kinds.count(_UNSPECIFIED) > 1:
        raise ImageError(Reason.UNSUPPORTED, "ExtraSamples: transparency twice")
    if _UNSPECIFIED in kinds and page.photometric in (WHITE_IS_ZERO, BLACK_IS_ZERO):
        # Such as five stains of one section, the first of which is no more the picture than the others.
        raise ImageError(
            Reason.UNSUPPORTED, "ExtraSamples: further samples of a grey image, without a meaning"
        )
    # Section 18: colours with associated alpha are multiplied by it already, and so are over black as they are.
    if _ASSOCIATED in kinds and page.photometric in (WHITE_IS_ZERO, PALETTE):
        raise ImageError(
            Reason.UNSUPPORTED,
            "ExtraSamples: associated alpha of a palette, or where white is zero",
        )
    if _UNASSOCIATED in kinds and (page.sampleformat not in UNSIGNED or page.bitspersample > 16):
        raise ImageError(
            Reason.UNSUPPORTED,
            "ExtraSamples: transparency of samples that are not unsigned with 16 bits at most",
        )
    if any(kinds) and page.photometric == CMYK:
        raise ImageError(Reason.UNSUPPORTED, "ExtraSamples: transparency of CMYK")
    return kinds


def _check_inks(page: tifffile.TiffPage) -> None:
    if page.sampleformat not in UNSIGNED or page.bitspersample not in (8, 16):
        raise ImageError(
            Reason.UNSUPPORTED, "PhotometricInterpretation: CMYK of other than 8 or 16 bits"
        )
    if page.tags.valueof("InkSet", 1) != 1:
        raise ImageError(Reason.UNSUPPORTED, "InkSet: inks other than CMYK")
    top = 2**page.bitspersample - 1
    dots = tuple(page.tags.valueof("DotRange", (0, top)))
    # The number for no ink, then that for full ink, once for all inks or for each of them.
    are_ends = all(dot in (0, top) for dot in dots)
    if not are_ends or any(dots[::2]):
        raise ImageError(Reason.UNSUPPORTED, "DotRange: other than the full range")


def _palette(page: tifffile.TiffPage) -> Numbers:
    """Return the colours of a palette, shape (entries, 3), in 8 bits if these say all, else in 16."""
    if page.sampleformat not in UNSIGNED or page.bitspersample > 16:
        raise ImageError(
            Reason.UNSUPPORTED,
            "PhotometricInterpretation: a palette of samples that are not unsigned with 16 bits at most",
        )
    tag = page.tags.get("ColorMap")
    # Red, green and blue of each number that a sample can have.
    num_values = 3 << page.bitspersample
    if tag is None or tag.dtype != tifffile.DATATYPE.SHORT or tag.count != num_values:
        raise ImageError(Reason.DAMAGED, "ColorMap")
    colours = tag.value.reshape(3, -1).T
    high = colours >> 8
    low = colours & 255
    if not high.any() and low.any():
        # TIFF 6.0 has 65535 for the brightest; some writers have 255. They cannot be distinguished from a dark palette.
        raise ImageError(Reason.UNSUPPORTED, "ColorMap: no value above 255")
    # Writers make 16 bits of 8 by v * 256 or by v * 257.
    is_of_8_bits = not low.any() or (low == high).all()
    if is_of_8_bits:
        return np.asarray(high, np.uint8)
    return np.asarray(colours)


def _no_data(page: tifffile.TiffPage) -> float | None:
    """Return what GDAL says is the value of pixels without a value."""
    text = _data(page, "GDAL_NODATA").rstrip(b"\0 ")
    try:
        if not text:
            return None
        return float(text)
    except ValueError as error:
        raise ImageError(Reason.DAMAGED, "GDAL_NODATA") from error
