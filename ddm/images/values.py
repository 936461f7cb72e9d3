"""Which values of a picture become the plan's range, and its channels."""

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.picture import Picture
from ddm.protocol.transform import FullRange, PercentilesRange, TransformSpec, ValuesRange, WindowRange

_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601, as in JPEG and DICOM's YBR_FULL
_AT_ONCE = 1 << 18  # values mapped in double precision at once


def with_channels(values: NDArray[np.generic], spec: TransformSpec, wanted: int) -> NDArray[np.generic]:
    """Return the channels that the plan asks for.

    Args:
        values: shape (C, ...).
        spec: the plan's.
        wanted: the plan's number of channels.

    Raises:
        DataError: the picture has a number of channels that this does not take.
    """
    found = values.shape[0]
    match spec.channels:
        case "grey" if found == 3:
            red, green, blue = (values[c].astype(np.float32) for c in range(3))
            grey: NDArray[np.generic] = _LUMINANCE[0] * red + _LUMINANCE[1] * green + _LUMINANCE[2] * blue
            return grey[None]
        case "rgb" if found == 1:
            return np.broadcast_to(values, (3, *values.shape[1:]))
        case "pick" if found > max(spec.pick):
            return values[list(spec.pick)]
        case "pick":
            raise DataError("channels", expected=f"more than {max(spec.pick)}, to pick from", got=f"{found}")
    if found != wanted:
        expected = "1 or 3" if spec.channels in ("grey", "rgb") else f"{wanted}, as the plan requires"
        raise DataError("channels", expected=expected, got=f"{found}", remedy=_remedy(found, wanted))
    return values


def _remedy(found: int, wanted: int) -> str | None:
    other = {(3, 1): "grey", (1, 3): "rgb"}.get((found, wanted))
    return f'A plan takes such pictures with transform.channels = "{other}".' if other else None


def bounds(values: NDArray[np.generic], picture: Picture, spec: TransformSpec) -> tuple[float, float]:
    """Return the two values that become the ends of the plan's range.

    Args:
        values: the picture's, in the channels of the plan.
        picture: knows window and full range of its file.
        spec: the plan's.

    Raises:
        DataError: a picture without a window or bounds where they are asked for, with values that are not finite, or
            with the same value nearly everywhere.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError("values", expected="finite numbers", got="NaN or infinite values")
    low, high = map(float, _asked(values, picture, spec.range))
    if not high > low:
        raise DataError("values", expected="values that differ", got="the same value nearly everywhere")
    if not isfinite(high - low):
        raise DataError("values", expected="a finite range", got="numbers too large for one")
    return low, high


def _asked(
    values: NDArray[np.generic], picture: Picture, asked: WindowRange | ValuesRange | PercentilesRange | FullRange
) -> tuple[float, float]:
    match asked:
        case ValuesRange(low=low, high=high):
            return low, high
        case PercentilesRange(low=low, high=high):
            numbers: NDArray[Any] = values
            least, most = np.percentile(numbers, (low, high))
            return least, most
        case FullRange():
            if picture.full is None:
                got = "floating point or 32 bits, which have no bounds of their own"
                raise DataError("values", expected="a type with a full range, such as 8 bits", got=got)
            return picture.full
        case WindowRange(fallback=fallback):
            if picture.window is not None:
                return picture.window
            if fallback == "refuse":
                raise DataError("window", expected="a window that the file states", got="a file without one")
            return _asked(values, picture, FullRange() if fallback == "full" else PercentilesRange())


def mapped(values: NDArray[np.generic], least: float, most: float, target: tuple[float, float]) -> NDArray[np.float32]:
    """Map `least` and `most` to the ends of `target`, linearly, and clip values beyond; in double precision.

    Returns:
        The same shape, float32, in memory of its own.
    """
    low, high = target
    found = np.empty(values.shape, np.float32)
    flat, given = found.reshape(-1), np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        part = given[start : start + _AT_ONCE].astype(np.float64)
        share = ((part - least) / (most - least)).clip(0, 1)
        flat[start : start + _AT_ONCE] = low + (high - low) * share
    return found
