"""From the scores of images to what an attacker learns about units, and the two controls that show that it works."""

# Shape legend: I images, U units, A attacks, M units trained on, N units held out.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from ddm.audit.attacks import names
from ddm.audit.crossfit import (
    FitDirection,
    best_combination,
    cross_fitted_scores,
    strongest_attack,
)
from ddm.audit.measures import auc, true_positives
from ddm.evaluation.intervals import Estimate

_SIGNIFICANCE = 0.01
# An error of 0 has no logarithm.
_SMALLEST_ERROR = 1e-30


@dataclass(frozen=True)
class Attack:
    """How well one attack recognises members.

    Attributes:
        name: the name of the attack, with its share of noise, and the expert that it was compared with.
        auc: area under its ROC curve.
        tpr: share of members found at 1% false positives.
    """

    name: str
    auc: Estimate
    tpr: Estimate


@dataclass(frozen=True)
class Membership:
    """All attacks on one expert.

    Attributes:
        deciding: the strongest attack and the best combination, chosen on some units and measured on others, and a sum
            for which nothing is chosen. They decide the verdict.
        attacks: all attacks by themselves. The best of them looks better than it is, since it is chosen afterwards.
        num_members: M.
        num_others: N.
        suspicion_M: for each member the highest of its scores over all attacks, in standard deviations of the units
            held out.
    """

    deciding: tuple[Attack, ...]
    attacks: tuple[Attack, ...]
    num_members: int
    num_others: int
    suspicion_M: Tensor

    @property
    def worst(self) -> Attack:
        """The deciding attack with the largest area."""
        return max(self.deciding, key=lambda attack: attack.auc.value)

    @property
    def sharpest(self) -> Attack:
        """The deciding attack that finds most members at 1% false positives."""
        return max(self.deciding, key=lambda attack: attack.tpr.value)


@dataclass(frozen=True)
class UnitScores:
    """The scores of one expert for members' images, and for those of units held out.

    Attributes:
        member_IA: of the images of members.
        other_IA: of the images of units held out.
        member_I: the number of each member image's unit, from 0 without a gap.
        other_I: the same of the units held out.
    """

    member_IA: Tensor
    other_IA: Tensor
    member_I: Tensor
    other_I: Tensor

    def of_units(self, column: int) -> tuple[Tensor, Tensor]:
        """Return one attack's scores of members and of units held out, shapes (M,) and (N,)."""
        member_M = by_unit(self.member_IA[:, column], self.member_I)
        other_N = by_unit(self.other_IA[:, column], self.other_I)
        return member_M, other_N

    def unit_means(self) -> tuple[Tensor, Tensor]:
        """Return the mean of every attack over the images of each unit, shapes (M, A) and (N, A)."""
        member_MA = _mean_by_unit(self.member_IA, self.member_I)
        other_NA = _mean_by_unit(self.other_IA, self.other_I)
        return member_MA, other_NA

    @property
    def has_units_of_several_images(self) -> bool:
        """Whether any unit has more than one image."""
        num_images = len(self.member_I) + len(self.other_I)
        num_members = int(self.member_I.max()) + 1
        num_others = int(self.other_I.max()) + 1
        return num_images > num_members + num_others

    def log_ratio(self, other: "UnitScores") -> "UnitScores":
        """Return how much smaller this expert's errors are than another's on the same images, as logarithms.

        Images that are easy for any expert no longer look known (difficulty calibration, Watson et al. 2022,
        arXiv 2111.08440). The logarithm makes errors of different sizes comparable (Carlini et al. 2022,
        arXiv 2112.03570).
        """
        return replace(
            self,
            member_IA=_log_errors(other.member_IA) - _log_errors(self.member_IA),
            other_IA=_log_errors(other.other_IA) - _log_errors(self.other_IA),
        )


def measure_membership(
    scores: UnitScores,
    *,
    reference: UnitScores,
    shadows: Sequence[UnitScores],
) -> Membership:
    """Attack units by each attack alone, relative to the reference and to the shadows, and by a choice among these.

    A unit's score is the highest of its images'. The combination has their means too: a patient of whom every image is
    remembered a little shows in the mean, one of whom a single image is remembered in the highest.

    Args:
        scores: the scores of the expert.
        reference: of an expert that learned neither the members nor the units held out, with the same noise.
        shadows: of the expert after it was trained on without the members, with the same noise; at least one.
    """
    shadow_ratio = _mean_scores([scores.log_ratio(shadow) for shadow in shadows])
    ratio_by_label = {
        "": scores,
        ", beside the reference": scores.log_ratio(reference),
        ", beside the shadows": shadow_ratio,
    }
    attacks = []
    suspicions = []
    member_columns = []
    other_columns = []
    for label, compared_scores in ratio_by_label.items():
        for column, name in enumerate(names()):
            member_M, other_N = compared_scores.of_units(column)
            attacks.append(_attack(f"{name}{label}", member_M, other_N))
            suspicion_M = (member_M - other_N.mean()) / _spread(other_N)
            suspicions.append(suspicion_M)
            member_columns.append(member_M)
            other_columns.append(other_N)
    member_MA = torch.stack(member_columns, 1)
    other_NA = torch.stack(other_columns, 1)

    # The first columns are the attacks as they are, whose scores mean something else for every image.
    num_kinds = len(names())
    combined_member_MA = member_MA[:, num_kinds:]
    combined_other_NA = other_NA[:, num_kinds:]
    num_combined = combined_member_MA.shape[1]
    if scores.has_units_of_several_images:
        mean_member_MA, mean_other_NA = shadow_ratio.unit_means()
        combined_member_MA = torch.cat([combined_member_MA, mean_member_MA], 1)
        combined_other_NA = torch.cat([combined_other_NA, mean_other_NA], 1)
    strongest = _cross_fitted_attack(
        f"strongest of {len(attacks)} attacks",
        member_MA,
        other_NA,
        strongest_attack,
    )
    combination = _cross_fitted_attack(
        f"combination of {num_combined} attacks",
        combined_member_MA,
        combined_other_NA,
        best_combination,
    )
    sum_of_losses = _sum_of_losses(member_MA, other_NA, [attack.name for attack in attacks])
    return Membership(
        deciding=(strongest, combination, sum_of_losses),
        attacks=tuple(attacks),
        num_members=len(member_MA),
        num_others=len(other_NA),
        suspicion_M=torch.stack(suspicions).amax(0),
    )


