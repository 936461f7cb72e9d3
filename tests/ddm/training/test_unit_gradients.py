"""Gradients of single units: every way gives that of a unit computed alone, for every architecture; clipping holds."""

from collections.abc import Iterator
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import path_named, target_of, x_t
from ddm.models import build_expert
from ddm.models.adaptation import adapt
from ddm.protocol.plan import (
    Adaptation,
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    FullAdaptation,
    LoraAdaptation,
    Mmdit,
    NoCondition,
    PartialAdaptation,
    TextCondition,
    Unet,
)
from ddm.training.private import STEPS_PER_CLIP, clipped, sensitivity
from ddm.training.unit_gradients import UnitBatch, UnitLoss, by_copies, by_loop, takes_copies
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
        Unet(channels=(16, 32), num_res_blocks=1, attention=(False, True), norm_groups=8, head_channels=16),
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
            weight.data += spread * weight.requires_grad * torch.randn(weight.shape, generator=random)
        if spread == 0.05:
            model = adapt(model, adaptation, seed=1)
    return model


def batch_of(name: str, num: int = 4, samples: int = 3) -> UnitBatch:
    """Some units; the first has a sample less, padded."""
    random, (_, condition) = torch.Generator().manual_seed(2), EXPERTS[name]
    given = None
    if isinstance(condition, ClassCondition):
        given = torch.randint(-1, 3, (num, samples), generator=random)
    elif isinstance(condition, TextCondition):
        given = torch.randn(num, samples, condition.max_tokens, condition.dim, generator=random)
    weight_US = torch.full((num, samples), 1 / samples)
    weight_US[0] = torch.tensor([0.5] * (samples - 1) + [0.0])
    noise, x_0 = (torch.randn(num, samples, *SHAPE, generator=random) for _ in range(2))
    return UnitBatch(x_0, noise, torch.rand(num, samples, generator=random), weight_US, given)


def alone(model: nn.Module, batch: UnitBatch, unit: int) -> Iterator[Tensor]:
    """Oracle: a plain backward pass over the images of one unit, one after another."""
    model.zero_grad()
    for sample in torch.nonzero(batch.weight_US[unit]).flatten().tolist():
        x_0, eps, t_B = (each[unit, sample][None] for each in (batch.x_0, batch.eps, batch.t_US))
        condition = () if batch.condition is None else (batch.condition[unit, sample][None],)
        error = model(x_t(PATH, x_0, eps, t_B), t_B, *condition) - target_of(PATH, "velocity", x_0, eps, t_B)
        (error.square().mean() * batch.weight_US[unit, sample]).backward()
    yield from (
        weight.grad.clone() for weight in model.parameters() if weight.grad is not None and weight.requires_grad
    )


@pytest.mark.parametrize("name", list(EXPERTS))
def test_gradient_of_each_unit_is_that_of_the_unit_alone(name: str) -> None:
    adaptations: list[Adaptation] = [FullAdaptation(), LORA]
    if name == "dit":
        adaptations.append(PartialAdaptation(trained=("blocks",)))
    for adaptation in adaptations:
        model = expert_of(name, adaptation)
        batch, loss = batch_of(name), UnitLoss(model, training(), PATH, "velocity")
        named = {key: value for key, value in model.named_parameters() if value.requires_grad}
        ways = [by_loop] + [by_copies] * takes_copies(model)
        assert len(ways) == 1 + isinstance(adaptation, LoraAdaptation)
        for way in ways:
            found, _ = way(loss, named, batch)
            with case(adaptation.kind, way.__name__):
                for unit in range(len(batch)):
                    for gradient, expected in zip(found.values(), alone(model, batch, unit), strict=True):
                        torch.testing.assert_close(gradient[unit], expected, rtol=1e-4, atol=2e-6)


