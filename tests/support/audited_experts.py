"""Experts of real digits, trained and audited as a site does, in a few seconds each."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.audit.attacks import AttackedExpert
from ddm.audit.copies import NEIGHBOURS, CopyScale, duplicates, share_of_copies
from ddm.audit.effort import NUM_SHADOWS, effort_of
from ddm.audit.membership import UnitScores, measure_membership, sides_alike
from ddm.audit.running import draw_samples, score_images
from ddm.audit.verdict import MeasuredLeaks, judge
from ddm.diffusion.path import LinearPath
from ddm.evaluation.neighbours import nearest_in_blocks
from ddm.models import build_expert
from ddm.privacy.accounting import noise_multiplier_for
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.protocol.limits import Audit, Verdict
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.private import PrivateTraining

CPU = torch.device("cpu")


def score_units(network: nn.Module, learned: Tensor, held: Tensor) -> UnitScores:
    target = AttackedExpert(network.eval(), LinearPath(), "velocity", CPU)
    sides = [
        score_images(target, side, torch.arange(len(side)), None, seed, lambda num: None)
        for seed, side in enumerate((learned, held))
    ]
    return UnitScores(sides[0], sides[1], torch.arange(len(learned)), torch.arange(len(held)))


def draw(network: nn.Module, shape: tuple[int, ...], num: int) -> Tensor:
    target = AttackedExpert(network.eval(), LinearPath(), "velocity", CPU)
    return torch.cat(
        list(draw_samples(target, LinearPath(), shape, None, num, 0, lambda num: None))
    )


def nearest(rows: Tensor, learned: Tensor) -> Tensor:
    return nearest_in_blocks(rows.flatten(1), [(0, learned.flatten(1))], NEIGHBOURS)[0]


def training_settings(num_steps: int, **changes: object) -> Training:
    recipe = {"num_steps": num_steps, "batch_size": 32, "learning_rate": 0.003, "weight_decay": 0.0}
    recipe |= {
        "ema_decay": 0.99,
        "precision": "fp32",
        "warmup_steps": 20,
    }
    return Training.model_validate(recipe | changes)


def train_expert(
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


def _some_members(scores: UnitScores, is_chosen_M: Tensor) -> UnitScores:
    return replace(
        scores,
        member_IA=scores.member_IA[is_chosen_M],
        member_I=scores.member_I[: int(is_chosen_M.sum())],
    )


@dataclass(frozen=True)
class AuditedDigits:
    """An expert and what its audit measured."""

    expert: nn.Module
    findings: MeasuredLeaks

    @property
    def verdict(self) -> Verdict:
        return judge(self.findings, Audit(required=True))[0]

    @property
    def reason(self) -> str:
        return judge(self.findings, Audit(required=True))[1]


def audit_digits(
    learned: Tensor,
    held: Tensor,
    num_steps: int,
    folder: Path,
    private: PrivateTraining | None = None,
) -> AuditedDigits:
    """Train an expert on 8 x 8 images and audit it as a site does.

    Args:
        learned: the images that it learns; the first of them are the attacked members.
        held: images held out.
        num_steps: of training.
        folder: empty, for checkpoints.
        private: trains it privately.
    """
    recipe = training_settings(num_steps)
    num = min(len(held), len(learned) // 2)
    effort = effort_of(recipe, num + len(held), 10_000, trains_reference=True)
    expert = train_expert(learned, recipe, folder / "expert", private=private)
    short = training_settings(
        effort.reference_steps, ema_decay=0.9, warmup_steps=effort.reference_steps // 5
    )
    reference = train_expert(learned[num:], short, folder / "reference")
    shadows = []
    for number in range(NUM_SHADOWS):
        forgetful = training_settings(
            effort.shadow_steps,
            ema_decay=0.9,
            warmup_steps=effort.shadow_steps // 5,
            seed=number,
        )
        shadows.append(train_expert(learned[num:], forgetful, folder / f"shadow-{number}", expert))
    few = learned[: effort.control_units]
    control = train_expert(
        few,
        training_settings(effort.control_steps, ema_decay=0.5, warmup_steps=0),
        folder / "control",
        expert,
    )
    reference_scores = score_units(reference, learned[:num], held)
    shadow_scores = [score_units(shadow, learned[:num], held) for shadow in shadows]
    of_few = torch.arange(num) < len(few)
    held_HK = nearest(held, learned)
    scale = CopyScale.of(held_HK)
    blurred = learned[:100] + 0.02 * torch.randn(
        learned[:100].shape, generator=torch.Generator().manual_seed(0)
    )
    findings = MeasuredLeaks(
        num_holdout=int((~duplicates(held_HK)).sum()),
        membership=measure_membership(
            score_units(expert, learned[:num], held),
            reference=reference_scores,
            shadows=shadow_scores,
        ),
        control=measure_membership(
            score_units(control, few, held),
            reference=_some_members(reference_scores, of_few),
            shadows=[_some_members(scores, of_few) for scores in shadow_scores],
        ),
        sides_alike=sides_alike(reference_scores),
        copies={
            "pixels": share_of_copies(scale, nearest(draw(expert, learned.shape[1:], 500), learned))
        },
        control_copies={
            "pixels": float(scale.near_copies(nearest(blurred, learned)).double().mean())
        },
    )
    return AuditedDigits(expert, findings)


def digits() -> Tensor:
    """1,797 real digits in -1 to 1, shuffled."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images / 8.0 - 1.0).float()[:, None]
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
