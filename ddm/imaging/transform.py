"""Carries out a plan's transform: one picture in, samples of the plan's shape and range out.

The same code serves silos and the aggregator's public images. A plan's transform depends on nothing but the picture:
no chance, no other picture, no name of a file. The steps, in this order, each as `ddm.protocol.transform` describes it:

1. channels;
2. range: two values become the ends of the plan's range, linearly, and values beyond are clipped;
3. content: the picture is cut to the box of what is bright;
4. slices: a volume becomes images;
5. fit: resampled, cut to the middle, padded.

All is computed in float32, the range in double precision, so that two processors differ by its rounding alone.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ddm.errors import ArchipelagoError, DataError
from ddm.imaging.geometry import (
    Floats,
    antialiased,
    content_of,
    middle,
    padded,
    resampled_size,
    resampling_bytes,
    slices_of,
)
from ddm.imaging.picture import Picture
from ddm.imaging.storage import to_stored
from ddm.imaging.values import bounds, mapped, with_channels
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec

VERSION = 1  # of the steps: whatever was made by others is made again
_TYPES = ("uint8", "uint16", "int16", "int32", "float32")
_COPIES = 4  # of a picture in float32: its channels, what percentiles sort, the mapped values, the content


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
    def most(self) -> int:
        """The most samples that one picture becomes."""
        return self.spec.slices.count if self.spec.slices else 1

    def apply(self, picture: Picture) -> list[Floats]:
        """Return the samples of a picture: one, or one a slice.

        Args:
            picture: as decoded.

        Returns:
            Each of the plan's shape, float32, within the plan's range, in C order.

        Raises:
            DataError: a picture that the plan does not take, or that would take too much memory; never its name.
        """
        self._check(picture)
        values = with_channels(picture.values, self.spec, self.data.shape[0])
        floats = mapped(values, *bounds(values, picture, self.spec), self.data.range)
        if self.spec.content:
            floats = content_of(floats, self.spec.content, self.data.range)
        if self.spec.slices and floats.ndim == 4:
            images = slices_of(floats, self.spec.slices, picture.spacing)
            return [self._fit(image, spacing) for image, spacing in images]
        return [self._fit(floats, picture.spacing)]

    def stored(self, sample: Floats) -> NDArray[np.generic]:
        """Return a sample in its compact type; see `ddm.imaging.storage`."""
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
        self._check_bytes(4 * _COPIES * max(self.data.shape[0], values.shape[0]) * values[0].size)

    def _check_bytes(self, needed: int, why: str = "") -> None:
        if needed > self._max_bytes:
            raise DataError("picture", expected=f"at most {self._max_bytes} bytes of memory", got=f"{needed}{why}")

    def _fit(self, values: Floats, spacing: tuple[float, ...] | None) -> Floats:
        shape, (low, high) = self.data.shape[1:], self.data.range
        size = resampled_size(self.spec, values.shape[1:], spacing, shape)
        needed = resampling_bytes(values.shape[0], values.shape[1:], size)
        self._check_bytes(needed, " after resampling: one side is much too short")
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
