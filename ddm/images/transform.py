"""Carries out a plan's transform: one picture in, samples of the plan's shape and range out.

The same code serves silos and the aggregator's public images. A transform depends on nothing but the picture: no
chance, no other picture, no name of a file. A picture that it does not take is an error where pictures are public; at
a silo it becomes a blank sample, so that no plan finds out by a number or a stop which pictures there are.

The steps, in this order, each as `ddm.protocol.transform` describes it:

1. channels;
2. range: two values become the ends of the plan's range, linearly, and values beyond them are clipped;
3. content: the picture is cut to the box of what is bright;
4. slices: a volume becomes images, the same number whatever its depth, and an image is repeated as often;
5. fit: resampled, cut to the middle, padded.

All is computed in float32, the range in double precision, so that two processors differ by its rounding alone.
"""

import json
from math import isfinite, prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddm.errors import DataError
from ddm.images.geometry import (
    Floats,
    antialiased,
    axis_of,
    content_of,
    middle,
    padded,
    resampled_size,
    resampling_bytes,
    slices_of,
)
from ddm.images.picture import Picture
from ddm.images.types import Bounds, Numbers, Shape, Values, ValueType
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import (
    FullRange,
    PercentilesRange,
    SpacingFit,
    TransformSpec,
    ValuesRange,
    WindowRange,
)
from ddm.system.memory import machine_bytes

VERSION = 2  # of the steps: whatever was made by others is made again
_TYPES = ("uint8", "uint16", "int16", "int32", "float32")
# Copies of a picture in float32 at one time: its channels, what percentiles sort, the mapped values, the content.
_NUM_COPIES = 4
# A picture may be resampled to this many times its own values, or a sample's, before its middle is cut out.
_MAX_ENLARGEMENT = 16
_ALWAYS_ALLOWED_VALUES = 1 << 22
# Weights of red, green and blue in the luminance: ITU-R BT.601, as in JPEG and DICOM's YBR_FULL.
_RED_WEIGHT = 0.299
_GREEN_WEIGHT = 0.587
_BLUE_WEIGHT = 0.114
_VALUES_AT_ONCE = 1 << 18  # mapped in double precision at one time
_LARGEST = {"uint8": 255, "uint16": 65535}


