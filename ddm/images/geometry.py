"""The geometry of a picture: what is cut out of it, how it is resampled, and how it comes to the plan's shape."""

# Shape legend: C channels, D slices, H height, W width; "sides" are all axes but the first.
from collections.abc import Iterator, Sequence
from math import inf, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from ddm.errors import DataError
from ddm.images.types import Bounds, Shape
from ddm.protocol.transform import (
    Content,
    CropFit,
    PadFit,
    Slices,
    SpacingFit,
    StretchFit,
    TransformSpec,
)

Floats = NDArray[np.float32]
Sides = Shape
"""The lengths of all axes but that of the channels."""
_FLOAT_BYTES = 4
_AXES = {"axial": 0, "coronal": 1, "sagittal": 2}
_ALL_CHANNELS = slice(None)


def covering_size(extent: Sequence[float], shape: Sides) -> Sides:
    """Return the size in equal steps of the largest length for which no side is shorter than `shape`.

    Args:
        extent: the length of each side, above 0.
        shape: the minimum of steps along each.
    """
    step = min(length / min_steps for length, min_steps in zip(extent, shape, strict=True))
    size = []
    for length, min_steps in zip(extent, shape, strict=True):
        num_steps = round(length / step)
        # Rounding alone could leave a side one step too short.
        size.append(max(min_steps, num_steps))
    return tuple(size)


def fitting_size(extent: Sequence[float], shape: Sides) -> Sides:
    """Return the size in equal steps of the smallest length for which no side is longer than `shape`.

    Args:
        extent: the length of each side, above 0.
        shape: the maximum of steps along each.
    """
    step = max(length / max_steps for length, max_steps in zip(extent, shape, strict=True))
    size = []
    for length, max_steps in zip(extent, shape, strict=True):
        num_steps = max(1, round(length / step))
        size.append(min(max_steps, num_steps))
    return tuple(size)


def resampled_size(
    spec: TransformSpec,
    sides: Sides,
    spacing: tuple[float, ...] | None,
    shape: Sides,
) -> Sides:
    """Return the sides to which a picture is resampled before it is cut and padded; arithmetic alone.

    Args:
        spec: the plan's.
        sides: the sides of the picture.
        spacing: mm between neighbours along them; None where nothing is known, and all are taken to be equal.
        shape: the plan's sides.

    Raises:
        DataError: a side without a finite length above 0, or no spacing where it is needed.
    """
    if isinstance(spec.fit, SpacingFit) and spacing is None:
        raise DataError(
            "spacing",
            expected="a file that states it, in mm",
            got="a file without it",
            remedy=(
                "Leave these files out, or use a plan whose transform.fit is of another kind than "
                "spacing."
            ),
        )
    steps = spacing or (1.0,) * len(sides)
    extent = [step * side for step, side in zip(steps, sides, strict=True)]
    if not all(0 < length < inf for length in extent):
        raise DataError(
            "axes",
            expected="finite lengths above 0",
            got="a length that is zero or not finite",
        )
    try:
        return _resampled_size(spec, extent, sides, shape)
    except ArithmeticError as error:
        # Lengths so different that their proportion is not a number.
        raise DataError(
            "axes",
            expected="lengths that can be compared",
            got="lengths that differ too much",
        ) from error


def _resampled_size(
    spec: TransformSpec,
    extent: Sequence[float],
    sides: Sides,
    shape: Sides,
) -> Sides:
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


def resampling_bytes(
    channels: int,
    before: Sides,
    after: Sides,
) -> int:
    """Return the bytes of a picture between its resampling along rows and columns and that along slices."""
    between = (*before[:-2], *after[-2:])
    num_values = max(prod(after), prod(between))
    return _FLOAT_BYTES * channels * num_values


def antialiased(values: Floats, size: Sides) -> Floats:
    """Resample linearly; a side that shrinks is smoothed by a triangle as wide as the step between new samples.

    The first and the last sample keep their distance of half a step from the edge (half-pixel centres). Weights are
    positive and sum to 1, at the edges too: a constant stays, and no result is beyond the given values.

    Args:
        values: shape (C, H, W) or (C, D, H, W).
        size: the new sides.
    """
    if values.shape[1:] == size:
        return values
    # torch resamples two axes at a time: first rows and columns of every slice, then the slices of every column.
    x = torch.from_numpy(np.ascontiguousarray(values))
    if len(size) == 2:
        resampled_image = _plane(x[None], size)
        return resampled_image[0].numpy()
    channels, depth, *_ = x.shape
    new_depth, *slice_size = size
    slices = x.flatten(0, 1)[:, None]  # (C D, 1, H, W)
    resampled_slices = _plane(slices, tuple(slice_size))
    columns = resampled_slices.reshape(1, channels, depth, -1)
    num_columns = columns.shape[-1]
    resampled = _plane(columns, (new_depth, num_columns))
    return resampled.reshape(channels, *size).numpy()


