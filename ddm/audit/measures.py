"""How well a score tells units that were trained on from units that were not, with 95% intervals over units."""

# Shape legend: M units trained on, N units held out.
from math import sqrt

import torch
from torch import Tensor

from ddm.evaluation.intervals import Estimate, wilson

FALSE_POSITIVES = 0.01
_Z = 1.959964


def auc(member_M: Tensor, other_N: Tensor, *, z: float = _Z) -> Estimate:
    """Return the area under the ROC curve: the chance that a member scores above another, ties counting half.

    The interval is DeLong's, whose variance sums what single units of either side contribute; where no unit of one side
    lies among those of the other that variance is 0, and the interval is Wilson's for the smaller side.

    Args:
        member_M: scores of units trained on, higher where the attack believes it.
        other_N: scores of units held out.
        z: half the interval's width in standard deviations.

    Source:
        DeLong, DeLong and Clarke-Pearson 1988.
    """
    placed_M, placed_N = _placed(member_M, other_N), 1 - _placed(other_N, member_M)
    value = float(placed_M.mean())
    variance = _variance(placed_M) + _variance(placed_N)
    if variance == 0.0:
        num = min(len(member_M), len(other_N))
        return Estimate(value, *wilson(round(value * num), num))
    half = z * sqrt(variance)
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def true_positives(member_M: Tensor, other_N: Tensor, rate: float = FALSE_POSITIVES) -> Estimate:
    """Return the share of members that score above all but a share `rate` of the units held out.

    The interval is Wilson's for the members, given the threshold.

    Args:
        member_M: scores of units trained on.
        other_N: scores of units held out; with fewer than ``1 / rate`` of them none may lie above the threshold.
        rate: of false positives.
    """
    allowed = int(rate * len(other_N))
    threshold = torch.sort(other_N, descending=True).values[allowed]
    count = int((member_M > threshold).sum())
    return Estimate(count / len(member_M), *wilson(count, len(member_M)))


def _placed(one_M: Tensor, other_N: Tensor) -> Tensor:
    """Return for each score the share of the others below it, ties counting half, float64."""
    sorted_N = torch.sort(other_N.double()).values
    below_M = torch.searchsorted(sorted_N, one_M.double(), right=False)
    up_to_M = torch.searchsorted(sorted_N, one_M.double(), right=True)
    return (below_M + up_to_M).double() / (2 * len(other_N))


def _variance(placed_M: Tensor) -> float:
    """Return the variance of the mean; of less than rounding, 0."""
    found = float(placed_M.var() / len(placed_M)) if len(placed_M) > 1 else 0.0
    return found if found > 1e-18 else 0.0
