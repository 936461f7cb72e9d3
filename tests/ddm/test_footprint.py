"""Estimates of memory bracket what is measured: at least as much, and at most a few times as much."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from ddm.encoders.autoencoder import build_autoencoder
from ddm.footprint import (
    autoencoder_size,
    expert_size,
    file_bytes,
    inspection_bytes,
    perceptron_parameters,
    sampling_bytes,
    token_router_size,
    training_bytes,
)
from ddm.models import build_expert, network_size, num_parameters
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    Shape,
    TextCondition,
    Unet,
)
from ddm.protocol.latent import AutoencoderKlLatent
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.distributed import training_process
from ddm.training.objective import TrainingObjective
from ddm.training.private import PrivateSteps, PrivateTraining
from ddm.training.state import TrainingState
from tests.support.documents import plan_document, to_bytes

NONE = NoCondition()
TEXT = TextCondition(dim=64, max_tokens=32)
# An estimate is at least what is measured, and at most this many times it.
MAX_RATIO = 5.0


def peak_bytes(act: Callable[[], object]) -> int:
    """The most bytes of tensors that were alive at once in a call, by the allocator's own account."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        act()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(accumulate(change for _, change in changes))


CASES: list[tuple[Architecture, Shape, Condition, int]] = [
    (Dit(patch=1, hidden=64, depth=4, heads=4), (1, 32, 32), NONE, 8),
    (Dit(patch=4, hidden=512, depth=4, heads=8), (3, 32, 32), NONE, 4),
    (Mmdit(patch=2, hidden=128, depth=3, heads=4, shared_depth=1), (4, 32, 32), TEXT, 12),
    (
        Unet(channels=(32, 64), attention=(False, True), head_channels=16, norm_groups=8),
        (1, 32, 32),
        NONE,
        12,
    ),
]


@pytest.mark.parametrize(("architecture", "shape", "condition", "batch"), CASES)
def test_memory_of_a_step_and_of_a_forward_pass_is_bracketed(
    architecture: Architecture, shape: Shape, condition: Condition, batch: int
) -> None:
    size = network_size(architecture, shape, condition)
    model = build_expert(architecture, shape, condition=condition)
    x_B = torch.randn(batch, *shape)
    inputs = [x_B, torch.rand(batch)]
    if condition is TEXT:
        inputs.append(torch.randn(batch, TEXT.max_tokens, TEXT.dim))

    def forward() -> None:
        with torch.inference_mode():
            model.eval()(*inputs)

    def step() -> None:
        optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
        averaged = [weight.detach().clone() for weight in model.parameters()]
        torch.autograd.backward((model(*inputs) - x_B).square().mean())
        optimizer.step()
        assert averaged

    # The weights themselves are there before.
    for act, needed in (
        (forward, size.forward_bytes(batch)),
        (step, size.training_bytes(batch) - size.bytes),
    ):
        assert peak_bytes(act) <= needed <= MAX_RATIO * peak_bytes(act)


def plan(**changes: object) -> Plan:
    return Plan.parse(to_bytes(plan_document(**changes)), subject="plan.json")


def test_more_of_anything_takes_more_memory() -> None:
    small = plan()
    large = plan(data={"shape": [1, 64, 64], "range": [-1.0, 1.0]})
    assert inspection_bytes(small) < inspection_bytes(large)
    assert training_bytes(small) < training_bytes(large)
    assert training_bytes(small, parts=4) < training_bytes(small)
    one = {"num_experts": 3, "num": 16, "batch": 8, "steps": 10}
    assert sampling_bytes(small, **one) < sampling_bytes(large, **one)
    for more in ({"num": 32}, {"batch": 16}, {"steps": 20}, {"num_experts": 30}):
        assert sampling_bytes(small, **one) < sampling_bytes(small, **one | more)