def _plane(x: torch.Tensor, size: Sides) -> torch.Tensor:
    """Resample the last two axes."""
    if tuple(x.shape[2:]) == size:
        return x
    return interpolate(
        x,
        size,
        mode="bilinear",
        align_corners=False,
        antialias=True,
    )


def middle(values: Floats, shape: Sides) -> Floats:
    """Cut (C, ...) to its middle where a side is longer; an odd remainder loses one more at the end."""
    ranges = [_ALL_CHANNELS]
    for size, target in zip(values.shape[1:], shape, strict=True):
        start = max(0, size - target) // 2
        ranges.append(slice(start, start + target))
    return values[tuple(ranges)]


def padded(
    values: Floats,
    shape: Sides,
    value: float,
) -> Floats:
    """Put (C, ...) into the middle of `shape`, where no side is longer; an odd remainder adds one more at the end."""
    if values.shape[1:] == shape:
        return values
    channels, *sides = values.shape
    result = np.full((channels, *shape), value, np.float32)
    ranges = [_ALL_CHANNELS]
    for size, target in zip(sides, shape, strict=True):
        start = (target - size) // 2
        ranges.append(slice(start, start + size))
    result[tuple(ranges)] = values
    return result


def content_of(
    values: Floats,
    content: Content,
    target: Bounds,
) -> Floats:
    """Cut (C, ...) to the box of what is brighter than the threshold in any channel.

    Args:
        values: in the plan's range.
        content: threshold and margin.
        target: the plan's range.

    Raises:
        DataError: nothing is brighter.
    """
    low, high = target
    span = high - low
    threshold = np.float32(low + content.threshold * span)
    is_bright = (values > threshold).any(0)
    if not is_bright.any():
        expected = "some above transform.content.threshold"
        raise DataError("values", expected=expected, got="a darker picture")
    ranges = [_ALL_CHANNELS]
    for axis, side in enumerate(is_bright.shape):
        other_axes = tuple(other for other in range(is_bright.ndim) if other != axis)
        has_bright_values = np.any(is_bright, axis=other_axes)
        bright_places = np.flatnonzero(has_bright_values)
        first = int(bright_places[0])
        end = int(bright_places[-1]) + 1
        margin = round(content.margin * (end - first))
        start = max(0, first - margin)
        stop = min(side, end + margin)
        ranges.append(slice(start, stop))
    return values[tuple(ranges)]


def axis_of(slices: Slices) -> int:
    """Return which side of a volume its slices are taken along, from 0."""
    return _AXES[slices.axis]


def slices_of(
    values: Floats,
    slices: Slices,
    spacing: tuple[float, ...] | None,
) -> Iterator[tuple[Floats, tuple[float, ...] | None]]:
    """Yield slices of a volume (C, D, H, W) as images upright on a screen, each with the spacing of its sides."""
    axis = axis_of(slices)
    image_spacing = None
    if spacing is not None:
        image_spacing = (*spacing[:axis], *spacing[axis + 1 :])
    length = values.shape[1 + axis]
    for number in slice_numbers(length, slices):
        image = np.take(values, number, 1 + axis)
        # Rows of a coronal or sagittal slice ascend from the feet; on a screen the head is up.
        if axis != 0:
            image = image[:, ::-1]
        yield image, image_spacing


def slice_numbers(length: int, slices: Slices) -> list[int]:
    """Return which slices of an axis are taken: the middles of equal parts of its share.

    There are always `count`: where the axis is shorter, slices are taken more than once, since their number must not
    reveal how deep a volume is.
    """
    start = length * slices.share[0]
    end = length * slices.share[1]
    step = (end - start) / slices.count
    numbers = []
    for number in range(slices.count):
        middle_of_part = start + (number + 0.5) * step
        numbers.append(min(length - 1, int(middle_of_part)))
    return numbers
