"""Carries out a plan's transform: one picture in, samples of the plan's shape and range out.

The same code serves silos and the aggregator's public images. A plan's transform depends on nothing but the picture:
no chance, no other picture, no name of a file. A picture that it does not take is an error where pictures are public;
at a silo it becomes a blank sample, so that no plan finds out by a number or a stop which pictures there are. The
steps, in this order, each as `ddm.protocol.transform` describes it:

1. channels;
2. range: two values become the ends of the plan's range, linearly, and values beyond are clipped;
3. content: the picture is cut to the box of what is bright;
4. slices: a volume becomes images, as many whatever its depth, and an image as many copies;
5. fit: resampled, cut to the middle, padded.

All is computed in float32, the range in double precision, so that two processors differ by its rounding alone.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
from numpy.typing import NDArray

from ddm.errors import ArchipelagoError, DataError
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
from ddm.images.storage import to_stored
from ddm.images.values import bounds, mapped, with_channels
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec

VERSION = 2  # of the steps: whatever was made by others is made again
_TYPES = ("uint8", "uint16", "int16", "int32", "float32")
_COPIES = 4  # of a picture in float32: its channels, what percentiles sort, the mapped values, the content
_LARGER = 16  # times the values of a picture, or of a sample, that it may be resampled to before its middle is kept
_SMALL = 1 << 22  # values that it may always be resampled to


class Transform:
    """What a plan makes of every picture.

    Args:
        spec: the plan's `transform`.
        data: the plan's `data`.
        max_bytes: most memory that one picture may take at any step; by default that of this machine.

    Raises:
        DataError: the transform does not fit the shape or the range.
    """

    def __init__(self, spec: TransformSpec, data: DataSpec, *, max_bytes: int | None = None) -> None:
        if misfit := spec.misfit(data):
            raise DataError("transform", expected=misfit, got=f"shape {data.shape}, range {data.range}")
        self.spec, self.data = spec, data
        self._max_bytes = max_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def recipe(self) -> str:
        """Names all that the samples depend on besides the picture."""
        return json.dumps([VERSION, self.spec.model_dump(mode="json"), self.data.model_dump(mode="json")])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The compact type of `stored`."""
        return np.dtype(self.spec.storage)

    @property
    def num(self) -> int:
        """How many samples every picture becomes."""
        return self.spec.slices.count if self.spec.slices else 1

    def apply(self, picture: Picture) -> list[Floats]:
        """Return the samples of a picture: one, or one a slice.

        Args:
            picture: as decoded.

        Returns:
            Each of the plan's shape, float32, within the plan's range, in C order; `num` of them.

        Raises:
            DataError: a picture that the plan does not take, or that would take too much memory; never its name.
        """
        samples, problem = self._samples(picture)
        if problem:
            raise problem
        return samples

    def apply_to_any(self, picture: Picture) -> tuple[list[Floats], str | None]:
        """Return the samples of a private picture, and why they are `blank`, if they are.

        A plan chooses what it does not take. So that it learns from no number, stop or text which pictures that were,
        nothing that a picture holds, and nothing in its header, makes it raise or changes the number of samples.

        Args:
            picture: as decoded.
        """
        try:
            samples, problem = self._samples(picture)
        except Exception as error:  # whatever one picture lets happen: an error of any kind would be an answer
            return self.blank, str(error) or type(error).__name__
        return (self.blank, str(problem)) if problem else (samples, None)

    @property
    def blank(self) -> list[Floats]:
        """What stands for a picture that cannot be used: the lowest value of the plan's range everywhere."""
        return [np.full(self.data.shape, self.data.range[0], np.float32)] * self.num

    def _samples(self, picture: Picture) -> tuple[list[Floats], DataError | None]:
        """Return samples, and why the picture's values are not taken.

        Raises:
            DataError: its header is not.
        """
        self._check(picture)
        values, problem = with_channels(picture.values, self.spec, self.data.shape[0]), None
        try:
            floats = mapped(values, *bounds(values, picture, self.spec), self.data.range)
            if self.spec.content:
                floats = content_of(floats, self.spec.content, self.data.range)
        except DataError as error:  # the rest is done all the same: to leave it out would take less time
            floats, problem = np.full(values.shape, self.data.range[0], np.float32), error
        if self.spec.slices and floats.ndim == 4:
            images = slices_of(floats, self.spec.slices, picture.spacing)
            most = values[0].size // values.shape[1 + axis_of(self.spec.slices)]
            return [self._fit(image, spacing, most) for image, spacing in images], problem
        return [self._fit(floats, picture.spacing, values[0].size)] * self.num, problem

    def stored(self, sample: Floats) -> NDArray[np.generic]:
        """Return a sample in its compact type; see `ddm.images.storage`."""
        return to_stored(sample, self.spec.storage, self.data.range)

    def _check(self, picture: Picture) -> None:
        """Refuse what does not fit, by shape and type alone."""
        values, dims = picture.values, len(self.data.shape)
        if values.dtype.name not in _TYPES:
            raise DataError("values", expected=" or ".join(_TYPES), got=values.dtype.name)
        wanted = (3, 4) if self.spec.slices else (dims,)
        if values.ndim not in wanted or 0 in values.shape:
            got = f"one of {values.ndim - 1} axes, {' x '.join(map(str, values.shape))}"
            remedy = "A plan makes images of volumes with a table [transform.slices]." if values.ndim > dims else None
            expected = " or ".join({3: "an image (C, H, W)", 4: "a volume (C, D, H, W)"}[each] for each in wanted)
            raise DataError("picture", expected=expected, got=got, remedy=remedy)
        if picture.spacing is not None and len(picture.spacing) != values.ndim - 1:
            raise DataError("spacing", expected=f"{values.ndim - 1} lengths", got=f"{len(picture.spacing)}")
        needed = 4 * _COPIES * max(self.data.shape[0], values.shape[0]) * values[0].size
        if needed > self._max_bytes:
            raise DataError("picture", expected=f"at most {self._max_bytes} bytes of memory", got=f"{needed}")

    def _fit(self, values: Floats, spacing: tuple[float, ...] | None, whole: int) -> Floats:
        """Bring a picture to the plan's shape; `whole` is its size before its content was cut out."""
        shape, (low, high) = self.data.shape[1:], self.data.range
        size = resampled_size(self.spec, values.shape[1:], spacing, shape)
        needed = resampling_bytes(values.shape[0], values.shape[1:], size)
        # No plan makes one picture take long among others: the bound follows from headers, not from values.
        most = min(self._max_bytes, 4 * values.shape[0] * max(_LARGER * max(whole, prod(shape)), _SMALL))
        if needed > most:
            got = f"{needed} after resampling: one side is much too short, or the spacing too fine"
            raise DataError("picture", expected=f"at most {most} bytes of memory", got=got)
        kept = middle(antialiased(values, size), shape).clip(low, high)
        padding = low if self.spec.padding is None else self.spec.padding
        return np.ascontiguousarray(padded(kept, shape, padding))


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Let errors about a picture say which one it was: by its number, never by its name.

    Raises:
        DataError: in place of any error of ours.
    """
    try:
        yield
    except ArchipelagoError as error:
        got, expected, remedy = error.got, error.expected, error.remedy
        raise DataError(f"{subject}: {error.subject}", expected=expected, got=got, remedy=remedy) from error
