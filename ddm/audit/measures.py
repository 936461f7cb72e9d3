"""How well a score separates units that were trained on from units that were not, with 95% intervals over units."""

# Shape legend: M units trained on, N units held out.
from math import sqrt

import torch
from torch import Tensor

from ddm.evaluation.intervals import Estimate, wilson

FALSE_POSITIVES = 0.01
_Z = 1.959964
_ROUNDING = 1e-18  # a variance below this is rounding


def auc(
    member_M: Tensor,
    other_N: Tensor,
    *,
    z: float = _Z,
) -> Estimate:
    """Return the area under the ROC curve: the chance that a member scores above another, ties counting half.

    The interval is DeLong's, whose variance sums what single units of either side contribute; where the two sides do
    not overlap that variance is 0, and the interval is Wilson's for the smaller side.

    Args:
        member_M: scores of units trained on, higher where the attack suspects it.
        other_N: scores of units held out.
        z: half the interval's width in standard deviations.

    Source:
        DeLong, DeLong and Clarke-Pearson 1988.
    """
    # The structural components of DeLong et al.: each unit's own estimate of the area.
    component_M = _share_below(member_M, other_N)
    component_N = 1 - _share_below(other_N, member_M)
    value = float(component_M.mean())
    variance = _variance_of_mean(component_M) + _variance_of_mean(component_N)
    if variance == 0.0:
        num_of_smaller_side = min(len(member_M), len(other_N))
        num_separated = round(value * num_of_smaller_side)
        low, high = wilson(num_separated, num_of_smaller_side)
        return Estimate(value, low, high)
    half_width = z * sqrt(variance)
    low = max(value - half_width, 0.0)
    high = min(value + half_width, 1.0)
    return Estimate(value, low, high)


def true_positives(
    member_M: Tensor,
    other_N: Tensor,
    rate: float = FALSE_POSITIVES,
) -> Estimate:
    """Return the share of members that score above all but a share `rate` of the units held out.

    The interval is Wilson's for the members, given the threshold.

    Args:
        member_M: scores of units trained on.
        other_N: scores of units held out; with fewer than ``1 / rate`` of them none may be above the threshold.
        rate: the rate of false positives.
    """
    num_members = len(member_M)
    max_false_positives = int(rate * len(other_N))
    highest_first_N = torch.sort(other_N, descending=True).values
    threshold = highest_first_N[max_false_positives]
    num_recognised = int((member_M > threshold).sum())
    low, high = wilson(num_recognised, num_members)
    return Estimate(num_recognised / num_members, low, high)


def _share_below(score_M: Tensor, other_N: Tensor) -> Tensor:
    """Return for each score the share of the others below it, ties counting half, float64."""
    sorted_N = torch.sort(other_N.double()).values
    double_M = score_M.double()
    num_below_M = torch.searchsorted(sorted_N, double_M, right=False)
    num_up_to_M = torch.searchsorted(sorted_N, double_M, right=True)
    # The mean of both counts: a tie is in the second alone, and so counts half.
    twice_num_M = num_below_M + num_up_to_M
    return twice_num_M.double() / (2 * len(other_N))


def _variance_of_mean(component_M: Tensor) -> float:
    if len(component_M) < 2:
        return 0.0
    variance = float(component_M.var() / len(component_M))
    if variance <= _ROUNDING:
        return 0.0
    return variance
