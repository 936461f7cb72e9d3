"""Work out what a plan costs: privacy, bytes, and seconds of training."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.audit.effort import share_of_training
from ddm.diffusion.path import path_named
from ddm.footprint import expert_size, training_bytes
from ddm.models import build_expert, count_flops, empty_expert, num_parameters
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
# A sample of a private step beside one of a plain step: the slowest loop that ADR 0057 measured.
PRIVATE_SLOWDOWN = 2.3
# About two minutes of one thread: a larger expert need not even fit this machine's memory.
MAX_TIMED_FLOPS = 10**13


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
        num_experts: the largest number of experts that a silo may have.
        train_s: seconds that training all of these would take here, one thread; of private training about.
        audit_s: seconds that the leak audit of all of these would take here, with as many units held out as the plan
            needs at least; 0 where the plan requires none.
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
    audit_s: float
    timed: bool


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
    step_flops = training_flops * training.batch_size
    timed = step_flops * TIMED_STEPS <= MAX_TIMED_FLOPS
    if timed:
        expert_s = time_training(plan, seen)
    else:
        expert_s = step_flops * training.num_steps / matrix_product_rate()
    audit_s = 0.0
    if plan.audit.required:
        # The audit's own trainings are plain ones, also where the expert's is private.
        audit_s = share_of_training(training, plan.audit.min_holdout_units) * expert_s
    if plan.expert.privacy:
        expert_s *= estimate_private_step(plan).factor

    num_experts = max_experts_per_silo(plan)
    size = expert_size(plan)
    return Cost(
        t_release=sketch_noise_level(plan, sketch),
        epsilon=plan_epsilon(plan),
        expert_bytes=4 * parameters,  # float32
        parameters=parameters,
        forward_flops=forward_flops,
        training_flops=training_flops,
        training_bytes=training_bytes(plan),
        sampling_bytes=size.bytes + size.forward_bytes(1),
        num_experts=num_experts,
        train_s=num_experts * expert_s,
        audit_s=num_experts * audit_s,
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


def estimate_private_step(plan: Plan) -> PrivateStep:
    """Return what a step of a plan that trains privately computes at the silo whose units have most images.

    Raises:
        ValueError: the plan does not.
    """
    terms = plan.expert.privacy
    if terms is None:
        raise ValueError("the plan does not train privately")
    # The largest of all silos in both, so that no silo trains longer than the operator is told.
    num_units = 0
    images_per_unit = 0.0
    for agreed in plan.agreed.values():
        silo_units = agreed.units(plan.statistics.unit)
        num_units = max(num_units, silo_units)
        # A card states totals, so that this is an average: single units may have more images.
        images_per_unit = max(images_per_unit, agreed.images / silo_units)
    if plan.transform and plan.transform.slices:
        images_per_unit *= plan.transform.slices.count  # a card counts pictures

    units_in_step = min(num_units, terms.units_per_step)
    samples = units_in_step * min(images_per_unit, terms.images_per_unit) * terms.draws
    factor = PRIVATE_SLOWDOWN * samples / plan.expert.training.batch_size
    return PrivateStep(samples, PRIVATE_SLOWDOWN, factor)


def time_training(plan: Plan, seen: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    settings = plan.expert.training.model_copy(
        # No checkpoint before the end: writing one would be timed as well.
        update={"num_steps": TIMED_STEPS, "checkpoint_steps": TIMED_STEPS}
    )
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
