"""What findings lead to: a verdict is a rule, and every control must be able to spoil it."""

from dataclasses import replace

import pytest
import torch

from ddm.audit.attacks import names
from ddm.audit.membership import (
    Attack,
    Membership,
    UnitScores,
    by_unit,
    measure_membership,
    sides_alike,
)
from ddm.audit.verdict import Findings, judge
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit

LIMITS = Audit(required=True)


def seen(value: float, half: float = 0.05, tpr: float = 0.01) -> Membership:
    attack = Attack(
        "loss 0.1", Estimate(value, value - half, value + half), Estimate(tpr, 0.0, tpr + 0.02)
    )
    return Membership((attack,), 300, 300, torch.zeros(300))


GOOD = Findings(
    num_holdout=300,
    membership=seen(0.51),
    control=seen(0.95),
    sides_alike=True,
    copies={"pixels": Estimate(0.001, 0.0, 0.005)},
    control_copies={"pixels": 1.0},
)


def test_expert_within_all_limits_passes() -> None:
    assert judge(GOOD, LIMITS)[0] == "pass"


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({"num_holdout": 100}, "inconclusive", "100 held-out units; the plan needs 300"),
        ({"membership": seen(0.62)}, "fail", "AUC of the attack loss 0.1 is 0.62"),
        ({"membership": seen(0.55, tpr=0.2)}, "fail", "1% false positives"),
        ({"copies": {"features": Estimate(0.02, 0.01, 0.03)}}, "fail", "near copies in features"),
        ({"membership": seen(0.58)}, "inconclusive", "too few units or samples"),
        (
            {"copies": {"pixels": Estimate(0.0, 0.0, 0.02)}},
            "inconclusive",
            "too few units or samples",
        ),
        ({"control": seen(0.58)}, "inconclusive", "no attack sees a copy overfitted"),
        ({"sides_alike": False, "membership": seen(0.9)}, "inconclusive", "they differ"),
        (
            {"control_copies": {"pixels": 0.5}},
            "inconclusive",
            "only 50% of blurred training images",
        ),
        ({"control": seen(0.5), "membership": seen(0.9)}, "fail", "AUC"),
    ],
)
def test_verdict_follows_from_what_was_found(
    changes: dict[str, object], verdict: str, reason: str
) -> None:
    actual, words = judge(replace(GOOD, **changes), LIMITS)  # type: ignore[arg-type]
    assert actual == verdict and reason in words


def scored(shift: float, *, seed: int = 0, num: int = 300) -> UnitScores:
    random = torch.Generator().manual_seed(seed)
    num_attacks = len(names())
    member_IA, other_IA = (torch.randn(num, num_attacks, generator=random) for _ in range(2))
    return UnitScores(member_IA + shift, other_IA, torch.arange(num), torch.arange(num))


def test_expert_that_learned_neither_side_must_not_tell_them_apart_in_either_direction() -> None:
    assert sides_alike(scored(0.0))
    assert not sides_alike(scored(0.5))
    assert not sides_alike(scored(-0.5))


def test_reference_takes_away_what_makes_an_image_easy_for_any_expert() -> None:
    hard_M, hard_N = (
        torch.randn(300, 1, generator=torch.Generator().manual_seed(seed)) * 5 for seed in (3, 4)
    )
    plain = scored(0.8)
    both = replace(plain, member_IA=plain.member_IA + hard_M, other_IA=plain.other_IA + hard_N)
    reference = replace(
        plain, member_IA=hard_M.expand(-1, len(names())), other_IA=hard_N.expand(-1, len(names()))
    )
    assert measure_membership(both).worst.auc.value < 0.6
    worst = measure_membership(both, reference).worst
    assert worst.auc.value > 0.68 and "calibrated" in worst.name


def test_unit_scores_as_its_most_suspicious_image() -> None:
    assert by_unit(torch.tensor([1.0, 5.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 2])).tolist() == [
        5.0,
        2.0,
        3.0,
    ]
