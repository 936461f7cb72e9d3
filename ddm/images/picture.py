"""One decoded picture, whatever file it came from: its values and what they mean; and what one file may ask for."""

# Shape legend: C channels, D slices, H height, W width.
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import numpy as np

from ddm.images.reasons import Flag, ImageError, Reason
from ddm.images.types import Bounds, Spacing, Values


@dataclass(frozen=True)
class DecodeLimits:
    """The most that one file may ask for.

    Attributes:
        values: the values of one picture; a header that announces more is refused before anything is allocated.
        pictures: the pictures of one file with frames or pages.
        seconds: for one file, and one second more for each of its MB. The process that started the decoder enforces it.
        memory_bytes: address space of a decoder process.
    """

    values: int = 1 << 28
    pictures: int = 1 << 16
    seconds: float = 60.0
    memory_bytes: int = 4 << 30

    def check(self, *shape: int) -> None:
        """Refuse a picture whose header announces a side below 1, or too many values.

        Raises:
            ImageError: damaged, or too large.
        """
        if min(shape, default=0) < 1:
            raise ImageError(Reason.DAMAGED, "a side of length zero")
        if prod(shape) > self.values:
            raise ImageError(Reason.TOO_LARGE, f"more than {self.values} values")

    def check_pictures(self, num: int) -> None:
        """Refuse a file of too many frames or pages.

        Raises:
            ImageError: damaged, or too large.
        """
        if num < 1:
            raise ImageError(Reason.DAMAGED, "no frames")
        if num > self.pictures:
            raise ImageError(Reason.TOO_LARGE, f"more than {self.pictures} frames")


@dataclass(frozen=True)
class Picture:
    """An image (C, H, W) or a volume (C, D, H, W), in the values of its file; never a name, a tag or a path.

    Args:
        values: uint8, uint16, int16, int32 or float32, in C order. The axes of a volume go from inferior to superior,
            from anterior to posterior, and from the patient's right to left; the rows and columns of an image are
            those on a screen. Dark is low: inverted greys are turned, colours are RGB without transparency, and the
            rescaling that the file states is done.
        spacing: mm between neighbours along each axis but the first; None where the file does not state it.
        spacing_in_mm: False where the file states the proportion of the sides alone, such as 2 to 1.
        window: lowest and highest value of the display window that the file states, in units of `values`; None
            without one.
        full: lowest and highest value that the file's type can hold, such as (0, 255), or (0, 4095) for twelve bits;
            None where the type has no such bounds.
    """

    values: Values
    spacing: tuple[float, ...] | None = None
    window: Bounds | None = None
    full: Bounds | None = None
    spacing_in_mm: bool = True


@dataclass(frozen=True)
class SliceLocation:
    """The position of one slice in its scan. Only slices in files of their own that may show a head have one.

    Attributes:
        series: the scan, in the words of the file; it may identify a patient.
        place_mm: position along the normal of the slices; None where the file does not state it.
        sides_mm: height and width; None where the file does not state them.
        head: whether the file names a head; None where it names no part of the body.
    """

    series: str = field(repr=False)
    place_mm: float | None = None
    sides_mm: Spacing | None = None
    head: bool | None = None


@dataclass(frozen=True)
class DecodedPicture(Picture):
    """A picture as its decoder returns it, with what belongs to it.

    The fields from `patient` on may identify a patient: they stay in private memory.

    Attributes:
        flags: what a person must see before the picture is used.
        kind: the format of the file, such as DICOM.
        patient: who is shown, in the words of the file.
        label: its class, in the words of the file.
        split: the part of the data set that it belongs to, such as train or test.
        caption: its text.
        slice: its position in the scan, if all slices together may show a face.
        head: whether the file names a head; None where it names no part of the body.
    """

    flags: frozenset[Flag] = frozenset()
    kind: str = ""
    patient: str | None = field(default=None, repr=False)
    label: str | None = field(default=None, repr=False)
    split: str | None = field(default=None, repr=False)
    caption: str | None = field(default=None, repr=False)
    slice: SliceLocation | None = field(default=None, repr=False)
    head: bool | None = None

    @classmethod
    def of(
        cls,
        picture: Picture,
        flags: frozenset[Flag] = frozenset(),
        kind: str = "",
        **others: Any,
    ) -> Self:
        """Return a picture together with its flags, the format of its file, and other fields by name."""
        return cls(
            picture.values,
            picture.spacing,
            picture.window,
            picture.full,
            picture.spacing_in_mm,
            flags,
            kind,
            **others,
        )

    def with_fields(self, **fields: Any) -> Self:
        """Return the picture with what its container or a table says about it, which counts before its own file."""
        stated = {name: value for name, value in fields.items() if value is not None}
        return replace(self, **stated)


def supported(values: Values) -> Values:
    """Return values in one of the types that `Picture` allows and in C order, without loss where the type allows.

    Raises:
        ImageError: complex or structured values, or values that are not finite.
    """
    kind = values.dtype.kind
    if kind == "f":
        with np.errstate(over="ignore"):  # what overflows is not finite, and refused
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ImageError(Reason.NOT_FINITE)
    elif kind == "b":
        values = values.astype(np.uint8)
    elif kind in "iu":
        values = values.astype(_supported_integer(values), copy=False)
    else:
        raise ImageError(Reason.UNSUPPORTED, "values that are not real numbers")
    return np.ascontiguousarray(values)


def _supported_integer(values: Values) -> type[np.generic]:
    size = values.dtype.itemsize
    signed = values.dtype.kind == "i"
    if signed and size <= 2:
        return np.int16
    if size == 1:
        return np.uint8
    if size == 2:
        return np.uint16
    if size == 4 and signed:
        return np.int32
    bounds = np.iinfo(np.int32)
    lowest = int(values.min(initial=0))
    highest = int(values.max(initial=0))
    if bounds.min <= lowest and highest <= bounds.max:
        return np.int32
    # Of larger numbers float32 keeps the first 24 bits.
    return np.float32
