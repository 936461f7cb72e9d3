"""Shares of silos among samples, beside the shares that they should have."""

# Shape legend: N samples, S silos.
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.evaluation.intervals import DRAWS, LEVEL, Estimate


@dataclass(frozen=True)
class ShareError:
    """The total variation distance between the silos' shares and their priors.

    Attributes:
        error: with its 95% sampling interval.
        by_chance: what sampling exactly from the priors exceeds in 2.5% of all runs of as many samples.
        mean_by_chance: the mean distance of such runs.
    """

    error: Estimate
    by_chance: float
    mean_by_chance: float


def share_error(silo_N: Tensor, prior: Sequence[float], *, seed: int = 0) -> ShareError:
    """Return half the sum of absolute differences between shares and priors, and how far chance alone moves it.

    Chance makes the distance larger, never smaller, so the interval is that of the resampled distances, moved by their
    mean excess over the one that was found.

    Args:
        silo_N: the silo of each sample.
        prior: the silos' weights, in any unit.
        seed: of the draws.
    """
    prior_S = torch.tensor(list(prior), dtype=torch.float64)
    prior_S = prior_S / prior_S.sum()
    share_S = torch.bincount(silo_N, minlength=len(prior_S)).double() / len(silo_N)
    value = float((share_S - prior_S).abs().sum() / 2)
    tail = (1 - LEVEL) / 2
    drawn = _distances(share_S, prior_S, len(silo_N), seed)
    low, high = (float(torch.quantile(drawn, level) - drawn.mean()) for level in (tail, 1 - tail))
    exact = _distances(prior_S, prior_S, len(silo_N), seed)
    estimate = Estimate(value, max(value + low, 0.0), min(value + high, 1.0))
    return ShareError(estimate, float(torch.quantile(exact, 1 - tail)), float(exact.mean()))


def _distances(share_S: Tensor, prior_S: Tensor, num: int, seed: int) -> Tensor:
    """Return the distances of DRAWS resampled sets of `num` samples."""
    generator = torch.Generator().manual_seed(seed)
    # A multinomial as binomials, silo by silo.
    left_R, rest = torch.full((DRAWS,), float(num), dtype=torch.float64), 1.0
    counts = []
    for share in share_S.tolist():
        chance = min(max(share / rest, 0.0), 1.0) if rest > 0 else 0.0
        counts.append(torch.binomial(left_R, torch.full_like(left_R, chance), generator=generator))
        left_R, rest = left_R - counts[-1], rest - share
    return (torch.stack(counts, 1) / num - prior_S).abs().sum(1) / 2
