"""The whole measurement on experts whose memory is known: two in closed form, and trained ones as slow tests."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.audit.attacks import CALLS, names
from ddm.audit.copies import CopyScale, share_of_copies
from ddm.audit.effort import (
    NUM_ATTACKED_EXPERTS,
    NUM_SHADOWS,
    SAMPLE_STEPS,
    SHARE,
    effort_of,
    share_of_training,
)
from ddm.audit.membership import Membership, measure_membership, sides_alike
from tests.support.audited_experts import (
    audit_digits,
    digits,
    draw,
    nearest,
    privately,
    score_units,
    training_settings,
)

SHAPE = (1, 6, 6)


class Memoriser(nn.Module):
    """The velocity of the training images themselves: the expert that training without end leads to."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = nn.Parameter(images.clone())

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        t = t_B.clamp(min=1e-3).view(-1, 1)
        known = self.images.flatten(1)
        apart_BN = (x_B.flatten(1)[:, None] - (1 - t)[:, :, None] * known).square().sum(2)
        weight_BN = torch.softmax(-apart_BN / (2 * t**2), 1)
        x_0 = (weight_BN @ known).view_as(x_B)
        return (x_B - x_0) / t.view(-1, 1, 1, 1)


class Population(nn.Module):
    """The velocity of standard normal images: an expert that learned the population and nobody in it."""

    def __init__(self) -> None:
        super().__init__()
        self.variance = nn.Parameter(torch.ones(()))

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        t = t_B.view(-1, 1, 1, 1)
        alpha = 1 - t
        sigma = t
        return x_B * (sigma - alpha * self.variance) / (alpha**2 * self.variance + sigma**2)


def normal(num: int, seed: int) -> Tensor:
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(seed))


LEARNED = normal(60, 0)
HELD = normal(100, 1)


def by_attack(membership: Membership) -> Mapping[str, float]:
    best = dict.fromkeys((name.partition(" ")[0] for name in names()), 0.0)
    for attack in membership.attacks:
        kind = attack.name.partition(" ")[0]
        best[kind] = max(best[kind], attack.auc.value)
    return best


def test_every_attack_sees_an_expert_that_is_its_training_images() -> None:
    reference = score_units(Population(), LEARNED, HELD)
    membership = measure_membership(
        score_units(Memoriser(LEARNED), LEARNED, HELD), reference=reference, shadows=[reference]
    )
    auc_by_attack = by_attack(membership)
    assert min(auc_by_attack.values()) > 0.95, auc_by_attack


def test_no_attack_sees_members_in_an_expert_that_knows_the_population_alone() -> None:
    plain = score_units(Population(), normal(150, 2), normal(150, 3))
    assert sides_alike(plain)
    other = score_units(Memoriser(normal(60, 4)), normal(150, 2), normal(150, 3))
    membership = measure_membership(plain, reference=other, shadows=[other])
    assert membership.worst.auc.value < 0.6


def test_samples_of_the_memoriser_are_copies_and_those_of_the_population_are_not() -> None:
    scale = CopyScale.of(nearest(HELD, LEARNED))
    assert (
        share_of_copies(scale, nearest(draw(Memoriser(LEARNED), SHAPE, 100), LEARNED)).value > 0.9
    )
    assert share_of_copies(scale, nearest(draw(Population(), SHAPE, 300), LEARNED)).value <= 0.01


def test_noise_of_an_image_does_not_depend_on_the_expert_and_so_cancels_in_the_calibration() -> (
    None
):
    one = score_units(Population(), LEARNED, HELD)
    again = score_units(Population(), LEARNED, HELD)
    assert torch.equal(one.member_IA, again.member_IA) and torch.equal(one.other_IA, again.other_IA)
    membership = measure_membership(one, reference=again, shadows=[again])
    compared = [attack for attack in membership.attacks if "beside" in attack.name]
    assert {attack.auc.value for attack in compared} == {0.5}


def test_attacks_leave_the_expert_as_it_was() -> None:
    expert = Population().requires_grad_(False)
    score_units(expert, LEARNED[:3], HELD[:3])
    assert not any(
        weight.requires_grad or weight.grad is not None for weight in expert.parameters()
    )


@pytest.mark.parametrize("num_steps", [20_000, 200_000])
def test_audit_of_a_long_training_costs_a_quarter_of_it(num_steps: int) -> None:
    recipe = training_settings(num_steps, batch_size=128)
    effort = effort_of(recipe, num_units=2000, max_samples=10_000, trains_reference=True)
    num_steps_of_audit = (
        effort.reference_steps + NUM_SHADOWS * effort.shadow_steps + effort.control_steps
    )
    cost = 3 * 128 * num_steps_of_audit
    cost += (
        NUM_ATTACKED_EXPERTS * CALLS * 2000 * effort.images_per_unit
        + SAMPLE_STEPS * effort.num_samples
    )
    assert cost == effort.num_evaluations(recipe, 2000 * effort.images_per_unit)
    assert cost <= 1.01 * SHARE * 3 * 128 * num_steps
    assert share_of_training(recipe, 1000) <= 1.01 * SHARE
    assert effort.num_samples >= 500 and (num_steps < 200_000 or effort.num_samples == 10_000)


@pytest.mark.slow
def test_expert_of_64_digits_and_3000_steps_fails(tmp_path: Path) -> None:
    images = digits()
    audited = audit_digits(images[400:464], images[:400], 3000, tmp_path)
    assert audited.verdict == "fail", audited.reason


@pytest.mark.slow
def test_expert_of_400_digits_and_3000_steps_fails(tmp_path: Path) -> None:
    images = digits()
    audited = audit_digits(images[400:800], images[:400], 3000, tmp_path)
    assert audited.verdict == "fail", audited.reason


@pytest.mark.slow
def test_the_same_400_digits_and_steps_pass_with_private_training_at_epsilon_8(
    tmp_path: Path,
) -> None:
    images = digits()
    audited = audit_digits(images[400:800], images[:400], 3000, tmp_path, privately(400, 3000))
    assert audited.verdict == "pass", audited.reason


@pytest.mark.slow
def test_expert_of_1397_digits_and_few_steps_passes(tmp_path: Path) -> None:
    images = digits()
    audited = audit_digits(images[400:], images[:400], 300, tmp_path)
    assert audited.verdict == "pass", audited.reason


@pytest.mark.slow
def test_hundred_held_out_digits_are_too_few(tmp_path: Path) -> None:
    images = digits()
    audited = audit_digits(images[100:200], images[:100], 60, tmp_path)
    assert audited.verdict == "inconclusive"
    assert "100 held-out units" in audited.reason
