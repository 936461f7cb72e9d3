"""The recipes that `recipe.py` compares: the same network, images and operations, one change at a time."""

from dataclasses import dataclass, replace
from typing import Any

from ddm.planning.training import TrainingRecipe
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import LogitNormalT, TDistribution, Training, UniformT

SHAPE = (1, 28, 28)
_NETWORK = Dit(patch=4, hidden=96, depth=3, heads=4)
_NARROW = Dit(patch=4, hidden=48, depth=3, heads=4)


@dataclass(frozen=True)
class RecipeRow:
    """One recipe.

    Attributes:
        label: as the table names it.
        training: the settings.
        times: distribution of the training times.
        network: the expert.
        widths: of averages among which the best is chosen afterwards; none of a row with the recipe's own.
        drop: share of the images whose class training hides; None of a row without classes.
    """

    label: str
    training: Training
    times: TDistribution = UniformT()
    network: Dit = _NETWORK
    widths: tuple[float, ...] = ()
    drop: float | None = None

    def shortened(self, steps: int) -> "RecipeRow":
        """Return it with fewer steps."""
        changes = {"num_steps": steps, "ema_snapshots": min(self.training.ema_snapshots, steps)}
        return replace(self, training=self.training.model_copy(update=changes))

    def but(self, label: str, **changes: Any) -> "RecipeRow":
        """Return it with other settings, or other `times`, `widths`, `drop` or another `network`."""
        others = {
            name: changes.pop(name)
            for name in ("times", "network", "widths", "drop")
            if name in changes
        }
        settings = Training.model_validate({**self.training.model_dump(), **changes})
        return replace(self, label=label, training=settings, **others)


_PLAIN = RecipeRow(
    "uniform t, constant rate of 0.001, fp32",
    Training(
        num_steps=1500,
        batch_size=64,
        learning_rate=0.001,
        schedule="constant",
        weight_decay=0.01,
        ema_decay=0.995,
        precision="fp32",
    ),
)
_BOTH = _PLAIN.but("logit-normal t and cosine", times=LogitNormalT(), schedule="cosine")
_FOUR = _BOTH.but("... and 4 times the rate", learning_rate=0.004)
_EIGHT = _FOUR.but("... and 8 times the rate, bf16", learning_rate=0.008, precision="bf16")
_DEFAULT = RecipeRow(
    "all defaults, 3000 steps of 32 images",
    TrainingRecipe(num_steps=3000, batch_size=32, precision="bf16").plain(_NETWORK),
    LogitNormalT(),
)

ROWS: dict[str, RecipeRow] = {
    "plain": _PLAIN,
    "cosine": _PLAIN.but("cosine", schedule="cosine"),
    "logit": _PLAIN.but("logit-normal t", times=LogitNormalT()),
    "both": _BOTH,
    "rate2": _BOTH.but("... and twice the rate", learning_rate=0.002),
    "rate4": _FOUR,
    "bf16": _FOUR.but("... and 4 times the rate, bf16", precision="bf16"),
    "rate8": _EIGHT,
    "rate16": _EIGHT.but("... and 16 times the rate, bf16", learning_rate=0.016),
    "betas": _EIGHT.but("8 times, betas .9 and .99", betas=(0.9, 0.99)),
    "decay": _EIGHT.but("8 times, no weight decay", weight_decay=0.0),
    "width": _EIGHT.but("8 times, average of width .1", ema_decay=None, ema_width=0.1),
    "small": _EIGHT.but("8 times, twice the steps of 32 images", batch_size=32, num_steps=3000),
    "sigmoid": _EIGHT.but("8 times, loss weighted by a sigmoid", loss_weighting="sigmoid"),
    "epochs": _EIGHT.but("8 times, epochs", order="epochs"),
    "qk": _EIGHT.but(
        "8 times, queries and keys normalised",
        network=_NETWORK.model_copy(update={"qk_norm": True}),
    ),
    "warmup": _EIGHT.but("8 times, no warm-up", warmup_steps=0),
    "flip": _EIGHT.but("8 times, images mirrored at random", flip=True),
    "afterwards": _EIGHT.but(
        "8 times, the best of five averages, chosen afterwards",
        ema_decay=None,
        ema_width=0.1,
        ema_snapshots=32,
        widths=(0.03, 0.05, 0.1, 0.15, 0.2),
    ),
    "dropped": _EIGHT.but("8 times, told the class, which is hidden in a tenth", drop=0.1),
    "told": _EIGHT.but("8 times, told the class always", drop=0.0),
    "narrow": _EIGHT.but("8 times, half the width", network=_NARROW),
    "narrow16": _EIGHT.but("16 times, half the width", network=_NARROW, learning_rate=0.016),
    "default": _DEFAULT,
}