def test_units_do_not_see_each_other() -> None:
    """Statistics of a group, or a shared factor, would: another unit changes nothing of the first unit's gradient."""
    for name in EXPERTS:
        model, batch = expert_of(name, LORA), batch_of(name)
        named = {key: value for key, value in model.named_parameters() if value.requires_grad}
        loss = UnitLoss(model, training(), PATH, "velocity")
        before, _ = by_copies(loss, named, batch)
        batch.x_0[1:] = 100.0
        after, _ = by_copies(loss, named, batch)
        with case(name):
            assert all(torch.allclose(before[key][0], after[key][0], atol=1e-6) for key in named)
            assert not all(torch.allclose(before[key][1], after[key][1], atol=1e-6) for key in named)


def test_bfloat16_leaves_gradients_of_float32() -> None:
    model, batch = expert_of("dit", LORA), batch_of("dit")
    named = {key: value for key, value in model.named_parameters() if value.requires_grad}
    exact, _ = by_copies(UnitLoss(model, training(), PATH, "velocity"), named, batch)
    found, _ = by_copies(UnitLoss(model, training(), PATH, "velocity", in_bf16=True), named, batch)
    assert {each.dtype for each in found.values()} == {torch.float32}
    whole = [torch.cat([each.flatten() for each in grads.values()]) for grads in (exact, found)]
    assert torch.nn.functional.cosine_similarity(*whole, dim=0) > 0.99


def test_clipped_gradient_stays_within_the_clip_norm_keeps_its_direction_and_lies_on_the_grid() -> None:
    random, num = torch.Generator().manual_seed(3), 5
    for scale in (1e-12, 1e-3, 1.0, 1e6, 1e30):
        given = {
            "a": scale * torch.randn(num, 40, 3, generator=random),
            "b": scale * torch.randn(num, 7, generator=random),
        }
        for clip in (0.01, 1.0, 50.0):
            found = clipped(given, clip)
            flat_UP = torch.cat([each.flatten(1).double() for each in found.values()], 1)
            raw_UP = torch.cat([each.flatten(1).double() for each in given.values()], 1)
            assert torch.equal(flat_UP, flat_UP.round())
            assert (flat_UP.norm(dim=1) <= sensitivity(127)).all()
            expected_UP = raw_UP * (clip / raw_UP.norm(dim=1, keepdim=True)).clamp(max=1.0) * STEPS_PER_CLIP / clip
            torch.testing.assert_close(flat_UP, expected_UP, rtol=1e-5, atol=0.51)


def test_gradient_that_is_not_finite_counts_as_none_and_spoils_no_other() -> None:
    given = {"a": torch.ones(3, 4), "b": torch.ones(3, 2)}
    given["a"][1, 2], given["b"][2, 0] = torch.nan, torch.inf
    found = clipped(given, 1.0)
    assert found["a"][0].sum() > 0
    assert all((each[1:] == 0).all() for each in found.values())
    assert all((each == 0).all() for each in clipped({"a": torch.zeros(2, 4)}, 1.0).values())


def test_replacing_a_unit_moves_the_sum_by_at_most_twice_the_sensitivity_and_without_clipping_by_more() -> None:
    model, batch = expert_of("dit", LORA), batch_of("dit")
    named = {key: value for key, value in model.named_parameters() if value.requires_grad}
    loss, clip = UnitLoss(model, training(), PATH, "velocity"), 0.01
    num = sum(value.numel() for value in named.values())

    def total() -> tuple[Tensor, Tensor]:
        gradients, _ = by_copies(loss, named, batch)
        grid = torch.cat([each.double().sum(0).flatten() for each in clipped(gradients, clip).values()])
        return grid, torch.cat([each.double().sum(0).flatten() for each in gradients.values()])

    before, raw_before = total()
    batch.x_0[2] *= -30.0
    after, raw_after = total()
    moved = float((after - before).norm())
    assert 0.1 * sensitivity(num) < moved <= 2 * sensitivity(num)
    assert float((raw_after - raw_before).norm()) / clip > 3, "control: what is not clipped moves by more"
    assert sensitivity(num) == pytest.approx(STEPS_PER_CLIP * (1 + 2**-10) + sqrt(num) / 2)