class Transform:
    """What a plan makes of every picture.

    Args:
        spec: the plan's `transform`.
        data: the plan's `data`.
        max_bytes: most memory that one picture may take at any step; by default that of this machine.

    Raises:
        DataError: the transform does not fit the shape or the range.
    """

    def __init__(
        self,
        spec: TransformSpec,
        data: DataSpec,
        *,
        max_bytes: int | None = None,
    ) -> None:
        misfit = spec.misfit(data)
        if misfit:
            raise DataError(
                "transform",
                expected=misfit,
                got=f"shape {data.shape}, range {data.range}",
                remedy="Change the table [transform] or [data] of the recipe, so that one fits the other.",
            )
        self.spec = spec
        self.data = data
        self._max_bytes = max_bytes or machine_bytes()

    @property
    def recipe(self) -> str:
        """The name of everything that the samples depend on besides the picture."""
        spec = self.spec.model_dump(mode="json")
        data = self.data.model_dump(mode="json")
        return json.dumps([VERSION, spec, data])

    @property
    def dtype(self) -> ValueType:
        """The compact type of `stored`."""
        return np.dtype(self.spec.storage)

    @property
    def num(self) -> int:
        """How many samples every picture becomes."""
        if not self.spec.slices:
            return 1
        return self.spec.slices.count

    @property
    def blank(self) -> list[Floats]:
        """The samples of a picture that cannot be used: the lowest value of the plan's range everywhere."""
        lowest, _ = self.data.range
        sample = np.full(self.data.shape, lowest, np.float32)
        return [sample] * self.num

    def apply(self, picture: Picture) -> list[Floats]:
        """Return the samples of a picture: one, or one for each slice.

        Args:
            picture: as decoded.

        Returns:
            Each of the plan's shape, float32, within the plan's range, in C order; `num` of them.

        Raises:
            DataError: a picture that the plan does not take, or that would take too much memory; never its name.
        """
        samples, problem = self._samples(picture)
        if problem is not None:
            raise problem
        return samples

    def apply_to_any(self, picture: Picture) -> tuple[list[Floats], str | None]:
        """Return the samples of a private picture, and why they are `blank`, if they are.

        A plan chooses what it does not take. So that it learns from no number, stop or text which pictures that were,
        nothing that a picture holds, and nothing in its header, makes this raise or changes the number of samples.

        Args:
            picture: as decoded.
        """
        try:
            samples, problem = self._samples(picture)
        except Exception as error:  # of any kind: what one picture makes happen would be an answer
            return self.blank, str(error) or type(error).__name__
        if problem is not None:
            return self.blank, str(problem)
        return samples, None

    def resampled_sides(self, picture: Picture) -> tuple[Shape, Shape]:
        """Return the sides of a picture that the plan takes, of a volume's slices, and the sides that they get.

        It follows from the header alone: a picture whose content is cut out is enlarged more than that.

        Raises:
            DataError: a header that the plan does not take.
        """
        self._check_header(picture)
        sides = picture.values.shape[1:]
        spacing = picture.spacing
        if self.spec.slices is not None and len(sides) == 3:
            axis = axis_of(self.spec.slices)
            sides = (*sides[:axis], *sides[axis + 1 :])
            if spacing is not None:
                spacing = (*spacing[:axis], *spacing[axis + 1 :])
        plan_sides = self.data.shape[1:]
        return sides, resampled_size(self.spec, sides, spacing, plan_sides)

    def stored(self, sample: Floats) -> Values:
        """Return a sample in its compact type; see `to_stored`."""
        return to_stored(sample, self.spec.storage, self.data.range)

    def _samples(self, picture: Picture) -> tuple[list[Floats], DataError | None]:
        """Return samples, and why the values of the picture are not taken.

        Raises:
            DataError: its header is not taken.
        """
        self._check_header(picture)
        spec = self.spec
        plan_range = self.data.range
        values = with_channels(picture.values, spec, self.data.shape[0])
        problem: DataError | None = None
        try:
            low, high = bounds(values, picture, spec)
            floats = mapped(values, low, high, plan_range)
            if spec.content:
                floats = content_of(floats, spec.content, plan_range)
        except DataError as error:
            # The other steps are done all the same: leaving them out would take less time, which a plan could measure.
            floats = np.full(values.shape, plan_range[0], np.float32)
            problem = error
        num_values = values[0].size
        if spec.slices is None or floats.ndim != 4:
            sample = self._fit(floats, picture.spacing, num_values)
            return [sample] * self.num, problem
        num_slices = values.shape[1 + axis_of(spec.slices)]
        values_per_slice = num_values // num_slices
        samples = []
        for image, spacing in slices_of(floats, spec.slices, picture.spacing):
            samples.append(self._fit(image, spacing, values_per_slice))
        return samples, problem

    def _check_header(self, picture: Picture) -> None:
        """Refuse what does not fit, by shape and type alone."""
        values = picture.values
        if values.dtype.name not in _TYPES:
            raise DataError(
                "values",
                expected=" or ".join(_TYPES),
                got=values.dtype.name,
                remedy="Save the picture in one of these types.",
            )
        num_plan_axes = len(self.data.shape)
        allowed_axes: tuple[int, ...] = (num_plan_axes,)
        if self.spec.slices:
            allowed_axes = (3, 4)
        if values.ndim not in allowed_axes or 0 in values.shape:
            names = {3: "an image (C, H, W)", 4: "a volume (C, D, H, W)"}
            remedy = None
            if values.ndim > num_plan_axes:
                remedy = "To make images of volumes, a plan needs a table [transform.slices]."
            raise DataError(
                "picture",
                expected=" or ".join(names[num_axes] for num_axes in allowed_axes),
                got=f"one of {values.ndim - 1} axes, {' x '.join(map(str, values.shape))}",
                remedy=remedy,
            )
        if picture.spacing is not None and len(picture.spacing) != values.ndim - 1:
            raise DataError(
                "spacing",
                expected=f"{values.ndim - 1} lengths",
                got=f"{len(picture.spacing)}",
            )
        if isinstance(self.spec.fit, SpacingFit) and not picture.spacing_in_mm:
            raise DataError(
                "spacing",
                expected="a file that states it, in mm",
                got="only a ratio of the sides",
                remedy="Use a file that states its spacing, or a transform without spacing.",
            )
        num_channels = max(self.data.shape[0], values.shape[0])
        needed_bytes = 4 * _NUM_COPIES * num_channels * values[0].size
        if needed_bytes > self._max_bytes:
            raise DataError(
                "picture",
                expected=f"at most {self._max_bytes} bytes of memory",
                got=f"{needed_bytes}",
                remedy="Give fewer or smaller images at a time.",
            )

    def _fit(
        self,
        values: Floats,
        spacing: tuple[float, ...] | None,
        num_values_before: int,
    ) -> Floats:
        """Bring a picture to the plan's shape; `num_values_before` is its size before its content was cut out."""
        shape = self.data.shape[1:]
        low, high = self.data.range
        size = resampled_size(self.spec, values.shape[1:], spacing, shape)
        needed_bytes = resampling_bytes(values.shape[0], values.shape[1:], size)
        # No plan makes one picture take long among others: the bound follows from headers, not from values.
        max_values = max(
            _MAX_ENLARGEMENT * max(num_values_before, prod(shape)), _ALWAYS_ALLOWED_VALUES
        )
        max_bytes = min(self._max_bytes, 4 * values.shape[0] * max_values)
        if needed_bytes > max_bytes:
            got = f"{needed_bytes} after resampling: one side is much too short, or the spacing too fine"
            raise DataError(
                "picture",
                expected=f"at most {max_bytes} bytes of memory",
                got=got,
                remedy="Give fewer or smaller images at a time.",
            )
        resampled = antialiased(values, size)
        fitted = middle(resampled, shape).clip(low, high)
        padding = low
        if self.spec.padding is not None:
            padding = self.spec.padding
        return np.ascontiguousarray(padded(fitted, shape, padding))