def _sum_of_losses(
    member_MA: Tensor,
    other_NA: Tensor,
    attack_names: list[str],
) -> Attack:
    """Attack by the sum of all losses beside reference and shadows, in deviations: nothing is chosen or fitted.

    Where an expert remembers little, a few hundred units are too few to fit weights (LiRA sums in the same way).
    """
    columns = []
    for column, name in enumerate(attack_names):
        if name.startswith("loss ") and "beside" in name:
            columns.append(column)
    member_MC = member_MA[:, columns]
    other_NC = other_NA[:, columns]
    # Of both sides together, so that nothing depends on which side a unit is on.
    score_UC = torch.cat([member_MC, other_NC])
    deviation_C = score_UC.std(0)
    deviation_C = torch.where(deviation_C > 0, deviation_C, 1.0)
    member_M = (member_MC / deviation_C).sum(1)
    other_N = (other_NC / deviation_C).sum(1)
    return _attack(f"sum of {len(columns)} losses", member_M, other_N)


def _mean_scores(scores: Sequence[UnitScores]) -> UnitScores:
    """Return the mean of the scores of the same images."""
    member_scores = torch.stack([score.member_IA for score in scores])
    other_scores = torch.stack([score.other_IA for score in scores])
    return replace(
        scores[0],
        member_IA=member_scores.mean(0),
        other_IA=other_scores.mean(0),
    )


def _attack(
    name: str,
    member_M: Tensor,
    other_N: Tensor,
) -> Attack:
    return Attack(name, auc(member_M, other_N), true_positives(member_M, other_N))


def _cross_fitted_attack(
    name: str,
    member_MA: Tensor,
    other_NA: Tensor,
    fit_direction: FitDirection,
) -> Attack:
    member_M, other_N = cross_fitted_scores(member_MA, other_NA, fit_direction)
    return _attack(name, member_M, other_N)


def _log_errors(score_IA: Tensor) -> Tensor:
    """Return the logarithms of the errors: a score is an error with its sign changed."""
    error_IA = (-score_IA).clamp(min=_SMALLEST_ERROR)
    return error_IA.log()


def _spread(score_N: Tensor) -> float:
    """Return the standard deviation; 1 where there is none, which leaves scores as they are."""
    if len(score_N) < 2:
        return 1.0
    return float(score_N.std()) or 1.0


def sides_alike(scores: UnitScores) -> bool:
    """Whether members and units held out look the same to an expert that learned neither, by every attack.

    If they do not, the two sides differ by themselves, and attacks on the audited expert would measure that difference.
    Tested at 1% over all attacks together (Bonferroni), in both directions.
    """
    num_attacks = len(names())
    tail_probability = _SIGNIFICANCE / 2 / num_attacks
    z = NormalDist().inv_cdf(1 - tail_probability)
    for column in range(num_attacks):
        member_M, other_N = scores.of_units(column)
        area = auc(member_M, other_N, z=z)
        if not area.low <= 0.5 <= area.high:
            return False
    return True


def by_unit(score_I: Tensor, unit_I: Tensor) -> Tensor:
    """Return the highest score of each unit's images, shape (U,), float64."""
    num_units = int(unit_I.max()) + 1
    lowest_U = torch.full((num_units,), -torch.inf, dtype=torch.float64)
    return lowest_U.scatter_reduce(0, unit_I, score_I.double(), "amax")


def _mean_by_unit(score_IA: Tensor, unit_I: Tensor) -> Tensor:
    num_units = int(unit_I.max()) + 1
    num_attacks = score_IA.shape[1]
    total_UA = torch.zeros(num_units, num_attacks, dtype=torch.float64)
    total_UA.index_add_(0, unit_I, score_IA.double())
    num_images_U = torch.bincount(unit_I, minlength=num_units)
    return total_UA / num_images_U[:, None]
