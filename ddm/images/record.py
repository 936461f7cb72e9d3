"""What a scan keeps of one picture: its size, intensities, flags, and digests that tell it from others."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddm.images.fingerprint import fingerprint
from ddm.images.patients import keyed, pseudonyms
from ddm.images.picture import DecodedPicture, SliceLocation
from ddm.images.reasons import Flag, Reason
from ddm.protocol.base import Model

HASH_SIDE = 16
_MOST_LABEL = 256  # characters
MOST_CAPTION = 4096  # characters that a plan takes
_CELL_SAMPLES = 4  # of each side of a cell of the perceptual hash
_MEASURED = 1 << 12  # values that the mean is taken from, evenly spaced

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=128)]


class SliceRecord(Model):
    """The location of a slice in its scan; see `ddm.images.picture.SliceLocation`.

    Attributes:
        series: pseudonym of the scan.
        place_mm: along the slices' normal.
        sides_mm: height and width.
        head: whether the file names a head.
    """

    series: Hex
    place_mm: float | None = None
    sides_mm: tuple[float, float] | None = None
    head: bool | None = None


class PictureRecord(Model):
    """One picture of a file.

    Attributes:
        shape: (C, H, W) or (C, D, H, W).
        dtype: of its values.
        low: the lowest value.
        high: the highest.
        mean: of 4096 values or more, evenly spaced.
        flags: what a person must see first.
        kind: of its file.
        pixels: equal for equal pictures.
        hash: the difference hash, 256 bits; None of a picture that is too small or flat.
        patient: pseudonym of who its file says that it shows, and that of like spellings.
        label: its class, as its file names it.
        split: its part of the data set, as its file names it.
        caption: its text, as its file has it; of a longer one than plans take, one character more than that.
        slice: the scan that it is a slice of, where it may be of a head.
        reason: why this image of the file gives no picture; the rest then says nothing.
        detail: more of that.
    """

    shape: tuple[int, ...] = ()
    dtype: Annotated[str, Field(max_length=16)] = ""
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    flags: tuple[str, ...] = ()
    kind: Annotated[str, Field(max_length=16)] = ""
    pixels: Hex = ""
    hash: Hex | None = None
    patient: tuple[Hex, Hex] | None = None
    label: Annotated[str, Field(max_length=_MOST_LABEL)] | None = None
    split: Annotated[str, Field(max_length=_MOST_LABEL)] | None = None
    caption: Annotated[str, Field(max_length=MOST_CAPTION + 1)] | None = None
    slice: SliceRecord | None = None
    reason: str | None = None
    detail: Annotated[str, Field(max_length=512)] = ""

    @property
    def verdict(self) -> str | None:
        """Why this picture is not accepted: its reason, or the first of its flags; None where it is accepted."""
        if self.reason is not None:
            return Reason(self.reason).value
        if not self.flags:
            return None
        return next((flag.value for flag in Flag if flag.value in self.flags), None)


def look(decoded: DecodedPicture, key: bytes) -> PictureRecord:
    """Return what is kept of a picture; its patient becomes a pseudonym here, in the process that decoded it."""
    values = decoded.values
    sample = values.reshape(-1)[:: max(1, values.size // _MEASURED)]
    kind = repr((values.shape, values.dtype.str)).encode()
    pixels = fingerprint(b"pixels", (b"%d " % len(kind), kind, values.reshape(-1).view(np.uint8).data), key)
    low, high, mean = float(values.min()), float(values.max()), float(sample.mean(dtype=np.float64))
    return PictureRecord(
        shape=values.shape,
        dtype=str(values.dtype),
        low=low,
        high=high,
        mean=mean,
        flags=tuple(sorted(flag.value for flag in decoded.flags)),
        kind=decoded.kind,
        pixels=pixels,
        hash=difference_hash(values),
        patient=pseudonyms(decoded.patient, key),
        label=None if decoded.label is None else decoded.label[:_MOST_LABEL],
        split=None if decoded.split is None else decoded.split[:_MOST_LABEL],
        caption=None if decoded.caption is None else decoded.caption[: MOST_CAPTION + 1],
        slice=None if decoded.slice is None else _slice(decoded.slice, key),
    )


def _slice(found: SliceLocation, key: bytes) -> SliceRecord:
    series = keyed(b"series ", found.series, key)
    return SliceRecord(series=series, place_mm=found.place_mm, sides_mm=found.sides_mm, head=found.head)


def difference_hash(values: NDArray[np.generic]) -> str | None:
    """Return whether each cell of a grid is brighter than its right neighbour, 16 x 16 bits as hexadecimal digits.

    The grid has 16 x 17 cells; a cell is the mean of at most 4 x 4 values. Of a volume the middle slice counts, of
    colours their mean. None of an image below 32 x 34 pixels, or where hardly any cell differs.
    """
    image = values[:, values.shape[1] // 2] if values.ndim == 4 else values
    _, height, width = image.shape
    columns = HASH_SIDE + 1
    if height < 2 * HASH_SIDE or width < 2 * columns:
        return None
    flat = image.reshape(len(image), -1)
    taken = flat.take(_cells(height, width), 1).astype(np.float32)
    cells = (taken[0] if len(taken) == 1 else taken.mean(0)).sum(0).reshape(HASH_SIDE, columns)
    bits = cells[:, :-1] > cells[:, 1:]
    if not HASH_SIDE <= np.count_nonzero(bits) <= bits.size - HASH_SIDE:
        return None
    return np.packbits(bits).tobytes().hex()


@lru_cache(maxsize=64)
def _cells(height: int, width: int) -> NDArray[np.intp]:
    """Return which values of an image of this size each cell of the grid is the mean of, (values, cells)."""
    columns = HASH_SIDE + 1
    tall, wide = min(_CELL_SAMPLES, height // HASH_SIDE), min(_CELL_SAMPLES, width // columns)
    row_A = ((np.arange(HASH_SIDE * tall) + 0.5) * height / (HASH_SIDE * tall)).astype(np.intp)
    column_B = ((np.arange(columns * wide) + 0.5) * width / (columns * wide)).astype(np.intp)
    picked = (row_A[:, None] * width + column_B).reshape(HASH_SIDE, tall, columns, wide)
    return np.ascontiguousarray(picked.transpose(1, 3, 0, 2).reshape(tall * wide, HASH_SIDE * columns))