def with_channels(
    values: Values,
    spec: TransformSpec,
    num_channels: int,
) -> Values:
    """Return the channels that the plan requires.

    Args:
        values: shape (C, ...).
        spec: the plan's.
        num_channels: the number of channels of the plan's samples.

    Raises:
        DataError: the picture has a number of channels that the plan does not take.
    """
    num_in_picture, *sides = values.shape
    if spec.channels == "pick":
        last_pick = max(spec.pick)
        if num_in_picture <= last_pick:
            raise DataError(
                "channels",
                expected=f"more than {last_pick}, to pick from",
                got=f"{num_in_picture}",
                remedy="Pick channels that every picture has, in transform.pick of the recipe.",
            )
        return values[list(spec.pick)]
    if spec.channels == "grey" and num_in_picture == 3:
        red, green, blue = (values[channel].astype(np.float32) for channel in range(3))
        grey: Values = _RED_WEIGHT * red + _GREEN_WEIGHT * green + _BLUE_WEIGHT * blue
        return grey[None]
    if spec.channels == "rgb" and num_in_picture == 1:
        return np.broadcast_to(values, (3, *sides))
    if num_in_picture == num_channels:
        return values
    expected = f"{num_channels}, as the plan requires"
    if spec.channels in ("grey", "rgb"):
        expected = "1 or 3"
    raise DataError(
        "channels",
        expected=expected,
        got=f"{num_in_picture}",
        remedy=_remedy(num_in_picture, num_channels),
    )


def _remedy(num_in_picture: int, num_channels: int) -> str | None:
    conversions = {
        (3, 1): "grey",
        (1, 3): "rgb",
    }
    conversion = conversions.get((num_in_picture, num_channels))
    if not conversion:
        return None
    return f'A plan takes such pictures with transform.channels = "{conversion}".'


