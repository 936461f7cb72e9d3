"""Which samples are nearly copies of training images, on the scale of real images that were not trained on.

A sample is a near copy in a space if its distance to a training image is at most a third of the usual distance of
held-out images (the floor), or if it is nearer to a training image than all but 0.3% of those held out and much nearer
to it than to the next ones: samples are smoother than images, so a small distance alone means little.

Source:
    Carlini et al. 2023, arXiv 2301.13188, for the distance relative to those of the next neighbours.
"""

# Shape legend: N samples, H images held out, K neighbours.
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.evaluation.intervals import Estimate, proportion

NEIGHBOURS = 11
_FLOOR_SHARE = 1 / 3  # of the usual distance
# Shares of the images held out that are below the two limits.
_DISTANCE_QUANTILE = 0.003
_RELATIVE_QUANTILE = 0.01
_TINY = 1e-30


@dataclass(frozen=True)
class CopyScale:
    """At which distances a sample is a near copy.

    Attributes:
        floor: a distance at which it is one in any case.
        max_distance: a distance at which it may be one.
        max_relative_distance: the distance relative to the next neighbours' at which it then is.
    """

    floor: float
    max_distance: float
    max_relative_distance: float

    @classmethod
    def of(
        cls,
        holdout_HK: Tensor,
        *,
        has_floor: bool = True,
    ) -> "CopyScale":
        """Take the scale from the images held out.

        Args:
            holdout_HK: squared distances of each to its nearest training images, ascending.
            has_floor: not among features of few dimensions, where small distances are common.
        """
        distance_H, relative_H = _distances(holdout_HK)
        # Without interpolation: a limit is a distance that an image held out really has.
        max_distance = torch.quantile(distance_H, _DISTANCE_QUANTILE, interpolation="lower")
        max_relative = torch.quantile(relative_H, _RELATIVE_QUANTILE, interpolation="lower")
        floor = 0.0
        if has_floor:
            usual_distance = float(distance_H.median())
            floor = _FLOOR_SHARE * usual_distance
        return cls(
            floor=floor,
            max_distance=float(max_distance),
            max_relative_distance=float(max_relative),
        )

    def near_copies(self, sample_NK: Tensor) -> Tensor:
        """Return which samples are near copies, boolean (N,).

        Args:
            sample_NK: squared distances of each to its nearest training images, ascending.
        """
        distance_N, relative_N = _distances(sample_NK)
        below_floor_N = distance_N <= self.floor
        is_near_N = distance_N <= self.max_distance
        is_alone_N = relative_N <= self.max_relative_distance
        return below_floor_N | (is_near_N & is_alone_N)


def duplicates(holdout_HK: Tensor) -> Tensor:
    """Return which images held out are nearly training images themselves, by the floor; boolean (H,)."""
    distance_H, _ = _distances(holdout_HK)
    scale = CopyScale.of(holdout_HK)
    return distance_H <= scale.floor


def share_of_copies(scale: CopyScale, sample_NK: Tensor) -> Estimate:
    """Return the share of samples that are near copies, with its interval."""
    is_copy_N = scale.near_copies(sample_NK)
    return proportion(is_copy_N)


def _distances(squared_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest image, and its share of the mean distance to the next ones."""
    distance_NK = squared_NK.sqrt()
    nearest_N = distance_NK[:, 0]
    next_NK = distance_NK[:, 1:]
    # Of fewer training images than neighbours, the rest is at infinity.
    exists_NK = next_NK.isfinite()
    total_N = torch.where(exists_NK, next_NK, 0.0).sum(1)
    num_existing_N = exists_NK.sum(1).clamp(min=1)
    mean_N = total_N / num_existing_N
    relative_N = nearest_N / mean_N.clamp(min=_TINY)
    return nearest_N, relative_N