def test_memory_of_a_private_step_is_bracketed() -> None:
    document = plan_document(data={"shape": [1, 4, 4], "range": [-1.0, 1.0]})
    document["expert"]["architecture"] = {
        "kind": "dit",
        "patch": 2,
        "hidden": 128,
        "depth": 4,
        "heads": 4,
    }
    terms = {
        "kind": "dp_sgd",
        "epsilon": 8.0,
        "delta": 1e-5,
        "units_per_step": 4,
        "images_per_unit": 2,
        "draws": 2,
    }
    document["expert"]["privacy"] = terms
    document["expert"]["training"]["batch_size"] = 4
    checked_plan = Plan.parse(to_bytes(document), subject="plan.json")
    expert = checked_plan.expert
    paid = DpSgdMechanism(noise_multiplier=0.8, rate=1.0, steps=1)
    assert expert.privacy is not None
    private = PrivateTraining(expert.privacy, paid, torch.arange(3), b"s" * 32)
    images = Examples(torch.rand(3, 1, 4, 4))
    model = build_expert(expert.architecture, checked_plan.expert_shape)

    def step() -> None:
        state = TrainingState(model, expert.training, training_process(Engine(device="cpu")), 1)
        steps = PrivateSteps(state, private, images, TrainingObjective())
        steps.advance(steps.draw(0))

    needed = training_bytes(checked_plan) - expert_size(checked_plan).bytes
    assert peak_bytes(step) <= needed <= MAX_RATIO * peak_bytes(step)
    # Its batch is that of one unit, which is computed as a whole however a machine divides other batches.
    assert training_bytes(checked_plan, parts=4) == training_bytes(checked_plan)


def test_bytes_of_files_are_those_of_their_tensors() -> None:
    small_plan = plan()
    header = 1 << 20
    assert file_bytes(small_plan) == {
        "plan/encoder.safetensors": 4 * (64 + 32 * 64) + header,
        "plan/centroids.safetensors": 4 * 64 * 32 + 2 * 8 * 64 + header,
        "plan/sketch.safetensors": 4 * (32 * 64 + 64 + 1 + 32 * (32 + 32 * 32 + 1)) + header,
    }
    gradients = {
        "kind": "hog",
        "path": "plan/encoder.safetensors",
        "dim": 32,
        "cells": 4,
        "mirrored": False,
    }
    assert file_bytes(plan(encoder=gradients))["plan/encoder.safetensors"] == 4 * 33 * 128 + header


@pytest.mark.parametrize("num_experts", [1, 7])
@pytest.mark.parametrize(
    "condition", [NoCondition(), ClassCondition(num_classes=5), TextCondition(dim=6, max_tokens=3)]
)
def test_size_of_the_samples_router_is_that_of_the_real_network(
    num_experts: int, condition: Condition
) -> None:
    sizes = {"patch": 2, "hidden": 24, "depth": 2, "heads": 3}
    shape = (3, 8, 4)
    reads_condition = not isinstance(condition, NoCondition)
    router = SamplesSettings(**sizes, num_steps=1, conditional=reads_condition)
    network = TokenRouter(Dit(**sizes), shape, num_experts, condition)
    size = token_router_size(router, shape, num_experts, condition)
    assert size.bytes == sum(weight.nbytes for weight in network.state_dict().values())
    assert size.activations == network.activations()


@pytest.mark.parametrize("channels", [(8,), (8, 16), (16, 8, 24)])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 16), (1, 8, 8, 4)])
def test_size_of_an_autoencoder_is_that_of_the_real_network(
    channels: tuple[int, ...], attends: bool, shape: Shape
) -> None:
    latent = AutoencoderKlLatent(
        channels=channels,
        attention=(attends,) * len(channels),
        latent_channels=3,
        num_res_blocks=2,
        norm_groups=4,
        scale=1.0,
    )
    network = build_autoencoder(latent, shape)
    assert autoencoder_size(latent, shape).bytes == sum(
        weight.nbytes for weight in network.state_dict().values()
    )


def test_parameters_of_a_perceptron_are_counted_exactly() -> None:
    layers = [torch.nn.Linear(8, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)]
    assert perceptron_parameters(8, 5, 2, 3) == sum(num_parameters(layer) for layer in layers)
