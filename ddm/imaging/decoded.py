"""What a decoder returns for each picture of a file, and the bounds within which it works."""

from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from ddm.imaging.picture import Picture
from ddm.imaging.reasons import Flag, ImageError, Reason


@dataclass(frozen=True)
class Limits:
    """The most that one file may ask for.

    Attributes:
        values: of one picture: a header that announces more is refused before anything is allocated.
        pictures: of one file with frames or pages.
        seconds: of one file, and a second more for each of its MB. Held by the process that started the decoder.
        memory_bytes: of the address space of a decoder's process.
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
            raise ImageError(Reason.DAMAGED, "a side of no length")
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
class Slice:
    """One slice of a scan, where it may be of a head and does not lie in one volume with the others.

    Attributes:
        series: which one, in the words of the file; it may identify.
        place_mm: where along the slices' normal; None where the file does not say.
        sides_mm: its height and width; None where the file does not say.
        head: whether the file names a head; None where it names no part of the body.
    """

    series: str = field(repr=False)
    place_mm: float | None = None
    sides_mm: tuple[float, float] | None = None
    head: bool | None = None


@dataclass(frozen=True)
class Decoded:
    """One picture, and what belongs to it. The last five fields may identify: they are for private memory alone.

    Attributes:
        picture: the values.
        flags: what a person must see before the picture is used.
        kind: of the file, such as DICOM.
        patient: who it shows, in the words of the file.
        label: its class, in the words of the file.
        split: the part of its data set that it belongs to.
        caption: its text.
        slice: the scan that it is a slice of, where the slices together may show a face.
    """

    picture: Picture
    flags: frozenset[Flag] = frozenset()
    kind: str = ""
    patient: str | None = field(default=None, repr=False)
    label: str | None = field(default=None, repr=False)
    split: str | None = field(default=None, repr=False)
    caption: str | None = field(default=None, repr=False)
    slice: Slice | None = field(default=None, repr=False)


def plain(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return values in one of a picture's types and in C order, without loss where the type allows.

    Raises:
        ImageError: complex, structured or other values that are no greys, or values that are not finite.
    """
    kind = values.dtype
    if kind.kind == "f":
        values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ImageError(Reason.NOT_FINITE)
    elif kind.kind == "b":
        values = values.astype(np.uint8)
    elif kind.kind in "iu":
        values = values.astype(_integers(values), copy=False)
    else:
        raise ImageError(Reason.UNSUPPORTED, "values that are no real numbers")
    return np.ascontiguousarray(values)


def _integers(values: NDArray[np.generic]) -> type[np.generic]:
    size, signed = values.dtype.itemsize, values.dtype.kind == "i"
    if size <= 2:
        return (np.int16 if signed else np.uint8) if size == 1 else (np.int16 if signed else np.uint16)
    if size == 4 and signed:
        return np.int32
    bounds = np.iinfo(np.int32)
    fits = int(values.max(initial=0)) <= bounds.max and int(values.min(initial=0)) >= bounds.min
    return np.int32 if fits else np.float32
