"""How experts are trained: objective, times, initial weights, recipe. A part of the plan."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.architecture import Architecture, Dit
from ddm.protocol.base import Digest, Model, NaturalInt, NumSteps, PlanId, RelativePath, SiloId


class ExpertObjective(Model):
    """The probability path of an expert, and what it predicts on it.

    Attributes:
        path: the probability path; that of `[objective]` is the ensemble's.
        prediction: what the network predicts.
    """

    path: Literal["linear", "cosine_vp"] = "linear"
    prediction: Literal["velocity", "eps"] = "velocity"


class SiloObjective(ExpertObjective):
    """The objective of one silo's experts, in place of the federation's.

    Attributes:
        silo_id: the silo; exceptions are listed in alphabetical order.
    """

    silo_id: SiloId


class Objective(ExpertObjective):
    """The experts' objective, whose path is the ensemble's canonical path; `exceptions` gives silos another one.

    A document without exceptions leaves the field out.
    """

    exceptions: Annotated[tuple[SiloObjective, ...], Field(max_length=1024, exclude_if=lambda listed: not listed)] = ()

    def of(self, silo_id: str) -> ExpertObjective:
        """Return the objective of a silo's experts."""
        return next((other for other in self.exceptions if other.silo_id == silo_id), self)


Shift = Annotated[float, Field(ge=0.01, le=100.0, exclude_if=lambda shift: shift == 1.0)]
"""Shifts times towards noise, ``t' = s t / (1 + (s - 1) t)``: with ``s = sqrt(m / n)`` an image of m values loses as
much information at t' as one of n values at t on the linear path (Esser et al. 2024, section 5.3.2). 1 is no shift."""


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
    mean: Annotated[float, Field(ge=-100.0, le=100.0)] = 0.0
    std: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    shift: Shift = 1.0


TDistribution = Annotated[UniformT | LogitNormalT, Field(discriminator="kind")]


class FullAdaptation(Model):
    """All weights of the expert are trained, from random ones."""

    kind: Literal["full"] = "full"


class LoraAdaptation(Model):
    """A public expert whose linear layers become ``W + alpha / rank * up down``; published merged (Hu et al. 2021).

    Attributes:
        base: path of the public expert in the plan's bundle.
        rank: rank of the trained product.
        alpha: its weight, divided by the rank.
    """

    kind: Literal["lora"] = "lora"
    base: RelativePath = "plan/base.safetensors"
    rank: Annotated[int, Field(gt=0, le=1024)]
    alpha: Annotated[float, Field(gt=0.0, le=4096.0)]


class OwnAdaptation(Model):
    """All weights are trained, from those of the silo's own expert of an earlier plan, at another resolution or not.

    A silo without a submission to that plan starts from random weights.

    Attributes:
        plan_id: the earlier plan.
        submissions: sha256 of the accepted submission of each silo that has one; a recipe leaves it out.
    """

    kind: Literal["own"] = "own"
    plan_id: PlanId
    submissions: Annotated[dict[SiloId, Digest], Field(max_length=1024)] = {}


TensorPrefix = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)*$", max_length=200)]


class PartialAdaptation(Model):
    """A public expert of which only the weights named in `trained`, or with such a prefix, are trained.

    Attributes:
        base: path of the public expert in the plan's bundle.
        trained: names or prefixes of names of the trained weights.
    """

    kind: Literal["partial"] = "partial"
    base: RelativePath = "plan/base.safetensors"
    trained: Annotated[tuple[TensorPrefix, ...], Field(min_length=1, max_length=256)]


Adaptation = Annotated[FullAdaptation | LoraAdaptation | PartialAdaptation | OwnAdaptation, Field(discriminator="kind")]


class Training(Model):
    """How an expert is trained. `seed` covers training only, never the noise of a statistic.

    Attributes:
        num_steps: training steps.
        batch_size: images in a step.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
        ema_decay: decay per step of the averaged weights, which are the ones published.
        precision: precision of the arithmetic; weights stay float32.
        checkpoint_steps: steps between checkpoints.
        seed: seed of initial weights, batches, times and noise.
        mask_ratio: share of an image's tokens that a step masks; only for the architecture dit.
        unmasked_share: share of the steps, the last ones, that mask nothing.
    """

    num_steps: NumSteps
    batch_size: Annotated[int, Field(gt=0, le=2**20)]
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpoint_steps: NumSteps
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
            wanted = "a mask_ratio above 0 needs the architecture dit"
            raise ValueError(f"{wanted}, not {self.architecture.kind}")
        return self

    @property
    def base(self) -> str | None:
        """The path of the public expert that training starts from, if there is one."""
        return None if isinstance(self.adaptation, FullAdaptation | OwnAdaptation) else self.adaptation.base
