"""What experts learn, and how: objective, times, starting point, recipe. A part of the plan."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.architecture import Architecture, Dit
from ddm.protocol.base import Model, NaturalInt, PositiveInt, RelativePath, SiloId


class ExpertObjective(Model):
    """The probability path that an expert learns, and what it predicts on it.

    Attributes:
        path: how samples become noise; the ensemble answers on that of `[objective]`.
        prediction: what the network predicts.
    """

    path: Literal["linear", "cosine_vp"] = "linear"
    prediction: Literal["velocity", "eps"] = "velocity"


class SiloObjective(ExpertObjective):
    """What the experts of one silo learn in place of the federation's objective.

    Attributes:
        silo_id: the silo; exceptions are listed in alphabetical order.
    """

    silo_id: SiloId


class Objective(ExpertObjective):
    """What experts learn, and the path on which the ensemble answers; silos may learn something else.

    Fields that were added after the first plans were signed are left out of a document where they say nothing.
    """

    exceptions: Annotated[tuple[SiloObjective, ...], Field(max_length=1024, exclude_if=lambda given: not given)] = ()

    def of(self, silo_id: str) -> ExpertObjective:
        """Return what the experts of a silo learn."""
        return next((other for other in self.exceptions if other.silo_id == silo_id), self)


Shift = Annotated[float, Field(ge=0.01, le=100.0, exclude_if=lambda shift: shift == 1.0)]
"""Moves times towards noise, ``t' = s t / (1 + (s - 1) t)``: an image of m values needs ``s = sqrt(m / n)`` to lose as
much at t' as one of n values at t on the linear path (Esser et al. 2024, section 5.3.2). 1 moves nothing."""


class UniformT(Model):
    """Training times drawn uniformly from (0, 1), then shifted.

    Attributes:
        shift: s of ``t' = s t / (1 + (s - 1) t)``, which moves times towards noise; 1 moves nothing.
    """

    kind: Literal["uniform"] = "uniform"
    shift: Shift = 1.0


class LogitNormalT(Model):
    """Training times ``sigmoid(mean + std * normal)``, then shifted.

    Attributes:
        mean: mean of the normal.
        std: standard deviation of the normal.
        shift: s of ``t' = s t / (1 + (s - 1) t)``, which moves times towards noise; 1 moves nothing.
    """

    kind: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    std: Annotated[float, Field(gt=0.0)] = 1.0
    shift: Shift = 1.0


TDistribution = Annotated[UniformT | LogitNormalT, Field(discriminator="kind")]


class FullAdaptation(Model):
    """Every weight of the expert is trained, from random ones."""

    kind: Literal["full"] = "full"


class LoraAdaptation(Model):
    """From a public expert, every linear layer by ``W + alpha / rank * up down``; published merged (Hu et al. 2021).

    Attributes:
        base: where the public expert lies in the plan's bundle.
        rank: rank of the product that is learnt.
        alpha: its weight, divided by the rank.
    """

    kind: Literal["lora"] = "lora"
    base: RelativePath = "plan/base.safetensors"
    rank: Annotated[int, Field(gt=0, le=1024)]
    alpha: Annotated[float, Field(gt=0.0, le=4096.0)]


TensorPrefix = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)*$", max_length=200)]


class PartialAdaptation(Model):
    """From a public expert, those weights alone whose names are, or begin with, one of `trained`; published whole.

    Attributes:
        base: where the public expert lies in the plan's bundle.
        trained: names of weights, or what they begin with.
    """

    kind: Literal["partial"] = "partial"
    base: RelativePath = "plan/base.safetensors"
    trained: Annotated[tuple[TensorPrefix, ...], Field(min_length=1, max_length=256)]


Adaptation = Annotated[FullAdaptation | LoraAdaptation | PartialAdaptation, Field(discriminator="kind")]


class Training(Model):
    """How an expert is trained. `seed` covers training only, never the noise of a statistic.

    Attributes:
        num_steps: training steps.
        batch_size: images in a step.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
        ema_decay: decay per step of the averaged weights, which are the ones that leave.
        precision: precision of the arithmetic; weights stay float32.
        checkpoint_steps: steps between checkpoints.
        seed: seed of initial weights, batches, times and noise.
        mask_ratio: share of an image's tokens that a step leaves out; only for the architecture dit.
        unmasked_share: share of the steps, the last ones, that leave out nothing.
    """

    num_steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpoint_steps: PositiveInt
    seed: NaturalInt = 0
    mask_ratio: Annotated[float, Field(ge=0.0, lt=1.0, exclude_if=lambda ratio: ratio == 0.0)] = 0.0
    unmasked_share: Annotated[float, Field(ge=0.0, le=1.0, exclude_if=lambda share: share == 0.1)] = 0.1


class Expert(Model):
    """The recipe of every expert.

    Attributes:
        dtype: type of the weights that leave.
    """

    architecture: Architecture
    adaptation: Adaptation = FullAdaptation()
    dtype: Literal["float32"] = "float32"
    training: Training
    dp_sgd: None = None

    @model_validator(mode="after")
    def _masked_experts_have_tokens(self) -> "Expert":
        if self.training.mask_ratio and not isinstance(self.architecture, Dit):
            raise ValueError("a mask_ratio needs the architecture dit")
        return self

    @property
    def base(self) -> str | None:
        """The path of the public expert that training starts from, if there is one."""
        return None if isinstance(self.adaptation, FullAdaptation) else self.adaptation.base
