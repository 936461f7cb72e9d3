"""What findings lead to: a verdict is a rule, and every control must be able to spoil it."""

from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from ddm.audit.attacks import names
from ddm.audit.membership import (
    Attack,
    Membership,
    UnitScores,
    by_unit,
    measure_membership,
    sides_alike,
)
from ddm.audit.verdict import MeasuredLeaks, judge
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit

LIMITS = Audit(required=True)


def seen(value: float, half: float = 0.05, tpr: float = 0.01) -> Membership:
    attack = Attack(
        "loss 0.1", Estimate(value, value - half, value + half), Estimate(tpr, 0.0, tpr + 0.02)
    )
    return Membership((attack,), (attack,), 300, 300, torch.zeros(300))


GOOD = MeasuredLeaks(
    num_holdout=300,
    membership=seen(0.51),
    control=seen(0.95),
    sides_alike=True,
    copies={"pixels": Estimate(0.001, 0.0, 0.005)},
    control_copies={"pixels": 1.0},
)


def test_end_of_an_interval_just_above_the_limit_does_not_look_like_it() -> None:
    auc = Estimate(0.554, 0.508, 0.6004)
    attack = replace(seen(0.5).deciding[0], auc=auc)
    verdict, reason = judge(
        replace(GOOD, membership=replace(seen(0.5), deciding=(attack,))), LIMITS
    )
    assert verdict == "inconclusive" and "0.6004" in reason


def test_expert_within_all_limits_passes() -> None:
    assert judge(GOOD, LIMITS)[0] == "pass"


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({"num_holdout": 100}, "inconclusive", "100 held-out units; the plan needs 300"),
        ({"membership": seen(0.62)}, "fail", "AUC of the loss 0.1 is 0.62"),
        ({"membership": seen(0.55, tpr=0.2)}, "fail", "1% false positives"),
        ({"copies": {"features": Estimate(0.02, 0.01, 0.03)}}, "fail", "near copies in features"),
        ({"membership": seen(0.58)}, "inconclusive", "too few units or samples"),
        (
            {"copies": {"pixels": Estimate(0.0, 0.0, 0.02)}},
            "inconclusive",
            "too few units or samples",
        ),
        ({"control": seen(0.58)}, "inconclusive", "no attack detects a copy that is overfitted"),
        # So few members reach this by chance: the lower end must be above the limit.
        ({"control": seen(0.64)}, "inconclusive", "no attack detects a copy that is overfitted"),
        ({"sides_alike": False, "membership": seen(0.62)}, "inconclusive", "they differ"),
        ({"sides_alike": False, "membership": seen(0.9)}, "fail", "AUC of the loss 0.1 is 0.9"),
        (
            {"sides_alike": False, "copies": {"pixels": Estimate(0.02, 0.005, 0.03)}},
            "fail",
            "near copies in pixels",
        ),
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


def errors(log_error_IA: Tensor, other_log_error_IA: Tensor) -> UnitScores:
    """Return scores of one image a unit, by the logarithms of the errors of members and of others."""
    unit_I = torch.arange(len(log_error_IA))
    return UnitScores(-log_error_IA.exp(), -other_log_error_IA.exp(), unit_I, unit_I)


def test_shadow_takes_away_what_makes_an_image_easy_for_any_expert() -> None:
    random = torch.Generator().manual_seed(0)
    shape = (300, len(names()))
    # How hard an image is varies far more than what the expert knows of it.
    hard_MA = 5 * torch.randn(300, 1, generator=random).expand(shape)
    hard_NA = 5 * torch.randn(300, 1, generator=random).expand(shape)
    noise_MA = torch.randn(shape, generator=random)
    noise_NA = torch.randn(shape, generator=random)
    expert = errors(hard_MA + noise_MA - 0.8, hard_NA + noise_NA)
    shadow = errors(hard_MA, hard_NA)

    blind = measure_membership(expert, reference=expert, shadows=[expert])
    assert max(attack.auc.value for attack in blind.attacks) < 0.6
    membership = measure_membership(expert, reference=expert, shadows=[shadow])
    strongest = max(membership.attacks, key=lambda attack: attack.auc.value)
    assert strongest.auc.value > 0.68
    assert "beside the shadows" in strongest.name
    # The attacks err independently, so that together they say more than any of them.
    assert membership.worst.auc.value > strongest.auc.value + 0.1
    assert "combination" in membership.worst.name


def test_patient_of_whom_every_image_is_remembered_a_little_shows_in_the_combination() -> None:
    num_units = 300
    images_per_unit = 4
    shape = (num_units * images_per_unit, len(names()))
    random = torch.Generator().manual_seed(0)
    unit_I = torch.arange(num_units).repeat_interleave(images_per_unit)
    # All attacks err alike, so that only the images of a patient can add to each other.
    member_error_IA = (torch.randn(shape[0], 1, generator=random) - 0.5).exp().expand(shape)
    other_error_IA = torch.randn(shape[0], 1, generator=random).exp().expand(shape)
    expert = UnitScores(-member_error_IA, -other_error_IA, unit_I, unit_I)
    shadow = UnitScores(-torch.ones(shape), -torch.ones(shape), unit_I, unit_I)

    membership = measure_membership(expert, reference=shadow, shadows=[shadow])
    strongest, combination, _ = membership.deciding
    # The mean of four shifts by a standard deviation, for which the closed form says 0.76.
    assert combination.auc.value == pytest.approx(NormalDist().cdf(1 / 2**0.5), abs=0.04)
    assert strongest.auc.value < combination.auc.value - 0.03


def test_best_of_many_attacks_by_chance_decides_nothing() -> None:
    areas_of_best = []
    deciding_areas = []
    num_above_chance = 0
    for seed in range(40):
        random = torch.Generator().manual_seed(seed)
        logs = torch.randn(6, 150, len(names()), generator=random)
        expert = errors(logs[0], logs[1])
        reference = errors(logs[2], logs[3])
        shadow = errors(logs[4], logs[5])
        membership = measure_membership(expert, reference=reference, shadows=[shadow])
        areas_of_best.append(max(attack.auc.value for attack in membership.attacks))
        for attack in membership.deciding:
            deciding_areas.append(attack.auc.value)
            num_above_chance += attack.auc.low > 0.5
    # Of 45 attacks that know nothing, the best reaches 0.57; its interval ends above the limit.
    assert sum(areas_of_best) / len(areas_of_best) > 0.56
    # The standard deviation of one area is 0.033, that of the mean of eighty at most 0.01.
    assert abs(sum(deciding_areas) / len(deciding_areas) - 0.5) < 0.02
    # 2.5% are expected, which is 2.
    assert num_above_chance <= 8


def test_unit_scores_as_its_most_suspicious_image() -> None:
    assert by_unit(torch.tensor([1.0, 5.0, 2.0, 3.0]), torch.tensor([0, 0, 1, 2])).tolist() == [
        5.0,
        2.0,
        3.0,
    ]
