"""From the scores of images to what an attacker learns about units, and the two controls that show that it works."""

# Shape legend: I images, U units, A attacks, M units trained on, N units held out.
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from ddm.audit.attacks import names
from ddm.audit.measures import auc, true_positives
from ddm.evaluation.intervals import Estimate

_SIGNIFICANCE = 0.01


@dataclass(frozen=True)
class Attack:
    """How well one attack recognises members.

    Attributes:
        name: of the attack, with its share of noise, and whether a reference expert calibrated it.
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
        attacks: all of them.
        num_members: M.
        num_others: N.
        suspicion_M: for each member the highest of its scores over all attacks, in standard deviations of the units
            held out.
    """

    attacks: tuple[Attack, ...]
    num_members: int
    num_others: int
    suspicion_M: Tensor

    @property
    def worst(self) -> Attack:
        """The attack with the largest area."""
        return max(self.attacks, key=lambda attack: attack.auc.value)

    @property
    def sharpest(self) -> Attack:
        """The attack that finds most members at 1% false positives."""
        return max(self.attacks, key=lambda attack: attack.tpr.value)


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

    def minus(self, reference: "UnitScores") -> "UnitScores":
        """Return the scores less those of another expert, of the same images."""
        return replace(
            self,
            member_IA=self.member_IA - reference.member_IA,
            other_IA=self.other_IA - reference.other_IA,
        )


def measure_membership(scores: UnitScores, reference: UnitScores | None = None) -> Membership:
    """Attack units by each attack as it is and, with a reference, by what the expert knows beyond the reference.

    A unit's score is the highest of its images'.

    Args:
        scores: of the expert.
        reference: of an expert that learned neither the members nor the units held out, with the same noise.
    """
    scores_by_attack = {}
    for column, name in enumerate(names()):
        scores_by_attack[name] = scores.of_units(column)
    if reference is not None:
        # What the expert knows beyond the reference: images that are easy for any expert no longer look known.
        calibrated = scores.minus(reference)
        for column, name in enumerate(names()):
            scores_by_attack[f"{name}, calibrated"] = calibrated.of_units(column)

    attacks = []
    suspicions = []
    for name, (member_M, other_N) in scores_by_attack.items():
        attacks.append(Attack(name, auc(member_M, other_N), true_positives(member_M, other_N)))
        suspicions.append((member_M - other_N.mean()) / _spread(other_N))
    suspicion_M = torch.stack(suspicions).amax(0)
    return Membership(
        attacks=tuple(attacks),
        num_members=len(suspicion_M),
        num_others=int(scores.other_I.max()) + 1,
        suspicion_M=suspicion_M,
    )


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
    z = NormalDist().inv_cdf(1 - _SIGNIFICANCE / 2 / len(names()))
    for column in range(len(names())):
        member_M, other_N = scores.of_units(column)
        area = auc(member_M, other_N, z=z)
        if not area.low <= 0.5 <= area.high:
            return False
    return True


def by_unit(score_I: Tensor, unit_I: Tensor) -> Tensor:
    """Return the highest score of each unit's images, shape (U,), float64."""
    score_U = torch.full((int(unit_I.max()) + 1,), -torch.inf, dtype=torch.float64)
    return score_U.scatter_reduce(0, unit_I, score_I.double(), "amax")
