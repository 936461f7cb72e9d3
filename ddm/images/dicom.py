"""DICOM through pydicom: values as the file means them, and what its tags say a person must see; no tag leaves.

Frames make a volume where each says where it is, all face the same way, and they are evenly spaced along their
normal, each place taken once. All other frames (ultrasound clips, angiography, secondary captures, repeated or tilted
slices) are images of their own, in the file's order. One slice a file is an image: files are never put together, but
a slice that may be of a head says which scan it belongs to.

`dicom_pixels` gives stored values, `dicom_values` makes pictures of them, `dicom_geometry` says where they are.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import config as pydicom_config

from ddm.images.content import FileContent
from ddm.images.dicom_geometry import is_of_head, slice_of, volume_of
from ddm.images.dicom_pixels import (
    EXPLICIT_BIG_ENDIAN,
    EXPLICIT_LITTLE_ENDIAN,
    IMPLICIT_LITTLE_ENDIAN,
    frames_of,
    pixel_format_of,
)
from ddm.images.dicom_tags import sequence_of, text_of, value_of
from ddm.images.dicom_values import Frame, frame_of
from ddm.images.picture import DecodedPicture, DecodeLimits, Picture, supported
from ddm.images.reasons import Flag, ImageError, Reason
from ddm.images.types import Bounds

_OVERLAY_GROUPS = range(0x6000, 0x6020, 2)
_OVERLAYS = frozenset(
    group << 16 | element for group in _OVERLAY_GROUPS for element in (0x0010, 0x0011, 0x3000)
)
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
_CAPTURES = ("SC", "OT", "DOC")  # modalities
_ULTRASOUND = ("1.2.840.10008.5.1.4.1.1.3", "1.2.840.10008.5.1.4.1.1.6")
_NO_PICTURES = (  # doses, segmentations, maps, wave forms: numbers that stand for something else than what was seen
    "1.2.840.10008.5.1.4.1.1.481.",
    "1.2.840.10008.5.1.4.1.1.66",
    "1.2.840.10008.5.1.4.1.1.30",
)
_IMAGES_OF_THERAPY = "1.2.840.10008.5.1.4.1.1.481.1"  # a radiograph
_DEFERRED_BYTES = 1 << 16  # values of more bytes are left where they are until they are needed


def read(
    content: FileContent,
    kind: str,
    limits: DecodeLimits,
) -> Iterator[DecodedPicture | ImageError]:
    """Yield the frames of one file, or the volume that they make; a frame that is of no use comes as its error.

    Args:
        content: the file; without preamble too.
        kind: what reports call the format.
        limits: the most that it may ask for.

    Raises:
        ImageError: no pixels, or pixels that cannot be decoded, with the true reason.
    """
    with _quietly(), content.open() as stream:
        # Of a file in memory, large values stay where they are: `dicom_pixels.pixel_bytes` reads them without a copy.
        defer_size = None
        if content.data is not None:
            defer_size = _DEFERRED_BYTES
        # Forced, because some systems export files without the preamble of PS3.10.
        tags = pydicom.dcmread(stream, force=True, defer_size=defer_size)
        _check_kind(tags)
        pixel_format = pixel_format_of(tags, _syntax(tags), limits)
        flags = _flags(tags)
        patient = str(value_of(tags, "PatientID") or "").strip() or None
        head = is_of_head(tags)
        volume = volume_of(tags, pixel_format.num_frames, pixel_format.samples)
        frames = (
            frame_of(tags, number, stored, pixel_format)
            for number, stored in enumerate(frames_of(tags, pixel_format))
        )
        if volume is not None:
            limits.check(
                pixel_format.num_frames,
                pixel_format.samples,
                pixel_format.rows,
                pixel_format.columns,
            )
            picture = _volume(
                list(frames),
                *volume,
                is_inverted=pixel_format.photometric == "MONOCHROME1",
            )
            yield DecodedPicture.of(picture, flags, kind, patient=patient, head=head)
            return
        for number, frame in enumerate(frames):
            picture = frame.picture
            if frame.padding is not None:
                background = frame.lowest()
                if background is None:
                    yield ImageError(Reason.NO_PIXELS, "only pixels of PixelPaddingValue")
                    continue
                picture = frame.with_background(background)
            location = slice_of(tags, number, picture, head)
            yield DecodedPicture.of(
                picture,
                flags,
                kind,
                patient=patient,
                slice=location,
                head=head,
            )


def _volume(
    frames: list[Frame],
    order: list[int],
    matrix: NDArray[np.float64],
    *,
    is_inverted: bool,
) -> Picture:
    """Return the volume that frames make, each at its place.

    Frames may have a rescaling and a window of their own, so that bounds and window of the volume hold those of all.
    """
    from ddm.images.orientation import oriented  # nibabel, which single images do without

    pictures = [frame.picture for frame in frames]
    bounds = {picture.full for picture in pictures}
    if is_inverted and len(bounds) > 1:
        # Each frame was turned within its own bounds, so that one value would stand for several greys.
        raise ImageError(
            Reason.UNSUPPORTED,
            "MONOCHROME1 whose frames have different values of RescaleSlope or others",
        )
    # Frames that are rescaled by themselves may have types of their own; this is one that holds the values of all.
    stack = np.stack([pictures[number].values for number in order], 1)  # (C, D, H, W)
    if any(frame.padding is not None for frame in frames):
        background = _lowest(frames)
        for place, number in enumerate(order):
            padding = frames[number].padding
            if padding is not None:
                stack[:, place, padding] = background
    # In the order that the matrix numbers axes: columns, rows, frames.
    by_axes_of_matrix = stack.transpose(0, 3, 2, 1)
    values, spacing = oriented(by_axes_of_matrix, matrix)
    window = _hull([picture.window for picture in pictures])
    full = _hull([picture.full for picture in pictures])
    return Picture(supported(values), spacing, window, full)


def _hull(ranges: list[Bounds | None]) -> Bounds | None:
    """Return the smallest range that holds all; None where one frame has none."""
    present = [bounds for bounds in ranges if bounds is not None]
    if len(present) < len(ranges):
        return None
    return min(low for low, _ in present), max(high for _, high in present)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep pydicom's warnings and log, which quote values, to itself, and let it read what others wrote wrongly."""
    log = logging.getLogger("pydicom")
    silent, mode = log.disabled, pydicom_config.settings.reading_validation_mode
    log.disabled = True
    pydicom_config.settings.reading_validation_mode = pydicom_config.IGNORE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = silent
        pydicom_config.settings.reading_validation_mode = mode


