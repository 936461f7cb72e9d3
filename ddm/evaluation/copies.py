"""Nearest copies: how far each sample is from its nearest reference image, on the scale of images held out.

The scale is that of real images that are not in the reference, or, without any, each reference image's distance to the
nearest other one. A sample nearer than 1% of these is a near copy; of samples that copy nothing about 1% are. The
result is about the reference alone: where experts were trained on images that are not in it, it says nothing about
those.
"""

# Shape legend: N samples, H images held out, P values of one image.
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.evaluation.intervals import Estimate, proportion

# Longer sides of images and volumes are averaged down to these.
SIDE = 32
VOLUME_SIDE = 16
# The share of images held out that count as near copies, by definition.
_NEAR_SHARE = 0.01


@dataclass(frozen=True, repr=False)
class NearestCopies:
    """How near samples come to the reference in one space.

    Attributes:
        nearest_index_N: the nearest reference image of each sample.
        ratio_N: its distance over the median distance of images held out; 0 is a copy, 1 is usual.
        near: the share of near copies; 0.01 is expected by chance.
        threshold: the ratio at which a sample is a near copy.
        num_holdout: H.
    """

    nearest_index_N: Tensor
    ratio_N: Tensor
    near: Estimate
    threshold: float
    num_holdout: int

    def __repr__(self) -> str:
        nearest = float(self.ratio_N.min())
        return (
            f"NearestCopies of {len(self.ratio_N)} samples: {self.near.value:.2%} near copies, "
            f"1% by chance; nearest at {nearest:.4g} of the usual distance"
        )

    @property
    def worst(self) -> list[int]:
        """The samples, nearest to a reference image first."""
        return torch.argsort(self.ratio_N, stable=True).tolist()


def near_copies(
    nearest_N: Tensor,
    nearest_index_N: Tensor,
    holdout_H: Tensor,
) -> NearestCopies:
    """Compare samples' distances with those of images held out.

    Args:
        nearest_N: squared distance of each sample to its nearest reference image.
        nearest_index_N: that image.
        holdout_H: the same distance of each image held out.
    """
    distance_N = nearest_N.sqrt()
    distance_H = holdout_H.sqrt()
    # The median is 0 where half the reference are duplicates; distances then stay as they are.
    scale = float(distance_H.median()) or 1.0
    threshold = float(torch.quantile(distance_H, _NEAR_SHARE, interpolation="lower"))
    return NearestCopies(
        nearest_index_N=nearest_index_N,
        ratio_N=distance_N / scale,
        near=proportion(distance_N <= threshold),
        threshold=threshold / scale,
        num_holdout=len(distance_H),
    )


def num_pixel_values(shape: Sequence[int]) -> int:
    """Return how many values a row of `pixel_rows` has, of images of this shape, (C, H, W) or (C, D, H, W)."""
    channels, *sides = shape
    longest = SIDE
    if len(sides) == 3:
        longest = VOLUME_SIDE
    return channels * prod(min(side, longest) for side in sides)


def pixel_rows(images: Tensor) -> Tensor:
    """Return images as rows, shape (N, P), float32; sides beyond 32 pixels (16 of a volume) are averaged down."""
    images = images.float()
    _, _, *sides = images.shape
    if images.ndim == 4:
        new_sides = [min(side, SIDE) for side in sides]
        if new_sides != sides:
            images = F.adaptive_avg_pool2d(images, new_sides)  # type: ignore[arg-type]
    elif images.ndim == 5:
        new_sides = [min(side, VOLUME_SIDE) for side in sides]
        if new_sides != sides:
            images = F.adaptive_avg_pool3d(images, new_sides)  # type: ignore[arg-type]
    return images.flatten(1)
