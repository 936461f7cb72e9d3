"""The whole measurement on experts whose memory is known: two in closed form, and trained ones as slow tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.audit.attacks import CALLS, AttackedExpert, names
from ddm.audit.copies import NEIGHBOURS, CopyScale, duplicates, share_of_copies
from ddm.audit.effort import NUM_ATTACKED_EXPERTS, SAMPLE_STEPS, SHARE, effort_of, share_of_training
from ddm.audit.membership import Membership, UnitScores, measure_membership, sides_alike
from ddm.audit.running import draw_samples, score_images
from ddm.audit.verdict import Findings, judge
from ddm.diffusion.path import LinearPath
from ddm.evaluation.neighbours import nearest_in_blocks
from ddm.models import build_expert
from ddm.privacy.accounting import noise_multiplier_for
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.protocol.limits import Audit
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.private import PrivateTraining

SHAPE = (1, 6, 6)
CPU = torch.device("cpu")


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


def scored(network: nn.Module, learned: Tensor, held: Tensor) -> UnitScores:
    target = AttackedExpert(network.eval(), LinearPath(), "velocity", CPU)
    sides = [
        score_images(target, side, torch.arange(len(side)), None, seed, lambda num: None)
        for seed, side in enumerate((learned, held))
    ]
    return UnitScores(sides[0], sides[1], torch.arange(len(learned)), torch.arange(len(held)))


def samples(network: nn.Module, shape: tuple[int, ...], num: int) -> Tensor:
    target = AttackedExpert(network.eval(), LinearPath(), "velocity", CPU)
    return torch.cat(
        list(draw_samples(target, LinearPath(), shape, None, num, 0, lambda num: None))
    )


def near(rows: Tensor, learned: Tensor) -> Tensor:
    return nearest_in_blocks(rows.flatten(1), [(0, learned.flatten(1))], NEIGHBOURS)[0]


LEARNED = normal(60, 0)
HELD = normal(100, 1)


def by_attack(membership: Membership) -> Mapping[str, float]:
    best = dict.fromkeys((name.partition(" ")[0] for name in names()), 0.0)
    for attack in membership.attacks:
        kind = attack.name.partition(" ")[0]
        best[kind] = max(best[kind], attack.auc.value)
    return best


def test_every_attack_sees_an_expert_that_is_its_training_images() -> None:
    reference = scored(Population(), LEARNED, HELD)
    membership = measure_membership(
        scored(Memoriser(LEARNED), LEARNED, HELD), reference=reference, shadow=reference
    )
    auc_by_attack = by_attack(membership)
    assert min(auc_by_attack.values()) > 0.95, auc_by_attack


def test_no_attack_sees_members_in_an_expert_that_knows_the_population_alone() -> None:
    plain = scored(Population(), normal(150, 2), normal(150, 3))
    assert sides_alike(plain)
    other = scored(Memoriser(normal(60, 4)), normal(150, 2), normal(150, 3))
    membership = measure_membership(plain, reference=other, shadow=other)
    assert membership.worst.auc.value < 0.6


def test_samples_of_the_memoriser_are_copies_and_those_of_the_population_are_not() -> None:
    scale = CopyScale.of(near(HELD, LEARNED))
    assert (
        share_of_copies(scale, near(samples(Memoriser(LEARNED), SHAPE, 100), LEARNED)).value > 0.9
    )
    assert share_of_copies(scale, near(samples(Population(), SHAPE, 300), LEARNED)).value <= 0.01


def test_noise_of_an_image_does_not_depend_on_the_expert_and_so_cancels_in_the_calibration() -> (
    None
):
    one = scored(Population(), LEARNED, HELD)
    again = scored(Population(), LEARNED, HELD)
    assert torch.equal(one.member_IA, again.member_IA) and torch.equal(one.other_IA, again.other_IA)
    membership = measure_membership(one, reference=again, shadow=again)
    compared = [attack for attack in membership.attacks if "beside" in attack.name]
    assert {attack.auc.value for attack in compared} == {0.5}


def test_attacks_leave_the_expert_as_it_was() -> None:
    expert = Population().requires_grad_(False)
    scored(expert, LEARNED[:3], HELD[:3])
    assert not any(
        weight.requires_grad or weight.grad is not None for weight in expert.parameters()
    )


@pytest.mark.parametrize("num_steps", [20_000, 200_000])
def test_audit_of_a_long_training_costs_a_quarter_of_it(num_steps: int) -> None:
    recipe = settings(num_steps, batch_size=128)
    effort = effort_of(recipe, num_units=2000, max_samples=10_000, trains_reference=True)
    num_steps_of_audit = effort.reference_steps + effort.shadow_steps + effort.control_steps
    cost = 3 * 128 * num_steps_of_audit
    cost += (
        NUM_ATTACKED_EXPERTS * CALLS * 2000 * effort.images_per_unit
        + SAMPLE_STEPS * effort.num_samples
    )
    assert cost == effort.num_evaluations(recipe, 2000 * effort.images_per_unit)
    assert cost <= 1.01 * SHARE * 3 * 128 * num_steps
    assert share_of_training(recipe, 1000) <= 1.01 * SHARE
    assert effort.num_samples >= 500 and (num_steps < 200_000 or effort.num_samples == 10_000)


def settings(num_steps: int, **changes: object) -> Training:
    recipe = {"num_steps": num_steps, "batch_size": 32, "learning_rate": 0.003, "weight_decay": 0.0}
    recipe |= {
        "ema_decay": 0.99,
        "precision": "fp32",
        "checkpoint_steps": num_steps,
        "warmup_steps": 20,
    }
    return Training.model_validate(recipe | changes)


def trained(
    images: Tensor,
    recipe: Training,
    folder: Path,
    start: nn.Module | None = None,
    private: PrivateTraining | None = None,
) -> nn.Module:
    network = Dit.model_validate({"kind": "dit", "patch": 2, "hidden": 48, "depth": 2, "heads": 4})
    shape = images.shape[1:]
    expert = build_expert(network, shape, seed=0)
    if start is not None:
        expert.load_state_dict(start.state_dict())
    result = train(
        expert.requires_grad_(True),
        Examples(images),
        recipe,
        TrainingObjective(),
        TrainingRun(folder),
        private=private,
    )
    expert.load_state_dict(result.ema)
    return expert.eval().requires_grad_(False)


def privately(num_units: int, num_steps: int) -> PrivateTraining:
    """Private training at epsilon 8 for each image, with the noise that this takes."""
    terms = DpSgd(epsilon=8.0, delta=1e-5, units_per_step=8, images_per_unit=1, draws=4)
    rate = terms.rate(num_units)
    noise = noise_multiplier_for(terms.epsilon, terms.delta, rate, num_steps)
    paid = DpSgdMechanism(noise_multiplier=noise, rate=rate, steps=num_steps)
    return PrivateTraining(terms, paid, torch.arange(num_units), bytes(range(32)))


def some_members(scores: UnitScores, is_chosen_M: Tensor) -> UnitScores:
    return replace(
        scores,
        member_IA=scores.member_IA[is_chosen_M],
        member_I=scores.member_I[: int(is_chosen_M.sum())],
    )


def audited(
    learned: Tensor,
    held: Tensor,
    num_steps: int,
    folder: Path,
    private: PrivateTraining | None = None,
) -> tuple[str, str]:
    """Train an expert and audit it as a site does."""
    recipe = settings(num_steps)
    num = min(len(held), len(learned) // 2)
    effort = effort_of(recipe, num + len(held), 10_000, trains_reference=True)
    expert = trained(learned, recipe, folder / "expert", private=private)
    short = settings(
        effort.reference_steps, ema_decay=0.9, warmup_steps=effort.reference_steps // 5
    )
    reference = trained(learned[num:], short, folder / "reference")
    forgetful = settings(effort.shadow_steps, ema_decay=0.9, warmup_steps=effort.shadow_steps // 5)
    shadow = trained(learned[num:], forgetful, folder / "shadow", expert)
    few = learned[: effort.control_units]
    control = trained(
        few,
        settings(effort.control_steps, ema_decay=0.5, warmup_steps=0),
        folder / "control",
        expert,
    )
    reference_scores = scored(reference, learned[:num], held)
    shadow_scores = scored(shadow, learned[:num], held)
    of_few = torch.arange(num) < len(few)
    held_HK = near(held, learned)
    scale = CopyScale.of(held_HK)
    blurred = learned[:100] + 0.02 * torch.randn(
        learned[:100].shape, generator=torch.Generator().manual_seed(0)
    )
    findings = Findings(
        num_holdout=int((~duplicates(held_HK)).sum()),
        membership=measure_membership(
            scored(expert, learned[:num], held), reference=reference_scores, shadow=shadow_scores
        ),
        control=measure_membership(
            scored(control, few, held),
            reference=some_members(reference_scores, of_few),
            shadow=some_members(shadow_scores, of_few),
        ),
        sides_alike=sides_alike(reference_scores),
        copies={
            "pixels": share_of_copies(scale, near(samples(expert, learned.shape[1:], 500), learned))
        },
        control_copies={"pixels": float(scale.near_copies(near(blurred, learned)).double().mean())},
    )
    return judge(findings, Audit(required=True))


def digits() -> Tensor:
    """1,797 real digits in -1 to 1, shuffled."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images / 8.0 - 1.0).float()[:, None]
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]


