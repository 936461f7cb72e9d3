"""Remarks on ranges: how much of its range a data set uses, and how much a plan enlarges its images.

Neither is an error. Values that use a small part of the range are learned badly, since the noise has the size of the
whole range (docs/adr/0067-pixels-have-the-scale-of-the-noise.md); often somebody declared -1 to 1 for values from 0 to
1, or stored twelve bits in sixteen. An image that is enlarged more than twice holds no more detail than before.

`silo scan`, `silo init`, `aggregator plan` and `ddm evaluate` state these remarks. Every rule is in this file.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from ddm.images.types import Bounds, Shape, Values

SMALL_SHARE = 0.6  # of the range: below it there is a remark
MAX_ENLARGEMENT = 2.0
DECLARED_AT_FIRST = (-1.0, 1.0)  # of arrays in floating point, by `silo init`
# Percentiles over the images of their lowest and of their highest values: one image with a burnt-in marker or a dead
# pixel does not hide that all others use a sixteenth of the range.
_LOW_PERCENTILE = 1.0
_HIGH_PERCENTILE = 99.0
_TOLERANCE = 1e-3  # of the range, for values beyond its ends


class ValueKind(StrEnum):
    """How values came to lie in the range, which decides what can be done about it."""

    FLOATS = "floats"  # arrays in floating point, read as they are
    WHOLE = "whole numbers"  # arrays of whole numbers, spread over the range by their type
    TRANSFORMED = "transformed"  # pictures that a plan's transform mapped to the range
    SAMPLES = "samples"  # drawn from a release, and read from a file


@dataclass(frozen=True)
class RangeUse:
    """Which part of a range the values of a data set use.

    Attributes:
        num_images: how many images were looked at.
        lowest: the lowest value of all images.
        highest: the highest value of all images.
        low: in 99% of the images, the lowest value of the image is above this.
        high: in 99% of the images, the highest value of the image is below this.
    """

    num_images: int
    lowest: float
    highest: float
    low: float
    high: float

    @classmethod
    def of(cls, lowest_N: ArrayLike, highest_N: ArrayLike) -> "RangeUse":
        """Return the use of the range by images of which these are the lowest and the highest values."""
        low_N = np.asarray(lowest_N, np.float64)
        high_N = np.asarray(highest_N, np.float64)
        # Percentiles that are values of images, so that the remark never names a value that no image has.
        low = np.percentile(low_N, _LOW_PERCENTILE, method="lower")
        high = np.percentile(high_N, _HIGH_PERCENTILE, method="higher")
        lowest = low_N.min()
        highest = high_N.max()
        return cls(
            len(low_N),
            float(lowest),
            float(highest),
            float(low),
            float(high),
        )

    def share(self, value_range: Bounds) -> float:
        """Return the share of a range between `low` and `high`."""
        begin, end = value_range
        used = min(self.high, end) - max(self.low, begin)
        return max(used, 0.0) / (end - begin)


@dataclass
class RangeCounter:
    """Collects the lowest and the highest value of each image, sixteen bytes an image."""

    _lowest: "array[float]" = field(default_factory=lambda: array("d"))
    _highest: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, lowest: float, highest: float) -> None:
        """Count one image."""
        self._lowest.append(lowest)
        self._highest.append(highest)

    def add_images(self, images: Values) -> None:
        """Count the images of an array, shape (N, ...)."""
        if not images.size:
            return
        flat = images.reshape(len(images), -1)
        self._lowest.extend(flat.min(1).astype(np.float64))
        self._highest.extend(flat.max(1).astype(np.float64))

    def use(self) -> RangeUse | None:
        """Return what the images use; None without an image."""
        if not self._lowest:
            return None
        return RangeUse.of(self._lowest, self._highest)


def range_of_type(dtype: str) -> Bounds | None:
    """Return the range of this type's values, which becomes the plan's range; None for floating point and others."""
    return {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0)}.get(dtype)


def range_remarks(
    use: RangeUse | None,
    value_range: Bounds,
    kind: ValueKind,
    *,
    subject: str = "Values",
) -> list[str]:
    """Return what a person should know about how a data set uses its range.

    Args:
        use: of the data set; None for one without images.
        value_range: the declared range of floats, the range of the type of whole numbers, or the plan's.
        kind: how values came into it.
        subject: what the values are, to begin the sentence.
    """
    if use is None:
        return []
    begin, end = value_range
    range_words = _range_words(value_range, kind)
    beyond = _TOLERANCE * (end - begin)
    if use.lowest < begin - beyond or use.highest > end + beyond:
        remark = f"{subject} reach from {use.lowest:g} to {use.highest:g}, beyond {range_words}"
        return [f"{remark}: they would be refused. {_remedy(use, value_range, kind)}"]
    if use.low >= use.high:
        # Images of one value each say nothing about a range; other remarks count them.
        return []
    share = use.share(value_range)
    if share >= SMALL_SHARE:
        return []
    remark = f"{subject} fill {_percent(share)} of {range_words}: {use.low:g} to {use.high:g}"
    if (use.lowest, use.highest) != (use.low, use.high):
        remark += f" in 99% of {use.num_images} images"
    return [f"{remark}. {_remedy(use, value_range, kind)}"]


def _range_words(value_range: Bounds, kind: ValueKind) -> str:
    begin, end = value_range
    owner = {
        ValueKind.FLOATS: "the declared range",
        ValueKind.WHOLE: "the range of their type,",
        ValueKind.TRANSFORMED: "the plan's range",
        ValueKind.SAMPLES: "the range",
    }[kind]
    return f"{owner} {begin:g} to {end:g}"


def _percent(share: float) -> str:
    if share < 0.01:
        return "less than 1%"
    return f"{share:.0%}"


def _remedy(
    use: RangeUse,
    value_range: Bounds,
    kind: ValueKind,
) -> str:
    begin, end = value_range
    if kind is ValueKind.FLOATS:
        return (
            f"Scale the arrays from {use.low:g} to {use.high:g} to {begin:g} to {end:g}, or declare the range that "
            "they have (data.range)."
        )
    if kind is ValueKind.WHOLE:
        num_bits = ""
        if begin == 0 and 0 < use.high < end:
            num_bits = f"They fit in {max(1, int(use.high).bit_length())} bits. "
        return (
            f"{num_bits}Scale them to {begin:g} to {end:g}, or plan with a table [transform] whose range is window, "
            "percentiles or values."
        )
    if kind is ValueKind.SAMPLES:
        return (
            f"If they were saved in another range, scale them to {begin:g} to {end:g}: "
            "otherwise the figures are meaningless."
        )
    return "Choose another transform.range, such as percentiles or values."


@dataclass
class EnlargementCounter:
    """Counts images by how many times longer the plan's transform makes their sides."""

    num_images: int = 0
    num_enlarged: int = 0
    largest: float = 1.0
    _example: tuple[str, str] = ("", "")

    def add(self, sides: Iterable[int], resampled: Iterable[int]) -> None:
        """Count one image.

        Args:
            sides: the sides of the image, (H, W) or (D, H, W).
            resampled: the same sides after resampling, before anything is cut or padded.
        """
        before = tuple(sides)
        after = tuple(resampled)
        factor = max(new / old for new, old in zip(after, before, strict=True))
        self.num_images += 1
        if factor <= MAX_ENLARGEMENT:
            return
        self.num_enlarged += 1
        if factor > self.largest:
            self.largest = factor
            self._example = (_sides(before), _sides(after))

    def remarks(self, subject: str = "images") -> list[str]:
        """Return a remark on images that are enlarged more than twice."""
        if not self.num_enlarged:
            return []
        before, after = self._example
        return [
            f"{self.num_enlarged} of {self.num_images} {subject} are enlarged more than {MAX_ENLARGEMENT:g} times, up "
            f"to {self.largest:.3g} times ({before} to {after}): that adds no detail. Take larger images, or a plan of "
            "smaller ones (data.shape)."
        ]


def _sides(sides: Shape) -> str:
    return " x ".join(map(str, sides))
