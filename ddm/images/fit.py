"""How stored rows become images of a plan's shape and range; what does not fit is named by its row."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.layout import row_shapes
from ddm.images.rows import Rows
from ddm.images.types import Mask, Shape, Values, ValueType
from ddm.protocol.data import DataSpec

if TYPE_CHECKING:
    from torch import Tensor

_TOLERANCE = 1e-5  # beyond the ends of a range, for rounding by the program that wrote the values
_CHANNELS_LAST = "Put the channels first: np.moveaxis(images, -1, 1)."


def check_row(
    dtype: ValueType,
    shape: Shape,
    spec: DataSpec,
) -> None:
    """Refuse, by its header, an array that cannot hold images of this shape.

    Raises:
        DataError: says what it holds.
    """
    if shape not in row_shapes(spec):
        num_channels, *sides = spec.shape
        remedy = None
        if shape == (*sides, num_channels):
            remedy = _CHANNELS_LAST
        raise DataError(
            "image shape",
            expected=str(spec.shape),
            got=str(shape),
            remedy=remedy,
        )
    is_whole = dtype in (np.uint8, np.uint16)
    if dtype.kind != "f" and not is_whole:
        raise DataError(
            "image values",
            expected="floating point, uint8 or uint16",
            got=str(dtype),
            remedy="Convert the images first, such as by images.astype(numpy.float32).",
        )


def fit(
    array: Values,
    rows: Rows,
    *,
    spec: DataSpec,
) -> "Tensor":
    """Convert stored rows into images of the plan's range; whole numbers are spread over it by their type's range.

    Args:
        array: uint8, uint16 or floating point.
        rows: their numbers, for errors.
        spec: the plan's.

    Raises:
        DataError: names the first row with values that are not finite or outside the plan's range.
    """
    low, high = spec.range
    array = array.reshape(len(array), *spec.shape)
    if array.dtype in (np.uint8, np.uint16):
        largest = 65535
        if array.dtype == np.uint8:
            largest = 255
        share = array.astype(np.float32) / largest
        spread = low + (high - low) * share
        return _tensor(spread.astype(np.float32, copy=False))
    values = _as_float32(array)
    lowest = low - _TOLERANCE
    highest = high + _TOLERANCE
    # A comparison with NaN is false, so that NaN does not pass here.
    if not values.size or (values.min() >= lowest and values.max() <= highest):
        return _tensor(values)
    # Which row it is costs a second pass, which only an error pays.
    _check_finite(values, rows)
    flat = values.reshape(len(values), -1)
    is_below_B = flat.min(1) < lowest
    is_above_B = flat.max(1) > highest
    is_outside_B = np.asarray(is_below_B | is_above_B, dtype=np.bool_)
    row = _first(is_outside_B, rows)
    got = f"values outside this range in row {row}"
    raise DataError(
        "image values",
        expected=f"within [{low:g}, {high:g}]",
        got=got,
        remedy=(
            "Scale the images to this range, or save whole numbers of 8 or 16 bits, which are scaled "
            "here."
        ),
    )


def as_floats(array: Values, rows: Rows) -> "Tensor":
    """Convert stored rows to float32.

    Raises:
        DataError: names the first row with values that are not finite.
    """
    values = _as_float32(array)
    _check_finite(values, rows)
    return _tensor(values)


def _tensor(values: NDArray[np.float32]) -> "Tensor":
    import torch  # processes that decode arrays do without it

    return torch.from_numpy(values)


def _as_float32(array: Values) -> NDArray[np.float32]:
    # Values too large for float32 become infinite, and are refused as such.
    with np.errstate(over="ignore"):
        # A copy of memory that is read-only, of which torch would warn.
        return array.astype(np.float32, copy=not array.flags.writeable)


def _check_finite(values: NDArray[np.float32], rows: Rows) -> None:
    is_finite = np.isfinite(values)
    if not is_finite.all():
        by_row = is_finite.reshape(len(values), -1)
        is_finite_B = by_row.all(1)
        row = _first(np.asarray(~is_finite_B), rows)
        raise DataError(
            "image values",
            expected="finite numbers",
            got=f"NaN or infinite values in row {row}",
            remedy="Correct these images, or leave them out.",
        )


def _first(is_wrong_B: Mask, rows: Rows) -> int:
    """Return the number of the first of these rows for which the mask is set."""
    places = np.flatnonzero(is_wrong_B)
    first_place = int(places[0])
    return int(rows[first_place])
