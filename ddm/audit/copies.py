"""Which samples are nearly copies of training images, on the scale of real images that were not trained on.

A sample is a near copy in a space if it lies within a third of the distance at which held-out images usually lie (the
floor, which holds whatever was held out), or nearer to a training image than all but 0.3% of those held out and much
nearer to it than to the next ones: samples are smoother than images, so a small distance alone says little.

Source:
    Carlini et al. 2023, arXiv 2301.13188, for the distance relative to those of the next neighbours.
"""

# Shape legend: N samples, H images held out, K neighbours.
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.evaluation.intervals import Estimate, proportion

NEIGHBOURS = 11
_NEAR, _ALONE, _FLOOR = 0.003, 0.01, 1 / 3


@dataclass(frozen=True)
class Scale:
    """At which distances a sample is a near copy.

    Attributes:
        floor: a distance at which it is one in any case.
        near: a distance at which it may be one.
        alone: the distance relative to the next neighbours' at which it then is.
    """

    floor: float
    near: float
    alone: float

    @classmethod
    def of(cls, holdout_HK: Tensor, *, floor: bool = True) -> "Scale":
        """Take the scale from the images held out.

        Args:
            holdout_HK: squared distances of each to its nearest training images, ascending.
            floor: whether there is one: not among features of few dimensions, where small distances are common.
        """
        apart_H, relative_H = _apart(holdout_HK)
        return cls(
            floor=_FLOOR * float(apart_H.median()) if floor else 0.0,
            near=float(torch.quantile(apart_H, _NEAR, interpolation="lower")),
            alone=float(torch.quantile(relative_H, _ALONE, interpolation="lower")),
        )

    def near_copies(self, sample_NK: Tensor) -> Tensor:
        """Return which samples are near copies, boolean (N,).

        Args:
            sample_NK: squared distances of each to its nearest training images, ascending.
        """
        apart_N, relative_N = _apart(sample_NK)
        return (apart_N <= self.floor) | ((apart_N <= self.near) & (relative_N <= self.alone))


def duplicates(holdout_HK: Tensor) -> Tensor:
    """Return which images held out are nearly training images themselves, by the floor; boolean (H,)."""
    return _apart(holdout_HK)[0] <= Scale.of(holdout_HK).floor


def share_of_copies(scale: Scale, sample_NK: Tensor) -> Estimate:
    """Return the share of samples that are near copies, with its interval."""
    return proportion(scale.near_copies(sample_NK))


def _apart(squared_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest image, and its share of the mean distance to the next ones."""
    apart_NK = squared_NK.sqrt()
    next_N = torch.where(apart_NK[:, 1:].isfinite(), apart_NK[:, 1:], 0.0).sum(1)
    num_N = apart_NK[:, 1:].isfinite().sum(1).clamp(min=1)
    relative_N = apart_NK[:, 0] / (next_N / num_N).clamp(min=1e-30)
    return apart_NK[:, 0], relative_N
