"""DICOM through pydicom: values as the file means them, and what its tags say a person must see; no tag leaves.

Frames make a volume where each says where it lies, all face the same way, and they are evenly spaced along their
normal, each place taken once. All other frames (ultrasound clips, angiography, secondary captures, repeated or tilted
slices) are images of their own, in the file's order. One slice a file is an image: files are never put together, but
a slice that may be of a head says which scan it belongs to.
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
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from ddm.images.content import FileContent
from ddm.images.dicom_geometry import is_of_head, slice_of, spacing_of, volume_of
from ddm.images.dicom_pixels import greys, stored, without_unused_bits
from ddm.images.dicom_tags import group_of, tag_of, value_of
from ddm.images.picture import DecodedPicture, Limits, Picture, supported
from ddm.images.reasons import Flag, ImageError, Reason

_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_OVERLAY_GROUPS = range(0x6000, 0x6020, 2)
_OVERLAYS = frozenset(group << 16 | element for group in _OVERLAY_GROUPS for element in (0x0010, 0x0011, 0x3000))
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
_ULTRASOUND = ("1.2.840.10008.5.1.4.1.1.3", "1.2.840.10008.5.1.4.1.1.6")
_NO_PICTURES = (  # doses, segmentations, maps, wave forms: numbers that stand for something else than what was seen
    *("1.2.840.10008.5.1.4.1.1.481.", "1.2.840.10008.5.1.4.1.1.66", "1.2.840.10008.5.1.4.1.1.30"),
)
_IMAGES_OF_THERAPY = "1.2.840.10008.5.1.4.1.1.481.1"  # a radiograph
_LEFT_BYTES = 1 << 16  # values of more than these are left where they are until they are asked for
_LITTLE_ENDIAN = (ImplicitVRLittleEndian, ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian)
_NATIVE = (ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian, UID("1.2.840.10008.1.2.1.99"))


def read(content: FileContent, kind: str, limits: Limits) -> Iterator[DecodedPicture]:
    """Yield the frames of one file, or the volume that they make.

    Args:
        content: the file; without preamble too.
        kind: what reports call the format.
        limits: the most that it may ask for.

    Raises:
        ImageError: no pixels, or pixels that cannot be decoded, with the true reason.
    """
    with _quietly():
        # Of a file in memory, large values stay where they are: `dicom_pixels.stored` reads them without a copy.
        defer_size = None if content.data is None else _LEFT_BYTES
        tags = pydicom.dcmread(content.open(), force=True, defer_size=defer_size)
        syntax = _syntax(tags)
        num, shape = _announced(tags, limits)
        _check_pixels(tags, syntax, num, shape)
        flags = _flags(tags)
        patient = str(value_of(tags, "PatientID") or "").strip() or None
        affine, head = volume_of(tags, num), is_of_head(tags)
        frames = _frames(tags, syntax, num, shape)
        if affine is None:
            for number, (values, photometric) in enumerate(frames):
                picture = _picture(tags, number, values, photometric)
                location = slice_of(tags, number, picture, head)
                yield DecodedPicture.of(picture, flags, kind, patient=patient, slice=location, head=head)
            return
        from ddm.images.orientation import oriented  # nibabel, which single images do without

        limits.check(num, *shape)
        order, matrix = affine
        found = [_picture(tags, number, *frame) for number, frame in enumerate(frames)]
        first = found[order[0]]
        stack = np.stack([found[number].values for number in order], 1)  # (C, D, H, W)
        values, spacing = oriented(stack.transpose(0, 3, 2, 1), matrix)
        volume = Picture(supported(values), spacing, first.window, first.full)
        yield DecodedPicture.of(volume, flags, kind, patient=patient, head=head)


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


def _syntax(tags: Any) -> UID:
    """Return the transfer syntax; of a file without one, that which it was read with."""
    syntax = value_of(tags.file_meta, "TransferSyntaxUID")
    if syntax is None:
        implicit, little = tags.original_encoding
        syntax = ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        tags.file_meta.TransferSyntaxUID = syntax
    return UID(syntax)


def _announced(tags: Any, limits: Limits) -> tuple[int, tuple[int, ...]]:
    """Return how many frames there are and the shape of one, within the limits."""
    kind = str(value_of(tags, "SOPClassUID") or "")
    if kind.startswith(_NO_PICTURES) and kind != _IMAGES_OF_THERAPY:
        raise ImageError(Reason.NO_PICTURE, "a dose, a segmentation or a map")
    if not len(tags):  # what pydicom returns where a file ends within its pixels
        raise ImageError(Reason.TRUNCATED, "the file ends within a value")
    rows, columns = value_of(tags, "Rows"), value_of(tags, "Columns")
    if rows is None or columns is None:
        raise ImageError(Reason.NO_PIXELS)
    num = int(value_of(tags, "NumberOfFrames") or 1)
    shape = (int(value_of(tags, "SamplesPerPixel") or 1), int(rows), int(columns))
    limits.check_pictures(num)
    limits.check(*shape)
    return num, shape


def _check_pixels(tags: Any, syntax: UID, num: int, shape: tuple[int, ...]) -> None:
    """Refuse a file without pixels, with fewer than it announces, or in a syntax that nothing here decodes."""
    name = next((name for name in _PIXELS if tag_of(name) in tags), None)
    if name is None:
        # pydicom returns what came before the end of a file; an image with rows and without pixels was cut off there.
        raise ImageError(Reason.TRUNCATED, "rows and columns, but no pixels")
    if syntax in _NATIVE:
        bits = int(value_of(tags, "BitsAllocated") or 0)
        halved = str(value_of(tags, "PhotometricInterpretation")) == "YBR_FULL_422"
        values = num * shape[1] * shape[2] * (2 if halved else shape[0])
        if len(stored(tags, name) or b"") < (values * bits + 7) // 8:
            raise ImageError(Reason.TRUNCATED, "fewer pixels than rows and columns")
    elif not stored(tags, name):
        raise ImageError(Reason.TRUNCATED, "no pixels")


def _frames(tags: Any, syntax: UID, num: int, shape: tuple[int, ...]) -> Iterator[tuple[NDArray[np.generic], str]]:
    """Yield the frames as pydicom decodes them, YBR turned into RGB, with what their values then mean."""
    photometric = str(value_of(tags, "PhotometricInterpretation"))
    if syntax in _LITTLE_ENDIAN and (in_place := greys(tags, num, shape, photometric)) is not None:
        bits = int(value_of(tags, "BitsStored"))
        yield from ((without_unused_bits(frame, bits), photometric) for frame in in_place)
        return
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError as error:
        raise ImageError(Reason.UNSUPPORTED, "a transfer syntax that nothing decodes") from error
    if not decoder.is_available:
        raise ImageError(Reason.UNSUPPORTED, "a transfer syntax whose decoder is not installed")
    try:
        for values, properties in decoder.iter_array(tags, indices=range(num)):
            yield values, str(properties["photometric_interpretation"])
    except RuntimeError as error:  # raised where every decoder failed, with what each of them said
        text = str(error).lower()
        if "not support" in text:
            raise ImageError(Reason.UNSUPPORTED, "pixels that no decoder supports") from error
        raise


def _picture(tags: Any, number: int, values: NDArray[np.generic], photometric: str) -> Picture:
    """Return one frame, with rescaling done, inverted greys turned, and colours from palettes."""
    bits, signed = int(value_of(tags, "BitsStored") or 0), bool(value_of(tags, "PixelRepresentation"))
    full: tuple[float, float] | None = (0.0, 2.0**bits - 1)
    if signed:
        full = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    spacing = spacing_of(tags, number)
    if photometric == "PALETTE COLOR":
        coloured = apply_color_lut(values, tags)
        return Picture(_channels(coloured), spacing, None, (0.0, float(np.iinfo(coloured.dtype).max)))
    if values.ndim == 3:
        return Picture(_channels(values), spacing, None, full)
    if values.dtype.kind == "f" or not bits:
        full = None
    return _grey(tags, number, values, photometric, full, spacing)


def _grey(
    tags: Any,
    number: int,
    values: NDArray[np.generic],
    photometric: str,
    full: tuple[float, float] | None,
    spacing: tuple[float, float] | None,
) -> Picture:
    slope, intercept = _rescale(tags, number)
    if value_of(tags, "ModalityLUTSequence"):
        values = apply_modality_lut(values, tags)
        full = (0.0, 2.0 ** int(tags.ModalityLUTSequence[0].LUTDescriptor[2]) - 1)
    elif (slope, intercept) != (1.0, 0.0):
        values = _rescaled(values, slope, intercept)
        full = None if full is None else (full[0] * slope + intercept, full[1] * slope + intercept)
        full = None if full is None else (min(full), max(full))
    window = _window(tags, number)
    if photometric == "MONOCHROME1":
        turn = sum(full) if full is not None else float(values.max()) + float(values.min())
        values = _rescaled(values, -1.0, turn)
        window = None if window is None else (turn - window[1], turn - window[0])
    plainly = supported(values[None])
    return Picture(plainly if plainly.flags.writeable else plainly.copy(), spacing, window, full)


def _rescaled(values: NDArray[np.generic], slope: float, intercept: float) -> NDArray[np.generic]:
    """Return slope * values + intercept: whole numbers in the smallest type that holds them, else float32."""
    if values.dtype.kind in "iu" and slope.is_integer() and intercept.is_integer():
        ends = [int(values.min()) * int(slope) + int(intercept), int(values.max()) * int(slope) + int(intercept)]
        for kind in (np.uint8, np.uint16, np.int16, np.int32):
            bounds = np.iinfo(kind)
            if kind is np.uint8 and values.dtype.itemsize > 1:
                continue
            if bounds.min <= min(ends) and max(ends) <= bounds.max and abs(intercept) < 2**31 and abs(slope) < 2**31:
                if slope == 1 and bounds.min <= intercept <= bounds.max:  # whole numbers wrap around, and back
                    alike = values.dtype.isnative and values.dtype.itemsize == np.dtype(kind).itemsize
                    same: NDArray[Any] = values.view(kind) if alike else values.astype(kind)
                    return np.asarray(same + kind(intercept))
                wide: NDArray[Any] = values.astype(np.int64)
                return np.asarray(wide * int(slope) + int(intercept)).astype(kind)
    return np.asarray(values.astype(np.float64) * slope + intercept).astype(np.float32)


def _channels(values: NDArray[np.generic]) -> NDArray[np.generic]:
    if values.shape[-1] not in (1, 3):
        raise ImageError(Reason.SHAPE, "neither one channel nor three")
    return supported(np.moveaxis(values, -1, 0))


def _rescale(tags: Any, number: int) -> tuple[float, float]:
    group = group_of(tags, number, "PixelValueTransformationSequence")
    slope, intercept = value_of(group, "RescaleSlope"), value_of(group, "RescaleIntercept")
    return float(1.0 if slope is None else slope), float(intercept or 0.0)


def _window(tags: Any, number: int) -> tuple[float, float] | None:
    """Return the ends of the first window, as PS3.3 C.11.2.1.2 and C.11.2.1.3 define them, or of the first table."""
    group = group_of(tags, number, "FrameVOILUTSequence")
    centre, width = (_first(value_of(group, name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is not None and width is not None and width >= 1:
        if str(value_of(group, "VOILUTFunction") or "LINEAR") == "LINEAR":
            centre, width = centre - 0.5, width - 1
        return (centre - width / 2, centre + width / 2) if width > 0 else None
    if value_of(group, "VOILUTSequence"):
        entries, first, _ = (int(number) for number in group.VOILUTSequence[0].LUTDescriptor)
        return float(first), float(first + (entries or 1 << 16) - 1)
    return None


def _first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    return float(value[0]) if isinstance(value, pydicom.multival.MultiValue) else float(value)


def _flags(tags: Any) -> frozenset[Flag]:
    kind, modality = str(value_of(tags, "SOPClassUID") or ""), str(value_of(tags, "Modality") or "").upper()
    conversion, parts = str(value_of(tags, "ConversionType") or "").upper(), value_of(tags, "ImageType") or ()
    words = {str(part).upper() for part in ([parts] if isinstance(parts, str) else parts)}
    captured = kind == _SECONDARY_CAPTURE or kind.startswith(_SECONDARY_CAPTURE + ".")
    found = {
        Flag.DECLARED_TEXT: str(value_of(tags, "BurnedInAnnotation") or "").upper() == "YES",
        Flag.DECLARED_FACE: str(value_of(tags, "RecognizableVisualFeatures") or "").upper() == "YES",
        Flag.OVERLAY: not _OVERLAYS.isdisjoint(tags.keys()),
        Flag.THUMBNAIL: bool(value_of(tags, "IconImageSequence")),
        Flag.SCREENSHOT: conversion == "WSD" or any("SCREEN" in word for word in words),
        Flag.SECONDARY_CAPTURE: captured or modality in ("SC", "OT", "DOC") or bool(conversion and conversion != "WSD"),
        Flag.ULTRASOUND: modality in ("US", "IVUS") or kind.startswith(_ULTRASOUND),
    }
    return frozenset(flag for flag, present in found.items() if present)
