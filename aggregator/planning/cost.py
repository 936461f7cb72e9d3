"""Work out what a plan costs: privacy, bytes, and seconds of training."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.footprint import expert_size
from ddm.models import build_expert, count_flops, empty_expert, num_parameters
from ddm.planning.estimates import (
    DeviceEstimate,
    Workload,
    estimate_on_devices,
    estimate_work,
)
from ddm.protocol.architecture import TextCondition
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.routers.sketch import Sketch
from ddm.statistics.cost import plan_epsilon
from ddm.statistics.sketch import sketch_noise_level
from ddm.system.speed import matrix_product_rate, one_thread
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective

TIMED_STEPS = 12
# About two minutes of one thread: a larger expert need not even fit this machine's memory.
MAX_TIMED_FLOPS = 10**13


@dataclass(frozen=True)
class Cost:
    """What a plan costs each silo.

    Attributes:
        t_release: noise level at which sketches leave; None where none do.
        epsilon: what all statistics cost together at the total's delta.
        expert_bytes: size of one expert.
        parameters: the number of its trained weights.
        forward_flops: operations of evaluating one sample.
        training_flops: operations of one sample of a training step.
        work: the computation, memory and disk that it needs at its largest silo.
        sampling_bytes: estimated memory of evaluating one sample, weights included.
        num_experts: the largest number of experts that a silo may have.
        train_s: seconds that training all of these would take here, one thread; for private training an approximation.
        audit_s: seconds that the leak audit of all of these would take here, with as many units held out as the plan
            needs at least; 0 where the plan requires none.
        timed: whether a few training steps were measured for it; else it follows from the operations, and from the
            rate of this machine's matrix products.
        on_devices: how long the same takes on named devices, by their published rates.
    """

    t_release: float | None
    epsilon: float
    expert_bytes: int
    parameters: int
    forward_flops: int
    training_flops: int
    work: Workload
    sampling_bytes: int
    num_experts: int
    train_s: float
    audit_s: float
    timed: bool
    on_devices: tuple[DeviceEstimate, ...]


def estimate_cost(plan: Plan, sketch: Sketch, seen: Tensor) -> Cost:
    """Return what a plan costs.

    Args:
        plan: the plan.
        sketch: the plan's sketch.
        seen: public images as experts see them, to time training on.
    """
    architecture = plan.expert.architecture
    training = plan.expert.training
    parameters = num_parameters(empty_expert(architecture, plan.expert_shape, plan.condition))
    forward_flops, training_flops = count_flops(architecture, plan.expert_shape, plan.condition)

    # A few real steps are the best estimate; where they would take too long, the machine's arithmetic rate stands in.
    work = estimate_work(plan)
    num_experts = max_experts_per_silo(plan)
    plain_flops = training_flops * training.batch_size * training.num_steps * num_experts
    timed = training_flops * training.batch_size * TIMED_STEPS <= MAX_TIMED_FLOPS
    if timed:
        plain_s = num_experts * time_training(plan, seen)
    else:
        plain_s = plain_flops / matrix_product_rate()
    s_per_flop = plain_s / plain_flops

    size = expert_size(plan)
    return Cost(
        t_release=sketch_noise_level(plan, sketch),
        epsilon=plan_epsilon(plan),
        expert_bytes=4 * parameters,  # float32
        parameters=parameters,
        forward_flops=forward_flops,
        training_flops=training_flops,
        work=work,
        sampling_bytes=size.bytes + size.forward_bytes(1),
        num_experts=num_experts,
        train_s=s_per_flop * work.training_flops,
        audit_s=s_per_flop * work.audit_flops,
        timed=timed,
        on_devices=estimate_on_devices(work),
    )


def time_training(plan: Plan, seen: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    settings = plan.expert.training.model_copy(update={"num_steps": TIMED_STEPS})
    condition = plan.condition
    labels = None
    if isinstance(condition, TextCondition):
        # The tokens of texts cost as much as those of images.
        seen = seen[: plan.expert.training.batch_size]
        labels = torch.ones(len(seen), condition.max_tokens, condition.dim)
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        trained = train(
            build_expert(plan.expert.architecture, plan.expert_shape, condition=condition),
            Examples(seen, labels),
            settings,
            TrainingObjective(
                path_named(plan.objective.path), plan.t_distribution, plan.objective.prediction
            ),
            TrainingRun(Path(scratch), engine=Engine(device="cpu")),
        )
    return trained.seconds / TIMED_STEPS * plan.expert.training.num_steps
