"""Chooses or combines attacks on some units and measures the choice on the others.

The best of many attacks looks good by chance alone. A choice that never saw the units on which it is measured does not:
if the expert learned neither side, the expected area under its ROC curve is 1/2.

The interval of that area is the one of a single attack, and for a choice it is too short: folds choose differently, and
each unit has a part in the choices of the others. In 200 simulated runs of 15 independent attacks that know nothing, on
100 units of either side, the 95% interval of the strongest attack contained 1/2 in 85% of the runs, and that of the
combination in 84%; on 300 units, in 80% and 81% (tests/ddm/audit/test_crossfit.py repeats a part of it). Attacks on one
expert resemble each other, so that less is left to choose.
"""

# Shape legend: M units trained on, N units held out, U units of either side, A attacks.
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.audit.measures import auc

NUM_FOLDS = 5
MIN_UNITS = 2 * NUM_FOLDS
"""Of either side: with fewer, some choices would be made on too few units to mean anything."""
FitDirection = Callable[[Tensor, Tensor], Tensor]
"""From standardised scores of members (M, A) and of units held out (N, A) to a weight for each attack (A,)."""

# Beyond this many deviations a score counts no more for the weights, and grows by its logarithm alone where units are
# scored: one extreme image must not decide how attacks are weighted, nor one attack the sum.
_MAX_DEVIATIONS = 8.0
_MAX_FLOAT = torch.finfo(torch.float64).max
# Half the distance between these quantiles is a standard deviation where scores are normal.
_QUANTILES = torch.tensor([0.16, 0.84], dtype=torch.float64)
_SHRINKAGE = 0.3


def cross_fitted_scores(
    member_MA: Tensor,
    other_NA: Tensor,
    fit_direction: FitDirection,
) -> tuple[Tensor, Tensor]:
    """Return scores of members (M,) and of units held out (N,), each by weights that come from other units.

    Args:
        member_MA: scores of units trained on, higher where an attack suspects it; at least `MIN_UNITS`.
        other_NA: scores of units held out; at least `MIN_UNITS`.
        fit_direction: weighs the attacks.
    """
    member_M = torch.zeros(len(member_MA), dtype=torch.float64)
    other_N = torch.zeros(len(other_NA), dtype=torch.float64)
    fold_M = torch.arange(len(member_MA)) % NUM_FOLDS
    fold_N = torch.arange(len(other_NA)) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        is_measured_M = fold_M == fold
        is_measured_N = fold_N == fold
        # Scale and weights come from the units of the other folds alone: with the measured units among them, the attack
        # that looks best on these by chance would be chosen.
        rule = _AttackRule.fitted(
            member_MA[~is_measured_M],
            other_NA[~is_measured_N],
            fit_direction,
        )
        member_M[is_measured_M] = rule.scores(member_MA[is_measured_M])
        other_N[is_measured_N] = rule.scores(other_NA[is_measured_N])
    return member_M, other_N


def strongest_attack(member_MA: Tensor, other_NA: Tensor) -> Tensor:
    """Give all the weight to the attack with the largest area under its ROC curve."""
    areas = []
    for column in range(member_MA.shape[1]):
        member_M = member_MA[:, column].contiguous()
        other_N = other_NA[:, column].contiguous()
        area = auc(member_M, other_N)
        areas.append(area.value)
    strongest = areas.index(max(areas))
    weight_A = torch.zeros(len(areas), dtype=torch.float64)
    weight_A[strongest] = 1.0
    return weight_A


def best_combination(member_MA: Tensor, other_NA: Tensor) -> Tensor:
    """Weigh the attacks by Fisher's linear discriminant, ``C^-1 (mean of members - mean of others)``.

    C is the mean of both sides' covariances, shrunk towards its diagonal, since a few hundred units estimate it badly.

    Source:
        Friedman 1989, Regularized discriminant analysis.
    """
    member_covariance_AA = torch.cov(member_MA.T)
    other_covariance_AA = torch.cov(other_NA.T)
    covariance_AA = (member_covariance_AA + other_covariance_AA) / 2
    variance_A = covariance_AA.diagonal()
    # An attack that says the same of all units gets a variance, and with it a weight of 0.
    variance_A = torch.where(variance_A > 0, variance_A, 1.0)
    diagonal_AA = torch.diag(variance_A)
    shrunk_AA = (1 - _SHRINKAGE) * covariance_AA + _SHRINKAGE * diagonal_AA
    difference_A = member_MA.mean(0) - other_NA.mean(0)
    weight_A: Tensor = torch.linalg.solve(shrunk_AA, difference_A)
    return weight_A


class _Scale:
    """Centre and spread of each attack among units held out, by quantiles, which outliers do not move."""

    def __init__(self, other_NA: Tensor) -> None:
        low_A, high_A = torch.quantile(other_NA, _QUANTILES, dim=0)
        half_width_A = (high_A - low_A) / 2
        self._centre_A = other_NA.median(0).values
        # An attack that says the same of nearly all units has no spread to divide by.
        self._spread_A = torch.where(high_A > low_A, half_width_A, 1.0)

    def standardise(self, score_UA: Tensor) -> Tensor:
        """Return the scores in deviations from the centre."""
        deviation_UA = (score_UA - self._centre_A) / self._spread_A
        # An infinite one would make a sum undefined in which the attack has a weight of 0.
        return deviation_UA.clamp(-_MAX_FLOAT, _MAX_FLOAT)


def _cut(deviation_UA: Tensor) -> Tensor:
    """Cut deviations at `_MAX_DEVIATIONS`."""
    return deviation_UA.clamp(-_MAX_DEVIATIONS, _MAX_DEVIATIONS)


def _squash(deviation_UA: Tensor) -> Tensor:
    """Let deviations beyond `_MAX_DEVIATIONS` grow by the logarithm alone.

    Their order stays. Cut, they would be equal, and a threshold among them would recognise no member.
    """
    excess_UA = (deviation_UA.abs() - _MAX_DEVIATIONS).clamp(min=0.0)
    return _cut(deviation_UA) + deviation_UA.sign() * excess_UA.log1p()


@dataclass(frozen=True)
class _AttackRule:
    """How units are scored, as it was fitted on some of them.

    Attributes:
        scale: the scale of each attack.
        weight_A: of each attack in the sum.
        sum_scale: of the sum.
    """

    scale: _Scale
    weight_A: Tensor
    sum_scale: _Scale

    @classmethod
    def fitted(
        cls,
        member_MA: Tensor,
        other_NA: Tensor,
        fit_direction: FitDirection,
    ) -> "_AttackRule":
        """Fit scale and weights."""
        scale = _Scale(other_NA)
        standard_member_MA = scale.standardise(member_MA)
        standard_other_NA = scale.standardise(other_NA)
        weight_A = fit_direction(_cut(standard_member_MA), _cut(standard_other_NA))
        sum_N = _squash(standard_other_NA) @ weight_A
        return cls(scale, weight_A, sum_scale=_Scale(sum_N[:, None]))

    def scores(self, score_UA: Tensor) -> Tensor:
        """Return one score of each unit, shape (U,), in deviations, so that those of several rules compare."""
        sum_U = _squash(self.scale.standardise(score_UA)) @ self.weight_A
        standard_U1 = self.sum_scale.standardise(sum_U[:, None])
        return standard_U1[:, 0]
