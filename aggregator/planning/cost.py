"""Work out what a plan costs: privacy, bytes, and seconds of training."""

import tempfile
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.models import build_expert, count_flops, empty_expert, num_parameters
from ddm.protocol.architecture import TextCondition
from ddm.protocol.footprint import expert_size, training_bytes
from ddm.protocol.plan import Plan, most_experts
from ddm.routers.sketch import Sketch
from ddm.statistics.cost import plan_epsilon
from ddm.statistics.sketch import sketch_noise_level
from ddm.training.config import Engine
from ddm.training.loop import train

TIMED_STEPS = 12
_LOOP = 2.3  # a sample of a private step beside one of a plain step: the slowest loop that ADR 0057 measured
# about two minutes of one thread: a larger expert need not even fit this machine's memory
MOST_TIMED_FLOPS = 10**13


@dataclass(frozen=True)
class Cost:
    """What a plan costs each silo.

    Attributes:
        t_release: noise level at which sketches leave; None where none do.
        epsilon: what all statistics cost together at the total's delta.
        expert_bytes: size of one expert.
        parameters: its trained numbers.
        forward_flops: operations of evaluating one sample.
        training_flops: operations of one sample of a training step.
        training_bytes: estimated memory of a training step, weights and optimiser included.
        sampling_bytes: estimated memory of evaluating one sample, weights included.
        num_experts: most experts that a silo may have.
        train_s: seconds that training all of these would take here, one thread; of private training about.
        timed: whether a few training steps were measured for it; else it follows from the operations, and from the
            rate of this machine's matrix products.
    """

    t_release: float | None
    epsilon: float
    expert_bytes: int
    parameters: int
    forward_flops: int
    training_flops: int
    training_bytes: int
    sampling_bytes: int
    num_experts: int
    train_s: float
    timed: bool


def cost_of(plan: Plan, sketch: Sketch, seen: Tensor) -> Cost:
    """Return what a plan costs.

    Args:
        plan: the plan.
        sketch: the plan's sketch.
        seen: public images as experts see them, to time training on.
    """
    parameters = num_parameters(
        empty_expert(plan.expert.architecture, plan.expert_shape, plan.condition)
    )
    forward, both = count_flops(plan.expert.architecture, plan.expert_shape, plan.condition)
    size, num_experts, training = expert_size(plan), most_experts(plan), plan.expert.training
    timed = both * training.batch_size * TIMED_STEPS <= MOST_TIMED_FLOPS
    one_s = (
        _measure_training(plan, seen)
        if timed
        else both * training.batch_size * training.num_steps / _rate()
    )
    return Cost(
        t_release=sketch_noise_level(plan, sketch),
        epsilon=plan_epsilon(plan),
        expert_bytes=4 * parameters,
        parameters=parameters,
        forward_flops=forward,
        training_flops=both,
        training_bytes=training_bytes(plan),
        sampling_bytes=size.bytes + size.forward_bytes(1),
        num_experts=num_experts,
        train_s=num_experts * one_s * (private_step(plan).factor if plan.expert.privacy else 1.0),
        timed=timed,
    )


@dataclass(frozen=True)
class PrivateStep:
    """What a step of private training computes, beside a plain one of `batch_size` samples.

    Attributes:
        samples: in a step, on average: units, times images, times draws.
        slower: how many times as long a sample takes as in a plain step, by the table of ADR 0057.
        factor: how many times as long a step takes.
    """

    samples: float
    slower: float
    factor: float


def private_step(plan: Plan) -> PrivateStep:
    """Return what a step of a plan that trains privately computes at the silo whose units have most images.

    Raises:
        ValueError: the plan does not.
    """
    if (terms := plan.expert.privacy) is None:
        raise ValueError("the plan does not train privately")
    units = max(each.units(plan.statistics.unit) for each in plan.agreed.values())
    images = max(each.images / each.units(plan.statistics.unit) for each in plan.agreed.values())
    if plan.transform and plan.transform.slices:
        images *= plan.transform.slices.count  # a card counts pictures
    samples = min(units, terms.units_per_step) * min(images, terms.images_per_unit) * terms.draws
    return PrivateStep(samples, _LOOP, _LOOP * samples / plan.expert.training.batch_size)


def _rate() -> float:
    """Return the operations a second of a product of large matrices here, one thread, the best of a few."""
    threads, side = torch.get_num_threads(), 1024
    torch.set_num_threads(1)
    try:
        left, right, best = torch.ones(side, side), torch.ones(side, side), inf
        for _ in range(5):
            start = time.perf_counter()
            left @ right
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * side**3 / best


def _measure_training(plan: Plan, seen: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = plan.expert.training.model_copy(
            update={"num_steps": TIMED_STEPS, "checkpoint_steps": TIMED_STEPS}
        )
        condition = plan.condition
        expert = build_expert(plan.expert.architecture, plan.expert_shape, condition=condition)
        labels = None
        if isinstance(condition, TextCondition):  # whose tokens cost as much as the image's
            seen = seen[: plan.expert.training.batch_size]
            labels = torch.ones(len(seen), condition.max_tokens, condition.dim)
        with tempfile.TemporaryDirectory() as scratch:
            trained = train(
                expert,
                seen,
                settings,
                path_named(plan.objective.path),
                plan.t_distribution,
                checkpoint_dir=Path(scratch),
                on_progress=lambda progress: None,
                should_stop=lambda: False,
                labels=labels,
                prediction=plan.objective.prediction,
                engine=Engine(device="cpu"),
            )
    finally:
        torch.set_num_threads(threads)
    return trained.seconds / TIMED_STEPS * plan.expert.training.num_steps