def _check_kind(tags: Any) -> None:
    """Refuse files that hold no picture, or nothing at all."""
    sop_class = text_of(tags, "SOPClassUID")
    if sop_class.startswith(_NO_PICTURES) and sop_class != _IMAGES_OF_THERAPY:
        raise ImageError(Reason.NO_PICTURE, "a dose, a segmentation or a map")
    if not len(tags):  # what pydicom returns where a file ends within its pixels
        raise ImageError(Reason.TRUNCATED, "the file ends within a value")


def _syntax(tags: Any) -> str:
    """Return the transfer syntax; of a file without one, that which it was read with."""
    syntax = text_of(tags.file_meta, "TransferSyntaxUID")
    if syntax:
        return syntax
    is_implicit, is_little_endian = tags.original_encoding
    if is_implicit:
        return IMPLICIT_LITTLE_ENDIAN
    if is_little_endian:
        return EXPLICIT_LITTLE_ENDIAN
    return EXPLICIT_BIG_ENDIAN


def _lowest(frames: list[Frame]) -> float:
    """Return the lowest value of all pixels that are not padding.

    Raises:
        ImageError: there is none.
    """
    lowest_of_frames = []
    for frame in frames:
        lowest = frame.lowest()
        if lowest is not None:
            lowest_of_frames.append(lowest)
    if not lowest_of_frames:
        raise ImageError(Reason.NO_PIXELS, "only pixels of PixelPaddingValue")
    return min(lowest_of_frames)


def _flags(tags: Any) -> frozenset[Flag]:
    sop_class = text_of(tags, "SOPClassUID")
    modality = text_of(tags, "Modality").upper()
    conversion = text_of(tags, "ConversionType").upper()
    image_type = text_of(tags, "ImageType").upper()
    has_text = text_of(tags, "BurnedInAnnotation").upper() == "YES"
    has_face = text_of(tags, "RecognizableVisualFeatures").upper() == "YES"
    is_capture_class = sop_class == _SECONDARY_CAPTURE
    is_kind_of_capture = sop_class.startswith(f"{_SECONDARY_CAPTURE}.")
    is_captured = is_capture_class or is_kind_of_capture or modality in _CAPTURES
    # A film or paper that was scanned, and the like; WSD is a workstation.
    is_converted = conversion not in ("", "WSD")
    is_present = {
        Flag.DECLARED_TEXT: has_text,
        Flag.DECLARED_FACE: has_face,
        Flag.OVERLAY: not _OVERLAYS.isdisjoint(tags.keys()),
        Flag.THUMBNAIL: len(sequence_of(tags, "IconImageSequence")) > 0,
        Flag.SCREENSHOT: conversion == "WSD" or "SCREEN" in image_type,
        Flag.SECONDARY_CAPTURE: is_captured or is_converted,
        Flag.ULTRASOUND: modality in ("US", "IVUS") or sop_class.startswith(_ULTRASOUND),
    }
    return frozenset(flag for flag, present in is_present.items() if present)