@pytest.mark.slow
def test_expert_of_64_digits_and_3000_steps_fails(tmp_path: Path) -> None:
    images = digits()
    verdict, reason = audited(images[400:464], images[:400], 3000, tmp_path)
    assert verdict == "fail", reason


@pytest.mark.slow
def test_expert_of_400_digits_and_3000_steps_fails(tmp_path: Path) -> None:
    images = digits()
    verdict, reason = audited(images[400:800], images[:400], 3000, tmp_path)
    assert verdict == "fail", reason


@pytest.mark.slow
def test_the_same_400_digits_and_steps_pass_with_private_training_at_epsilon_8(
    tmp_path: Path,
) -> None:
    images = digits()
    verdict, reason = audited(images[400:800], images[:400], 3000, tmp_path, privately(400, 3000))
    assert verdict == "pass", reason


@pytest.mark.slow
def test_expert_of_1397_digits_and_few_steps_passes(tmp_path: Path) -> None:
    images = digits()
    verdict, reason = audited(images[400:], images[:400], 600, tmp_path)
    assert verdict == "pass", reason


@pytest.mark.slow
def test_hundred_held_out_digits_are_too_few(tmp_path: Path) -> None:
    images = digits()
    verdict, reason = audited(images[100:200], images[:100], 60, tmp_path)
    assert verdict == "inconclusive" and "100 held-out units" in reason
