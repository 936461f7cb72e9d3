"""Work out what a plan costs: privacy, bytes, and seconds of training."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.loading.plan import sketch_noise_level
from ddm.models import build_expert, empty_expert, num_parameters
from ddm.privacy.plan_cost import plan_epsilon
from ddm.protocol.plan import Plan, TextCondition, most_experts
from ddm.routers.sketch import Sketch
from ddm.training.config import Engine
from ddm.training.loop import train

TIMED_STEPS = 12


@dataclass(frozen=True)
class Cost:
    """What a plan costs each silo.

    Attributes:
        t_release: noise level at which sketches leave; None where none do.
        epsilon: what all statistics cost together at the total's delta.
        expert_bytes: size of one expert.
        num_experts: most experts that a silo may have.
        train_s: seconds that training all of these would take here, one thread, measured on a few steps.
    """

    t_release: float | None
    epsilon: float
    expert_bytes: int
    num_experts: int
    train_s: float


def cost_of(plan: Plan, sketch: Sketch, seen: Tensor) -> Cost:
    """Return what a plan costs.

    Args:
        plan: the plan.
        sketch: the plan's sketch.
        seen: public images as experts see them, to time training on.
    """
    expert = empty_expert(plan.expert.architecture, plan.expert_shape, plan.condition)
    num_experts = most_experts(plan)
    return Cost(
        t_release=sketch_noise_level(plan, sketch),
        epsilon=plan_epsilon(plan),
        expert_bytes=4 * num_parameters(expert),
        num_experts=num_experts,
        train_s=num_experts * _measure_training(plan, seen),
    )


def _measure_training(plan: Plan, seen: Tensor) -> float:
    """Time a few real training steps here, one thread, and scale; what a silo's machine needs may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        settings = plan.expert.training.model_copy(update={"num_steps": TIMED_STEPS, "checkpoint_steps": TIMED_STEPS})
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