def bounds(
    values: Values,
    picture: Picture,
    spec: TransformSpec,
) -> Bounds:
    """Return the two values that become the ends of the plan's range.

    Args:
        values: the picture's, in the channels of the plan.
        picture: states the window and the full range of its file.
        spec: the plan's.

    Raises:
        DataError: a picture without a window or bounds where the plan requires them, with values that are not finite,
            or with the same value nearly everywhere.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(
            "values",
            expected="finite numbers",
            got="NaN or infinite values",
            remedy="Correct this picture, or leave it out.",
        )
    low, high = map(float, _range_bounds(values, picture, spec.range))
    if not high > low:
        raise DataError(
            "values",
            expected="values that differ",
            got="the same value nearly everywhere",
            remedy="Leave this picture out, or choose another kind of transform.range in the recipe.",
        )
    if not isfinite(high - low):
        raise DataError(
            "values", expected="a finite range", got="numbers too large for a finite range"
        )
    return low, high


def _range_bounds(
    values: Values,
    picture: Picture,
    spec: WindowRange | ValuesRange | PercentilesRange | FullRange,
) -> Bounds:
    match spec:
        case ValuesRange(low=low, high=high):
            return low, high
        case PercentilesRange(low=low, high=high):
            numbers: Numbers = values
            lower_bound, upper_bound = np.percentile(numbers, (low, high))
            return lower_bound, upper_bound
        case FullRange():
            if picture.full is None:
                raise DataError(
                    "values",
                    expected="a type with a full range, such as 8 bits",
                    got="floating point or 32 bits, which have no bounds of their own",
                    remedy=(
                        "Choose another kind of transform.range in the recipe, or save the picture with 8 or 16 "
                        "bits."
                    ),
                )
            return picture.full
        case WindowRange(fallback=fallback):
            if picture.window is not None:
                return picture.window
            if fallback == "refuse":
                raise DataError(
                    "window",
                    expected="a window that the file states",
                    got="a file without a window",
                    remedy="Choose another kind of transform.range in the recipe, or leave the file out.",
                )
            if fallback == "full":
                return _range_bounds(values, picture, FullRange())
            return _range_bounds(values, picture, PercentilesRange())


def mapped(
    values: Values,
    low: float,
    high: float,
    target: Bounds,
) -> NDArray[np.float32]:
    """Map `low` and `high` to the ends of `target`, linearly, and clip values beyond; in double precision.

    Returns:
        The same shape, float32, in memory of its own.
    """
    target_low, target_high = target
    result = np.empty(values.shape, np.float32)
    flat_result = result.reshape(-1)
    flat_values = np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat_values.size, _VALUES_AT_ONCE):
        block = slice(start, start + _VALUES_AT_ONCE)
        exact = flat_values[block].astype(np.float64)
        share = (exact - low) / (high - low)
        share = share.clip(0, 1)
        flat_result[block] = target_low + (target_high - target_low) * share
    return result


def to_stored(
    values: NDArray[np.float32],
    storage: Literal["uint8", "uint16", "float16"],
    target: Bounds,
) -> Values:
    """Return values of the plan's range in their compact type, in double precision until they are rounded.

    For `uint8` and `uint16`, whose largest number is m, the stored number n means ``low + (high - low) n / m``. A value
    v becomes ``n = round((v - low) / (high - low) m)``, halves to even, so that it changes by at most
    ``(high - low) / 2m``: a 510th of the range, or a 131,070th. For `float16` the stored number is the nearest one
    within the range. `ddm.images.fit.fit` reads it back, as it reads every array of whole numbers.

    Args:
        values: any shape, within `target`.
        storage: the type.
        target: the plan's range.
    """
    low, high = target
    exact = values.astype(np.float64).clip(low, high)
    if storage != "float16":
        share_of_range = (exact - low) / (high - low)
        whole_numbers = np.rint(share_of_range * _LARGEST[storage])
        return whole_numbers.astype(storage)
    nearest = exact.astype(np.float16)
    # The nearest number may be beyond the range: then the next one within it.
    rounded = nearest.astype(np.float64)
    is_above = rounded > high
    is_below = rounded < low
    nearest[is_above] = np.nextafter(nearest[is_above], np.float16(-np.inf))
    nearest[is_below] = np.nextafter(nearest[is_below], np.float16(np.inf))
    return nearest
