"""The rows: how an expert is trained, and the plan that says so."""

from dataclasses import dataclass, replace

from ddm.protocol.learning import BASE_PATH
from ddm.protocol.plan import Plan
from examples.paper.plan import plan_for

HELD_OUT = 300
MAX_IMAGES = 3000
"""That a silo learns; others are left to an attacker from outside."""
MAX_AUC = 0.6
"""The plan's limit, the default of a recipe."""
DELTA = 1e-5
_PATCHES = 4  # along either side, whatever the resolution: 16 tokens
_DRAWS = 2
_STEPS = 1500
_FEWEST = 30
_PARTS = ((5, "fifth"), (10, "tenth"), (_FEWEST, "thirtieth"), (40, "fortieth"))
_RATE = 0.004


@dataclass(frozen=True)
class TrainingChoice:
    """One way to train.

    Attributes:
        label: as the table names it.
        steps: of training.
        rate: the highest learning rate.
        from_base: whether training starts from the public base, or from random weights.
        lora: whether factors of rank 8 are trained, or all weights.
        epsilon: of DP-SGD, for each image, replace-one; None without.
    """

    label: str
    steps: int
    rate: float
    from_base: bool = False
    lora: bool = False
    epsilon: float | None = None

    def steps_at(self, share: float) -> int:
        """Return the steps of a training with a share of them."""
        return max(round(self.steps * share), 2)


def _choices() -> dict[str, TrainingChoice]:
    ways = {
        "random": TrainingChoice("all weights, from random weights", _STEPS, _RATE),
        "base": TrainingChoice("all weights, from the base", _STEPS, _RATE / 2, from_base=True),
        "lora": TrainingChoice("LoRA, from the base", _STEPS, _RATE, from_base=True, lora=True),
    }
    choices = dict[str, TrainingChoice]()
    for name, way in ways.items():
        choices[name] = way
        for share, part in _PARTS:
            if share >= _FEWEST and not way.from_base:
                # From random weights so few steps give noise.
                continue
            label = f"{way.label}, a {part} of the steps"
            choices[f"{name}-{part}"] = replace(way, label=label, steps=_STEPS // share)
    for name in ("base", "lora"):
        # A fifth of the steps is what private training usually takes here, and has the shortest name.
        private = {"": f"{name}-fifth", "-tenth": f"{name}-tenth", "-all": name}
        for epsilon in (8, 2):
            for suffix, without in private.items():
                label = f"{choices[without].label}, DP-SGD epsilon {epsilon}"
                choices[f"{name}-{epsilon}{suffix}"] = replace(
                    choices[without], label=label, epsilon=float(epsilon)
                )
    return choices


CHOICES = _choices()
BASE = TrainingChoice("the public base", _STEPS, _RATE)


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
    steps = choice.steps_at(share)
    training = {
        "num_steps": steps,
        "batch_size": 64,
        "learning_rate": choice.rate,
        "schedule": "cosine",
        "warmup_steps": steps // 20,
        "weight_decay": 0.01,
        "ema_decay": 0.99,
    }
    adaptation: dict[str, object] = {"kind": "full"}
    if choice.lora:
        adaptation = {"kind": "lora", "rank": 8, "alpha": 8.0}
    if choice.from_base:
        adaptation["base"] = BASE_PATH
    expert = {
        "architecture": {
            "kind": "dit",
            "patch": shape[-1] // _PATCHES,
            "hidden": 64,
            "depth": 2,
            "heads": 4,
        },
        "adaptation": adaptation,
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
        "max_mia_auc": MAX_AUC,
    }
    return plan_for(shape, statistics, expert=expert, audit=audit)
