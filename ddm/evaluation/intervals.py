"""Estimates with their 95% intervals: bootstrap percentiles of what single images contribute, and Wilson's interval.

A metric changes with one image, to first order, by that image's *term* (its influence function). The interval resamples
terms, not images: 2,000 draws cost less than one evaluation of the metric, and features are never resampled with
replacement, which would put copies among them and so distort distances between neighbours and covariances.
"""

# Shape legend: N images.
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

DRAWS = 2000
LEVEL = 0.95
_Z = 1.959964  # the normal quantile of LEVEL
_MAX_INDICES = 1 << 22  # drawn together


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval in which repeating it with other images of the same origin would leave it.

    Attributes:
        value: the estimate.
        low: lower end of the 95% interval.
        high: upper end.
    """

    value: float
    low: float
    high: float


def bootstrap_estimate(
    value: float,
    terms: Sequence[Tensor],
    *,
    seed: int,
) -> Estimate:
    """Return the bootstrap percentile interval of a metric whose first-order terms are given.

    Args:
        value: the metric.
        terms: for each independent set of images, the derivative of the metric in the direction of each image, shape
            (N,); the metric moves by the mean of the resampled terms minus their mean.
        seed: the seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    shift = torch.zeros(DRAWS, dtype=torch.float64)
    for term_N in terms:
        term_N = term_N.double()
        num = len(term_N)
        centred_N = term_N - term_N.mean()
        # Some draws at a time, since all their indices together may not fit in memory.
        num_rows = max(1, _MAX_INDICES // num)
        for start in range(0, DRAWS, num_rows):
            stop = min(start + num_rows, DRAWS)
            num_draws = stop - start
            indices_BN = torch.randint(num, (num_draws, num), generator=generator)
            resampled_BN = centred_N[indices_BN]
            shift[start:stop] += resampled_BN.mean(1)
    tail = (1 - LEVEL) / 2
    levels = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.quantile(shift, levels).tolist()
    return Estimate(value, value + low, value + high)


def proportion(inside_N: Tensor) -> Estimate:
    """Return a share of images with Wilson's interval, which keeps its width where the share is 0 or 1.

    Args:
        inside_N: which images count, boolean.
    """
    num = len(inside_N)
    count = int(inside_N.sum())
    low, high = wilson(count, num)
    return Estimate(count / num, low, high)


def wilson(count: int, num: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a proportion.

    Source:
        Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    share = count / num
    z2 = _Z**2 / num
    middle = (share + z2 / 2) / (1 + z2)
    variance = share * (1 - share) / num
    half_width = _Z * sqrt(variance + z2 / (4 * num)) / (1 + z2)
    low = max(middle - half_width, 0.0)
    high = min(middle + half_width, 1.0)
    # Of a share of 0 or 1 one end is that share, which the formula misses by its rounding.
    if count == 0:
        low = 0.0
    if count == num:
        high = 1.0
    return low, high
