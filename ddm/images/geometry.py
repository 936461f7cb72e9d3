"""The geometry of a picture: what is cut out of it, how it is resampled, and how it comes to the plan's shape."""

# Shape legend: C channels, D slices, H height, W width; "sides" are all axes but the first.
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from ddm.errors import DataError
from ddm.protocol.transform import Content, CropFit, PadFit, Slices, SpacingFit, StretchFit, TransformSpec

Floats = NDArray[np.float32]
Sides = tuple[int, ...]
_AXES = {"axial": 0, "coronal": 1, "sagittal": 2}


def covering_size(extent: Sequence[float], shape: Sides) -> Sides:
    """Return the size in equal steps of the largest length for which no side is shorter than `shape`.

    Args:
        extent: the length of each side, above 0.
        shape: the fewest steps along each.
    """
    side = min(length / least for length, least in zip(extent, shape, strict=True))
    return tuple(max(least, round(length / side)) for length, least in zip(extent, shape, strict=True))


def fitting_size(extent: Sequence[float], shape: Sides) -> Sides:
    """Return the size in equal steps of the smallest length for which no side is longer than `shape`.

    Args:
        extent: the length of each side, above 0.
        shape: the most steps along each.
    """
    side = max(length / most for length, most in zip(extent, shape, strict=True))
    return tuple(min(most, max(1, round(length / side))) for length, most in zip(extent, shape, strict=True))


def resampled_size(spec: TransformSpec, sides: Sides, spacing: tuple[float, ...] | None, shape: Sides) -> Sides:
    """Return the sides to which a picture is resampled before it is cut and padded; arithmetic alone.

    Args:
        spec: the plan's.
        sides: of the picture.
        spacing: mm between neighbours along them; None where nothing is known, and all are taken to be equal.
        shape: the plan's sides.

    Raises:
        DataError: a side without a finite length above 0, or no spacing where it is needed.
    """
    if isinstance(spec.fit, SpacingFit) and spacing is None:
        raise DataError("spacing", expected="a file that states it, in mm", got="a file without it")
    extent = [length * side for length, side in zip(spacing or (1.0,) * len(sides), sides, strict=True)]
    if not all(0 < length < float("inf") for length in extent):
        raise DataError("axes", expected="finite lengths above 0", got="a length that is zero or not finite")
    try:
        return _resampled_size(spec, extent, sides, shape)
    except ArithmeticError as error:  # lengths so unlike that their proportion is no number
        raise DataError("axes", expected="lengths that can be compared", got="lengths too unlike") from error


def _resampled_size(spec: TransformSpec, extent: Sequence[float], sides: Sides, shape: Sides) -> Sides:
    match spec.fit:
        case CropFit():
            return covering_size(extent, shape)
        case PadFit():
            return fitting_size(extent, shape)
        case StretchFit():
            return shape
        case SpacingFit(mm=mm):
            return tuple(max(1, round(length / mm)) for length in extent)
    return sides


def resampling_bytes(channels: int, before: Sides, after: Sides) -> int:
    """Return the bytes of a picture between its resampling along rows and columns and that along slices."""
    between = (*before[:-2], *after[-2:])
    return 4 * channels * max(prod(after), prod(between))


def antialiased(values: Floats, size: Sides) -> Floats:
    """Resample linearly; a side that shrinks is smoothed by a triangle as wide as the step between new samples.

    The first and the last sample keep their distance of half a step from the edge (half-pixel centres). Weights are
    positive and sum to 1, at the edges too: a constant stays, and nothing lies beyond the values given.

    Args:
        values: shape (C, H, W) or (C, D, H, W).
        size: of the new sides.
    """
    if values.shape[1:] == size:
        return values
    x = torch.from_numpy(np.ascontiguousarray(values))
    if len(size) == 2:
        return _plane(x[None], size)[0].numpy()
    channels, depth, *_ = x.shape
    planes = _plane(x.flatten(0, 1)[:, None], size[1:])  # (C D, 1, h, w)
    columns = planes.reshape(1, channels, depth, -1)
    return _plane(columns, (size[0], columns.shape[-1])).reshape(channels, *size).numpy()


def _plane(x: torch.Tensor, size: Sides) -> torch.Tensor:
    if tuple(x.shape[2:]) == size:
        return x
    return interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)


def middle(values: Floats, shape: Sides) -> Floats:
    """Cut (C, ...) to its middle where a side is longer; an odd remainder loses one more at the end."""
    starts = [max(0, size - kept) // 2 for size, kept in zip(values.shape[1:], shape, strict=True)]
    return values[(slice(None), *(slice(start, start + kept) for start, kept in zip(starts, shape, strict=True)))]


def padded(values: Floats, shape: Sides, value: float) -> Floats:
    """Put (C, ...) into the middle of `shape`, where no side is longer; an odd remainder adds one more at the end."""
    if values.shape[1:] == shape:
        return values
    found = np.full((values.shape[0], *shape), value, np.float32)
    starts = [(side - size) // 2 for size, side in zip(values.shape[1:], shape, strict=True)]
    places = [slice(start, start + size) for start, size in zip(starts, values.shape[1:], strict=True)]
    found[(slice(None), *places)] = values
    return found


def content_of(values: Floats, content: Content, target: tuple[float, float]) -> Floats:
    """Cut (C, ...) to the box of what is brighter than the threshold in any channel.

    Args:
        values: in the plan's range.
        content: threshold and margin.
        target: the plan's range.

    Raises:
        DataError: nothing is brighter.
    """
    low, high = target
    bright = (values > np.float32(low + content.threshold * (high - low))).any(0)
    if not bright.any():
        raise DataError("values", expected="some above transform.content.threshold", got="a picture darker than that")
    places = []
    for axis, side in enumerate(bright.shape):
        others = tuple(other for other in range(bright.ndim) if other != axis)
        found = np.flatnonzero(np.any(bright, axis=others))
        first, last = int(found[0]), int(found[-1]) + 1
        margin = round(content.margin * (last - first))
        places.append(slice(max(0, first - margin), min(side, last + margin)))
    return values[(slice(None), *places)]


def axis_of(slices: Slices) -> int:
    """Return which side of a volume its slices are taken along, from 0."""
    return _AXES[slices.axis]


def slices_of(
    values: Floats, slices: Slices, spacing: tuple[float, ...] | None
) -> Iterator[tuple[Floats, tuple[float, ...] | None]]:
    """Yield slices of a volume (C, D, H, W) as images upright on a screen, each with the spacing of its sides."""
    axis = axis_of(slices)
    sides = [side for side in range(3) if side != axis]
    kept = None if spacing is None else tuple(spacing[side] for side in sides)
    for number in slice_numbers(values.shape[1 + axis], slices):
        image = np.take(values, number, 1 + axis)
        yield image if axis == 0 else image[:, ::-1], kept  # the head is up


def slice_numbers(length: int, slices: Slices) -> list[int]:
    """Return which slices of an axis are taken: the middles of equal parts of its share.

    There are always `count`: where the axis is shorter, slices are taken more than once, since their number may not
    tell how deep a volume is.
    """
    low, high = (length * end for end in slices.share)
    step = (high - low) / slices.count
    return [min(length - 1, int(low + (k + 0.5) * step)) for k in range(slices.count)]
