"""Where the channels of an array are: nothing in the file states it, so that a shape must have one meaning alone.

| axes | meaning |
|---|---|
| (H, W) | grey |
| (C, H, W) or (H, W, C) | C is 1 or 3 |
| (C, D, H, W) or (D, H, W, C) | C is 1 to 4 |

A shape that fits two of these, such as (3, 64, 3), or none, is refused. So are four channels of an image: an array does
not say whether the fourth is transparency, near infrared or black ink.
"""

import numpy as np

from ddm.images.picture import DecodeLimits, supported
from ddm.images.reasons import ImageError, Reason
from ddm.images.types import Bounds, Shape, Values, ValueType
from ddm.protocol.data import DataSpec

_IMAGE_CHANNELS = (1, 3)
_VOLUME_CHANNELS = (1, 2, 3, 4)


def check_layout(shape: Shape) -> bool:
    """Return whether the channels of one image come last.

    Raises:
        ImageError: a shape without one certain meaning.
    """
    if len(shape) == 2:
        return False
    if len(shape) not in (3, 4):
        detail = f"{len(shape)} axes for an image: the first axis counts the images; save one image as (1, H, W)"
        raise ImageError(Reason.SHAPE, detail)
    counts: tuple[int, ...] = _VOLUME_CHANNELS
    if len(shape) == 3:
        counts = _IMAGE_CHANNELS
    is_first = shape[0] in counts
    is_last = shape[-1] in counts
    if is_first and is_last:
        raise ImageError(
            Reason.SHAPE, "the first axis and the last may be the channels: save larger images"
        )
    if not is_first and not is_last:
        raise ImageError(Reason.SHAPE, _without_channels(shape))
    return is_last


def _without_channels(shape: Shape) -> str:
    if len(shape) == 4:
        return "four axes without 1 to 4 channels first or last"
    if 4 in (shape[0], shape[-1]):
        return "four channels, of which an array does not say whether the fourth is transparency: save three"
    if 2 in (shape[0], shape[-1]):
        return "two channels: an image has 1 or 3"
    return (
        "three axes without 1 or 3 channels: a volume needs an axis of channels first, (1, D, H, W)"
    )


def channels_first(values: Values, limits: DecodeLimits) -> Values:
    """Return one image or volume in the axes and in a type of `ddm.images.picture.Picture`.

    Raises:
        ImageError: a shape without one certain meaning, or values that are not finite.
    """
    limits.check(*(values.shape or (0,)))
    if check_layout(values.shape):
        values = np.moveaxis(values, -1, 0)
    elif values.ndim == 2:
        values = values[None]
    # What is too large for single precision becomes infinite, and is refused as that.
    with np.errstate(over="ignore"):
        return supported(values)


def check_dtype(dtype: ValueType) -> None:
    """Refuse an array by its header.

    Raises:
        ImageError: complex numbers, dates or text.
    """
    if dtype.kind not in "biuf":
        raise ImageError(Reason.UNSUPPORTED, "values that are not real numbers")


def full_range(dtype: ValueType) -> Bounds | None:
    """Return the lowest and the highest value of a type of at most 16 bits; None for others, which use little of it."""
    if dtype.kind == "b":
        return 0.0, 1.0
    if dtype.kind in "iu" and dtype.itemsize < 4:
        bounds = np.iinfo(np.dtype(dtype.str))
        return float(bounds.min), float(bounds.max)
    return None


def row_shapes(spec: DataSpec) -> tuple[Shape, ...]:
    """Return the shapes in which a row may hold an image of a plan: its own, flat, or without its only channel."""
    flat = (spec.dim,)
    num_channels, *sides = spec.shape
    if num_channels == 1 and len(sides) < 3:
        return (spec.shape, tuple(sides), flat)
    return (spec.shape, flat)
