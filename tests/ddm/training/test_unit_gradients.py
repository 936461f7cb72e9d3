"""Gradients of single units: each is the sum over its images, for every architecture; clipping holds."""

from collections.abc import Iterator
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import path_named, target_of, x_t
from ddm.models import build_expert
from ddm.models.adaptation import adapt
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.learning import Adaptation, FullAdaptation, LoraAdaptation, PartialAdaptation
from ddm.training.objective import TrainingObjective
from ddm.training.private import STEPS_PER_CLIP, clipped, sensitivity
from ddm.training.unit_gradients import UnitLoss, UnitSamples, unit_gradient
from tests.support.case import case
from tests.support.recipes import training

SHAPE = (1, 8, 8)
PATH = path_named("linear")
LORA = LoraAdaptation(rank=3, alpha=6.0)
TEXT = TextCondition(dim=12, max_tokens=5)
EXPERTS: dict[str, tuple[Architecture, Condition]] = {
    "dit": (Dit(patch=2, hidden=32, depth=2, heads=2), NoCondition()),
    "dit of classes": (Dit(patch=2, hidden=32, depth=2, heads=2), ClassCondition(num_classes=3)),
    "mmdit": (Mmdit(patch=2, hidden=32, depth=2, heads=2), TEXT),
    "unet": (
        Unet(
            channels=(16, 32),
            num_res_blocks=1,
            attention=(False, True),
            norm_groups=8,
            head_channels=16,
        ),
        NoCondition(),
    ),
}


def expert_of(name: str, adaptation: Adaptation) -> nn.Module:
    """An expert whose weights are all off their starting values, where many gradients are 0."""
    architecture, condition = EXPERTS[name]
    random = torch.Generator().manual_seed(1)
    model = build_expert(architecture, SHAPE, condition=condition, seed=0)
    for spread in (0.05, 0.1):
        for weight in model.parameters():
            weight.data += (
                spread * weight.requires_grad * torch.randn(weight.shape, generator=random)
            )
        if spread == 0.05:
            model = adapt(model, adaptation, seed=1)
    return model


def unit_of(name: str, samples: int = 3) -> UnitSamples:
    """What a unit learns from in a step."""
    random = torch.Generator().manual_seed(2)
    (_, condition) = EXPERTS[name]
    condition_S = None
    if isinstance(condition, ClassCondition):
        condition_S = torch.randint(-1, 3, (samples,), generator=random)
    elif isinstance(condition, TextCondition):
        condition_S = torch.randn(samples, condition.max_tokens, condition.dim, generator=random)
    noise, x_0 = (torch.randn(samples, *SHAPE, generator=random) for _ in range(2))
    return UnitSamples(x_0, noise, torch.rand(samples, generator=random), condition_S)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.named_parameters() if value.requires_grad}


def one_by_one(model: nn.Module, unit: UnitSamples) -> Iterator[Tensor]:
    """Oracle: a plain backward pass over the images of one unit, one after another."""
    model.zero_grad()
    for sample in range(len(unit)):
        x_0, eps, t_B = (values[sample][None] for values in (unit.x_0, unit.eps, unit.t_S))
        condition = () if unit.condition is None else (unit.condition[sample][None],)
        error = model(x_t(PATH, x_0, eps, t_B), t_B, *condition) - target_of(
            PATH, "velocity", x_0, eps, t_B
        )
        (error.square().mean() / len(unit)).backward()
    yield from (
        weight.grad.clone()
        for weight in model.parameters()
        if weight.grad is not None and weight.requires_grad
    )


@pytest.mark.parametrize("name", list(EXPERTS))
def test_gradient_of_a_unit_is_the_mean_over_its_samples(name: str) -> None:
    adaptations: list[Adaptation] = [FullAdaptation(), LORA]
    if name == "dit":
        adaptations.append(PartialAdaptation(trained=("blocks",)))
    for adaptation in adaptations:
        model = expert_of(name, adaptation)
        unit = unit_of(name)
        gradients, _ = unit_gradient(
            UnitLoss(model, training(), TrainingObjective(PATH)), trained(model), unit
        )
        with case(adaptation.kind):
            for gradient, expected in zip(gradients.values(), one_by_one(model, unit), strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=2e-6)


