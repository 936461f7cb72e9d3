"""From the scores of images to what an attacker learns about units, and the two controls that show that it works."""

# Shape legend: I images, U units, A attacks, M units trained on, N units held out.
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from ddm.audit.attacks import names
from ddm.audit.measures import auc, true_positives
from ddm.evaluation.intervals import Estimate


@dataclass(frozen=True)
class Attack:
    """How well one attack tells members.

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
        attacks: each of them.
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
class Scored:
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


def membership(scored: Scored, reference: Scored | None = None) -> Membership:
    """Attack units by each attack as it is and, with a reference, by what the expert knows beyond the reference.

    A unit's score is the highest of its images'.

    Args:
        scored: of the expert.
        reference: of an expert that learned neither the members nor the units held out, with the same noise.
    """
    pairs = [
        (name, scored.member_IA[:, a], scored.other_IA[:, a]) for a, name in enumerate(names())
    ]
    if reference is not None:
        member_IA, other_IA = (
            scored.member_IA - reference.member_IA,
            scored.other_IA - reference.other_IA,
        )
        pairs += [
            (f"{name}, calibrated", member_IA[:, a], other_IA[:, a])
            for a, name in enumerate(names())
        ]
    attacks, suspicion = [], []
    for name, member_I, other_I in pairs:
        member_M, other_N = by_unit(member_I, scored.member_I), by_unit(other_I, scored.other_I)
        attacks.append(Attack(name, auc(member_M, other_N), true_positives(member_M, other_N)))
        spread = float(other_N.std()) if len(other_N) > 1 else 0.0
        suspicion.append((member_M - other_N.mean()) / (spread or 1.0))
    num = len(suspicion[0])
    return Membership(
        tuple(attacks), num, int(scored.other_I.max()) + 1, torch.stack(suspicion).amax(0)[:num]
    )


def unseen(scored: Scored) -> bool:
    """Whether an expert that learned neither side takes them for the same, by every attack; else the two sides differ.

    Tested at 1% over all attacks together, in both directions.
    """
    z = NormalDist().inv_cdf(1 - 0.005 / len(names()))
    for a in range(scored.member_IA.shape[1]):
        member_M = by_unit(scored.member_IA[:, a], scored.member_I)
        other_N = by_unit(scored.other_IA[:, a], scored.other_I)
        found = auc(member_M, other_N, z=z)
        if not found.low <= 0.5 <= found.high:
            return False
    return True


def by_unit(score_I: Tensor, unit_I: Tensor) -> Tensor:
    """Return the highest score of each unit's images, shape (U,), float64."""
    found = torch.full((int(unit_I.max()) + 1,), -torch.inf, dtype=torch.float64)
    return found.scatter_reduce(0, unit_I, score_I.double(), "amax")
