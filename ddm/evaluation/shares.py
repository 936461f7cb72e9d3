"""Shares of silos among samples, beside the shares that they should have."""

# Shape legend: N samples, S silos, R resampled sets.
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.evaluation.intervals import DRAWS, LEVEL, Estimate


@dataclass(frozen=True)
class ShareError:
    """The total variation distance between the silos' shares and their priors.

    Attributes:
        error: the error with its 95% sampling interval.
        by_chance: what sampling exactly from the priors exceeds in 2.5% of all runs of as many samples.
        mean_by_chance: the mean distance of such runs.
    """

    error: Estimate
    by_chance: float
    mean_by_chance: float


def share_error(
    silo_N: Tensor,
    prior: Sequence[float],
    *,
    seed: int = 0,
) -> ShareError:
    """Return half the sum of absolute differences between shares and priors, and how far chance alone moves it.

    Chance makes the distance larger, never smaller, so the interval is that of the resampled distances, moved by their
    mean excess over the observed one.

    Args:
        silo_N: the silo of each sample.
        prior: the silos' weights, in any unit.
        seed: the seed of the draws.
    """
    num = len(silo_N)
    weight_S = torch.tensor(list(prior), dtype=torch.float64)
    prior_S = weight_S / weight_S.sum()
    share_S = torch.bincount(silo_N, minlength=len(prior_S)).double() / num
    difference_S = share_S - prior_S
    value = float(difference_S.abs().sum() / 2)
    tail = (1 - LEVEL) / 2

    # Samples drawn again from the observed shares: how far the estimate moves.
    resampled_R = _resample_distances(share_S, prior_S, num, seed)
    mean = resampled_R.mean()
    lowest = torch.quantile(resampled_R, tail)
    highest = torch.quantile(resampled_R, 1 - tail)
    low = value + float(lowest - mean)
    high = value + float(highest - mean)

    # Samples drawn from the priors themselves: how far chance alone goes.
    exact_R = _resample_distances(prior_S, prior_S, num, seed)
    return ShareError(
        error=Estimate(value, max(low, 0.0), min(high, 1.0)),
        by_chance=float(torch.quantile(exact_R, 1 - tail)),
        mean_by_chance=float(exact_R.mean()),
    )


def _resample_distances(
    share_S: Tensor,
    prior_S: Tensor,
    num: int,
    seed: int,
) -> Tensor:
    """Return the distances to the priors of R = DRAWS sets of `num` samples with these shares, shape (R,)."""
    generator = torch.Generator().manual_seed(seed)
    # A multinomial as binomials: each silo gets its part of the samples that the silos before it left.
    num_left_R = torch.full((DRAWS,), float(num), dtype=torch.float64)
    share_left = 1.0
    counts = []
    for share in share_S.tolist():
        chance = 0.0
        if share_left > 0:
            chance = min(max(share / share_left, 0.0), 1.0)
        chance_R = torch.full_like(num_left_R, chance)
        count_R = torch.binomial(num_left_R, chance_R, generator=generator)
        counts.append(count_R)
        num_left_R = num_left_R - count_R
        share_left -= share
    share_RS = torch.stack(counts, 1) / num
    difference_RS = (share_RS - prior_S).abs()
    return difference_RS.sum(1) / 2
