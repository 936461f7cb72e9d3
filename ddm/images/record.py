"""What a scan keeps of one picture: size, range of values, flags, and digests that tell it from other pictures."""

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305
from numpy.typing import NDArray
from pydantic import Field

from ddm.images.patients import PatientRule, keyed, pseudonyms
from ddm.images.picture import DecodedPicture, SliceLocation
from ddm.images.reasons import Flag, Reason
from ddm.images.types import Values
from ddm.protocol.base import Model

HASH_SIDE = 16
MAX_CAPTION = 4096  # characters that a plan takes
_MAX_LABEL = 256  # characters
_CELL_SAMPLES = 4  # along each side of a cell of the difference hash
_NUM_SAMPLED = 1 << 12  # values that the mean is taken of, evenly spaced

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=128)]


class SliceRecord(Model):
    """The location of a slice in its scan; see `ddm.images.picture.SliceLocation`.

    Attributes:
        series: pseudonym of the scan.
        place_mm: position along the normal of the slices.
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
        dtype: type of its values.
        low: lowest value.
        high: highest value.
        mean: the mean of 4096 values or more, evenly spaced.
        full: lowest and highest value that the file's type can hold; None where it has no such bounds.
        flags: what a person must see before the picture is used.
        kind: format of its file.
        pixels: fingerprint, equal for equal pictures.
        hash: difference hash, 256 bits; None if the picture is too small or too flat.
        patient: pseudonym of the patient whom its file names, and the pseudonym that similar spellings share.
        label: its class, in the words of the file.
        split: its part of the data set, in the words of the file.
        caption: its text, in the words of the file; of a text longer than plans take, one character more than that.
        slice: its location in a scan that may show a head.
        reason: why this image of the file gives no picture; the other fields are then empty.
        detail: more about the reason.
    """

    shape: tuple[int, ...] = ()
    dtype: Annotated[str, Field(max_length=16)] = ""
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    full: tuple[float, float] | None = None
    flags: tuple[str, ...] = ()
    kind: Annotated[str, Field(max_length=16)] = ""
    pixels: Hex = ""
    hash: Hex | None = None
    patient: tuple[Hex, Hex] | None = None
    label: Annotated[str, Field(max_length=_MAX_LABEL)] | None = None
    split: Annotated[str, Field(max_length=_MAX_LABEL)] | None = None
    caption: Annotated[str, Field(max_length=MAX_CAPTION + 1)] | None = None
    slice: SliceRecord | None = None
    reason: str | None = None
    detail: Annotated[str, Field(max_length=512)] = ""

    @property
    def verdict(self) -> str | None:
        """Why this picture is not accepted: its reason, or the first of its flags; None if it is accepted."""
        if self.reason is not None:
            return Reason(self.reason).value
        # In the order of `Flag`.
        flags = [flag.value for flag in Flag if flag.value in self.flags]
        if not flags:
            return None
        return flags[0]


