"""The rows: how an expert is trained, and the plan that says so."""

from dataclasses import dataclass

from ddm.protocol.plan import Plan
from examples.paper.plan import plan_for

HELD_OUT = 300
MAX_IMAGES = 3000
"""That a silo learns; others are left to an attacker from outside."""
DELTA = 1e-5
_PATCHES = 4  # along either side, whatever the resolution: 16 tokens
_DRAWS = 2


@dataclass(frozen=True)
class TrainingChoice:
    """One way to train.

    Attributes:
        label: as the table names it.
        steps: of training.
        rate: the highest learning rate.
        lora: whether a public expert is adapted, by factors of rank 8, or all weights are trained.
        epsilon: of DP-SGD, for each image, replace-one; None without.
    """

    label: str
    steps: int
    rate: float
    lora: bool = False
    epsilon: float | None = None


PUBLIC = TrainingChoice("the public expert", 1500, 0.004)
CHOICES = {
    "whole": TrainingChoice("all weights", 1500, 0.004),
    "fewer": TrainingChoice("all weights, a fifth of the steps", 300, 0.004),
    "lora": TrainingChoice("LoRA", 300, 0.004, lora=True),
    "lora-8": TrainingChoice("LoRA, DP-SGD epsilon 8", 300, 0.004, lora=True, epsilon=8.0),
    "lora-2": TrainingChoice("LoRA, DP-SGD epsilon 2", 300, 0.004, lora=True, epsilon=2.0),
}


def plan_of(
    shape: tuple[int, ...], choice: TrainingChoice, num_units: int, share: float = 1.0
) -> Plan:
    """Return the plan of one choice.

    Args:
        shape: of an image.
        choice: how experts are trained.
        num_units: of the silo, those held out included; sets how many enter a private step.
        share: of the choice's steps.
    """
    steps = max(round(choice.steps * share), 2)
    training = {
        "num_steps": steps,
        "batch_size": 64,
        "learning_rate": choice.rate,
        "schedule": "cosine",
        "warmup_steps": steps // 20,
        "weight_decay": 0.01,
        "ema_decay": 0.99,
    }
    expert = {
        "architecture": {
            "kind": "dit",
            "patch": shape[-1] // _PATCHES,
            "hidden": 64,
            "depth": 2,
            "heads": 4,
        },
        "adaptation": {"kind": "lora", "rank": 8, "alpha": 8.0}
        if choice.lora
        else {"kind": "full"},
        "training": training,
    }
    if choice.epsilon is not None:
        expert["privacy"] = {
            "kind": "dp_sgd",
            "epsilon": choice.epsilon,
            "delta": DELTA,
            "units_per_step": min(num_units // 4, 128),
            "images_per_unit": 1,
            "draws": _DRAWS,
        }
    counts = {"epsilon": 1.0, "num_groups": 1}
    statistics = {"unit": "image", "total": {"epsilon": 1.0, "delta": 0.0}, "counts": counts}
    audit = {
        "required": True,
        "min_holdout_units": HELD_OUT * 5 // 6,
        "max_near_copy_rate": 0.01,
        "max_mia_auc": 0.6,
    }
    return plan_for(shape, statistics, expert=expert, audit=audit)