def test_gradient_is_the_same_bits_wherever_the_unit_lies_in_memory() -> None:
    model = expert_of("mmdit", LORA)
    unit = unit_of("mmdit")
    loss = UnitLoss(model, training(), TrainingObjective(PATH))
    gradients = []
    for shift in (0, 1, 3):
        moved = [
            torch.cat([torch.zeros(shift), field.flatten()])[shift:].view(field.shape)
            for field in unit.fields
        ]
        gradient, _ = unit_gradient(
            loss, trained(model), UnitSamples(*moved).copied(torch.device("cpu"))
        )
        gradients.append(gradient)
    assert all(
        torch.equal(other[name], gradients[0][name]) for other in gradients for name in other
    )


def test_bfloat16_leaves_gradients_of_float32() -> None:
    model = expert_of("dit", LORA)
    unit = unit_of("dit")
    exact, _ = unit_gradient(
        UnitLoss(model, training(), TrainingObjective(PATH)), trained(model), unit
    )
    gradient, _ = unit_gradient(
        UnitLoss(model, training(), TrainingObjective(PATH), in_bf16=True), trained(model), unit
    )
    assert {part.dtype for part in gradient.values()} == {torch.float32}
    whole = [torch.cat([part.flatten() for part in grads.values()]) for grads in (exact, gradient)]
    assert torch.nn.functional.cosine_similarity(*whole, dim=0) > 0.99


def test_clipped_gradient_stays_within_the_clip_norm_keeps_its_direction_and_lies_on_the_grid() -> (
    None
):
    random = torch.Generator().manual_seed(3)
    for scale in (1e-12, 1e-3, 1.0, 1e6, 1e30):
        raw = {
            "a": scale * torch.randn(40, 3, generator=random),
            "b": scale * torch.randn(7, generator=random),
        }
        for clip in (0.01, 1.0, 50.0):
            flat_P = torch.cat([part.flatten().double() for part in clipped(raw, clip).values()])
            raw_P = torch.cat([part.flatten().double() for part in raw.values()])
            assert torch.equal(flat_P, flat_P.round())
            assert flat_P.norm() <= sensitivity(127)
            expected_P = raw_P * (clip / raw_P.norm()).clamp(max=1.0) * STEPS_PER_CLIP / clip
            torch.testing.assert_close(flat_P, expected_P, rtol=1e-5, atol=0.51)


def test_scaling_in_float32_leaves_a_clipped_norm_far_inside_the_slack_of_the_sensitivity() -> None:
    """Without the grid's rounding, which the sensitivity counts by itself: of few and of many weights."""
    random = torch.Generator().manual_seed(4)
    for num in (1, 100, 1_000_000):
        for scale in (1e-30, 1.0, 1e30):
            raw = {"a": scale * torch.randn(num, generator=random)}
            norm = clipped(raw, 1e-33)["a"].double().norm()
            assert norm <= STEPS_PER_CLIP * (1 + 2**-22) + sqrt(num) / 2


def test_gradient_that_is_not_finite_counts_as_none() -> None:
    for lost in (torch.nan, torch.inf, -torch.inf):
        raw = {"a": torch.ones(4), "b": torch.ones(2)}
        assert all(part.all() for part in clipped(raw, 1.0).values())
        raw["b"][1] = lost
        assert all((part == 0).all() for part in clipped(raw, 1.0).values())
    assert all((part == 0).all() for part in clipped({"a": torch.zeros(4)}, 1.0).values())


def test_replacing_a_unit_moves_the_sum_by_at_most_twice_the_sensitivity_and_without_clipping_by_more() -> (
    None
):
    model = expert_of("dit", LORA)
    unit = unit_of("dit")
    clip = 0.01
    loss = UnitLoss(model, training(), TrainingObjective(PATH))
    num = sum(part.numel() for part in trained(model).values())

    def gradients() -> tuple[Tensor, Tensor]:
        gradient, _ = unit_gradient(loss, trained(model), unit)
        grid = torch.cat([part.double().flatten() for part in clipped(gradient, clip).values()])
        return grid, torch.cat([part.double().flatten() for part in gradient.values()])

    before, raw_before = gradients()
    unit.x_0.mul_(-30.0)
    after, raw_after = gradients()
    moved = float((after - before).norm())
    assert 0.1 * sensitivity(num) < moved <= 2 * sensitivity(num)
    assert float((raw_after - raw_before).norm()) / clip > 3, (
        "control: what is not clipped moves by more"
    )
    assert sensitivity(num) == pytest.approx(STEPS_PER_CLIP * (1 + 2**-10) + sqrt(num) / 2)
