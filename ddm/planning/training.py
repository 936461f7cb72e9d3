"""What a recipe may leave out of the training. Its defaults were measured, see docs/results/recipe.md.

They may get better from version to version. Those of `Training` may not: a plan that leaves a field out keeps its
meaning.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ddm.protocol.architecture import Architecture
from ddm.protocol.learning import Share, Training

EMA_WIDTH = 0.1
MAX_WARMUP_STEPS = 100
WARMUP_DIVISOR = 20
# Of the usual rate, where training starts from a base: the full one would first undo a part of what the base knows.
BASE_RATE_SHARE = 0.5


class TrainingRecipe(Training):
    """How an expert is trained, by AdamW. `seed` covers training only, never the noise of a statistic.

    Attributes:
        learning_rate: the highest of the run; by default 0.5 over the width of a transformer, since wider ones need
            smaller rates, and half of that where all weights are trained from a base; a unet needs one. Where islands
            start from a seed, it is the seed's, and theirs is half of it.
        schedule: how the learning rate falls: along half a cosine or a line to `final_rate`, or not at all.
        warmup_steps: steps over which the rate first rises from 0; the fall has begun by then. By default a twentieth
            of the steps, and at most 100. Where islands start from a seed, seed and islands have this default for their
            own steps, and a number that is stated takes at most the same share of their steps.
        weight_decay: AdamW's weight decay.
        precision: precision of the arithmetic; auto is bf16 where products in it are faster (GPUs, AMX,
            AMD's avx512_bf16) and fp32 elsewhere; weights stay float32.
        ema_width: the average's width as a share of the run, so that it grows with the run (Karras et al. 2024); 0.1
            where the recipe names none of the three averages.
    """

    min_averages: ClassVar[int] = 0

    # A plan states the number; only its recipe may leave it to `plain`.
    learning_rate: Annotated[float | None, Field(gt=0.0, le=1.0)] = None  # type: ignore[assignment]
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: Annotated[int | None, Field(ge=0, le=10**9)] = None  # type: ignore[assignment]
    weight_decay: Share = 0.01
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def plain(
        self,
        architecture: Architecture,
        *,
        starts_from_base: bool = False,
        has_seed: bool = False,
        table: str = "expert.training",
    ) -> Training:
        """Return what a plan says about it, for an expert of these sizes.

        Args:
            architecture: the expert's.
            starts_from_base: whether all weights are trained, from those of a base.
            has_seed: whether that base is a seed, which is trained at the rate that the recipe names.
            table: the recipe's table that states it, for errors.

        Raises:
            ValueError: the recipe must state the learning rate.
        """
        values = {name: getattr(self, name) for name in Training.model_fields}
        rate = self.learning_rate
        # Without a seed, a rate that the recipe names is already meant for a start from the base.
        is_from_scratch = self.learning_rate is None or has_seed
        if rate is None:
            rate = usual_rate(architecture, table)
        if starts_from_base and is_from_scratch:
            rate *= BASE_RATE_SHARE
        values["learning_rate"] = rate
        if self.warmup_steps is None:
            # A short run, as from a base, would otherwise end before it reaches its rate.
            values["warmup_steps"] = usual_warmup_steps(self.num_steps)
        values["ema_width"] = self.ema_width if self.averages else EMA_WIDTH
        return Training.model_construct(**values)


def usual_warmup_steps(num_steps: int) -> int:
    """Return the warm-up of a run whose recipe names none."""
    return min(MAX_WARMUP_STEPS, num_steps // WARMUP_DIVISOR)


def usual_rate(architecture: Architecture, table: str) -> float:
    """Return the learning rate of an expert whose recipe names none.

    Raises:
        ValueError: an architecture for which no rate was measured.
    """
    rate = architecture.usual_learning_rate
    if rate is None:
        raise ValueError(
            f"{table}.learning_rate is needed for a {architecture.kind}: only transformers "
            "have a usual one"
        )
    return rate