def record_of(
    picture: DecodedPicture,
    key: bytes,
    patient_rule: PatientRule = "spelling",
) -> PictureRecord:
    """Return the record of a picture; its patient becomes a pseudonym here, in the process that decoded it.

    Args:
        picture: from its decoder.
        key: secret of the data set's scans.
        patient_rule: which characters of an identifier distinguish patients.
    """
    values = picture.values
    flat = values.reshape(-1)
    step = max(1, values.size // _NUM_SAMPLED)
    sampled = flat[::step]
    layout = repr((values.shape, values.dtype.str)).encode()
    content = flat.view(np.uint8).data
    # The length of the layout comes first, so that no other layout and values give the same bytes.
    parts = (b"%d " % len(layout), layout, content)
    flags = sorted(flag.value for flag in picture.flags)
    return PictureRecord(
        shape=values.shape,
        dtype=str(values.dtype),
        low=float(values.min()),
        high=float(values.max()),
        mean=float(sampled.mean(dtype=np.float64)),
        full=picture.full,
        flags=tuple(flags),
        kind=picture.kind,
        pixels=fingerprint(b"pixels", parts, key),
        hash=difference_hash(values),
        patient=pseudonyms(picture.patient, key, patient_rule),
        label=_cut(picture.label, _MAX_LABEL),
        split=_cut(picture.split, _MAX_LABEL),
        caption=_cut(picture.caption, MAX_CAPTION + 1),
        slice=_slice_record(picture.slice, key),
    )


def _cut(text: str | None, max_characters: int) -> str | None:
    if text is None:
        return None
    return text[:max_characters]


def _slice_record(location: SliceLocation | None, key: bytes) -> SliceRecord | None:
    if location is None:
        return None
    return SliceRecord(
        series=keyed(b"series ", location.series, key),
        place_mm=location.place_mm,
        sides_mm=location.sides_mm,
        head=location.head,
    )


def difference_hash(values: Values) -> str | None:
    """Return for each cell of a grid whether it is brighter than its right neighbour: 16 x 16 bits, in hexadecimal.

    The grid has 16 x 17 cells; a cell is the mean of at most 4 x 4 values. Of a volume the middle slice counts, of
    colours their mean. None for an image below 32 x 34 pixels, or one in which hardly any cell differs.
    """
    image = values
    if values.ndim == 4:
        depth = values.shape[1]
        image = values[:, depth // 2]
    num_channels, height, width = image.shape
    num_columns = HASH_SIDE + 1
    if height < 2 * HASH_SIDE or width < 2 * num_columns:
        return None
    flat = image.reshape(num_channels, -1)
    indices = _cell_indices(height, width)
    samples = flat.take(indices, 1).astype(np.float32)
    if num_channels == 1:
        grey_samples = samples[0]
    else:
        grey_samples = samples.mean(0)
    # Sums compare like means, since all cells have as many samples.
    sums = grey_samples.sum(0)
    cells = sums.reshape(HASH_SIDE, num_columns)
    bits = cells[:, :-1] > cells[:, 1:]
    # A picture without structure would be near every other one like it.
    num_set = np.count_nonzero(bits)
    if not HASH_SIDE <= num_set <= bits.size - HASH_SIDE:
        return None
    packed = np.packbits(bits)
    return packed.tobytes().hex()


@lru_cache(maxsize=64)
def _cell_indices(height: int, width: int) -> NDArray[np.intp]:
    """Return which values of an image of this size each cell of the grid is the mean of, shape (values, cells)."""
    num_columns = HASH_SIDE + 1
    samples_down = min(_CELL_SAMPLES, height // HASH_SIDE)
    samples_across = min(_CELL_SAMPLES, width // num_columns)
    row_A = _middles(height, HASH_SIDE * samples_down)
    column_B = _middles(width, num_columns * samples_across)
    first_of_row_A1 = row_A[:, None] * width
    index_AB = first_of_row_A1 + column_B
    indices = index_AB.reshape(HASH_SIDE, samples_down, num_columns, samples_across)
    num_values = samples_down * samples_across
    num_cells = HASH_SIDE * num_columns
    by_place_in_cell = indices.transpose(1, 3, 0, 2)
    indices_by_cell = by_place_in_cell.reshape(num_values, num_cells)
    return np.ascontiguousarray(indices_by_cell)


def _middles(length: int, num_parts: int) -> NDArray[np.intp]:
    """Return the places in the middles of equal parts of a side."""
    middles = (np.arange(num_parts) + 0.5) * length / num_parts
    return middles.astype(np.intp)


def fingerprint(
    purpose: bytes,
    parts: Iterable[bytes | memoryview],
    key: bytes,
) -> str:
    """Return 32 hexadecimal digits that are equal for equal contents; they never leave the site.

    Poly1305 takes a tenth of the time of SHA-256. With one key for all it is not an authenticator, but it is a
    universal
    hash: two contents of up to n bytes that were chosen without the key share a fingerprint with probability n / 2^105
    at most (Bernstein 2005, "Poly1305-AES"). The key is beside the fingerprints in the private folder, and neither is
    shown to the one who makes images.

    Args:
        purpose: what they are for; fingerprints for different purposes say nothing about each other.
        parts: the parts of the content, one after the other.
        key: the key of the data set's scans.
    """
    state = Poly1305(_key_for(purpose, key))
    for part in parts:
        state.update(part)
    return state.finalize().hex()


@lru_cache(maxsize=8)
def _key_for(purpose: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"fingerprint " + purpose, hashlib.sha256)
