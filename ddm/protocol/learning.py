"""How experts are trained: objective, times, initial weights, recipe. A part of the plan."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.architecture import Architecture
from ddm.protocol.base import Digest, Model, NaturalInt, NumSteps, PlanId, RelativePath, SiloId
from ddm.protocol.weight_privacy import DpSgd

PathName = Literal["linear", "cosine_vp", "ddpm_linear", "ddpm_cosine", "scaled_linear", "edm"]
PredictionName = Literal["velocity", "eps", "v", "x_0"]


class ExpertObjective(Model):
    """The probability path of an expert, and what it predicts on it.

    Attributes:
        path: the probability path; that of `[objective]` is the ensemble's, or `cosine_vp` where it ends before pure
            noise, as all but `linear` and `cosine_vp` do.
        prediction: what the network predicts; velocity on `linear` and `cosine_vp` only.
    """

    path: PathName = "linear"
    prediction: PredictionName = "velocity"

    @model_validator(mode="after")
    def _velocity_is_even(self) -> "ExpertObjective":
        if self.prediction == "velocity" and self.path not in ("linear", "cosine_vp"):
            raise ValueError(
                f"the path {self.path} needs the prediction eps, v or x_0, not velocity, whose size there changes "
                "too much with t"
            )
        return self

    @property
    def ensemble_path(self) -> Literal["linear", "cosine_vp"]:
        """The path of an ensemble of such experts, from pure data to pure noise."""
        if self.path == "linear":
            return "linear"
        return "cosine_vp"


class SiloObjective(ExpertObjective):
    """The objective of one silo's experts, in place of the federation's.

    Attributes:
        silo_id: the silo; exceptions are listed in alphabetical order.
    """

    silo_id: SiloId


class Objective(ExpertObjective):
    """The experts' objective, whose path sets the ensemble's canonical path; `exceptions` gives silos another one."""

    exceptions: Annotated[tuple[SiloObjective, ...], Field(max_length=1024)] = ()

    def of(self, silo_id: str) -> ExpertObjective:
        """Return the objective of a silo's experts."""
        for exception in self.exceptions:
            if exception.silo_id == silo_id:
                return exception
        return self


Shift = Annotated[float, Field(ge=0.01, le=100.0)]
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


BASE_PATH = "plan/base.safetensors"


class FullAdaptation(Model):
    """All weights of the expert are trained, from random ones or from those of a public expert.

    Attributes:
        base: path of the public expert in the plan's bundle; None for random weights.
    """

    kind: Literal["full"] = "full"
    base: RelativePath | None = None


class LoraAdaptation(Model):
    """A public expert whose linear layers become ``W + alpha / rank * up down``; published merged (Hu et al. 2021).

    Attributes:
        base: path of the public expert in the plan's bundle.
        rank: rank of the trained product.
        alpha: its weight, divided by the rank.
    """

    kind: Literal["lora"] = "lora"
    base: RelativePath = BASE_PATH
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


TensorPrefix = Annotated[
    str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)*$", max_length=200)
]


class PartialAdaptation(Model):
    """A public expert of which only the weights named in `trained`, or with such a prefix, are trained.

    Attributes:
        base: path of the public expert in the plan's bundle.
        trained: names or prefixes of names of the trained weights.
    """

    kind: Literal["partial"] = "partial"
    base: RelativePath = BASE_PATH
    trained: Annotated[tuple[TensorPrefix, ...], Field(min_length=1, max_length=256)]


Adaptation = Annotated[
    FullAdaptation | LoraAdaptation | PartialAdaptation | OwnAdaptation, Field(discriminator="kind")
]


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Training(Model):
    """How an expert is trained, by AdamW. `seed` covers training only, never the noise of a statistic.

    Attributes:
        num_steps: training steps.
        batch_size: images in a step; in private training the most that a unit may have in one, and what
            `ema_half_life` counts.
        learning_rate: the highest of the run.
        schedule: how the learning rate falls: not at all, to `final_rate` along half a cosine, or along a line.
        warmup_steps: steps over which it first rises from 0; the fall has begun by then.
        final_rate: the share of the learning rate that is left at the end; not for the schedule constant.
        betas: decay per step of AdamW's means of the gradient and of its square.
        weight_decay: AdamW's weight decay.
        max_gradient_norm: gradients with a larger norm are scaled down to it; private training has its own `clip`.
        ema_decay: decay per step of the averaged weights, which are the ones published.
        ema_half_life: the average's half-life in images, in place of `ema_decay`.
        ema_width: the average's width as a share of the run, in place of both, so that it grows with the run (Karras et
            al. 2024).
        ema_snapshots: number of times at which the run stores averages of two widths, from which
            `ddm.training.averages` computes that of any other width later; needs `ema_width`, and memory for two more
            copies of the weights.
        loss_weighting: the weight of a time in the loss: none, or sigmoid (Hoogeboom et al. 2024).
        order: whether each step draws its images independently, or all images are used once, in random order, before
            any is used again.
        flip: whether images are mirrored from left to right at random.
        crop: pixels by which images are moved at random in each direction; their edges are repeated.
        precision: precision of the arithmetic; auto is bf16 where products in it are faster (GPUs, AMX,
            AMD's avx512_bf16) and fp32 elsewhere; weights stay float32.
        seed: seed of initial weights, batches, times and noise.
        mask_ratio: share of an image's tokens that a step masks; only for the architecture dit.
        unmasked_share: share of the steps, at the end of the training, that mask nothing.
    """

    # A recipe may name no average and gets the default one; a plan always states which one it is.
    min_averages: ClassVar[int] = 1

    num_steps: NumSteps
    batch_size: Annotated[int, Field(gt=0, le=2**20)]
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 100
    final_rate: Share = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: Share
    max_gradient_norm: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    ema_decay: Beta | None = None
    ema_half_life: Annotated[float | None, Field(gt=0.0, le=1e12)] = None
    # A power-function average has a width of at most 0.289, at gamma = 0 (Karras et al. 2024).
    ema_width: Annotated[float | None, Field(ge=0.01, le=0.25)] = None
    ema_snapshots: Annotated[int, Field(ge=0, le=1024)] = 0
    loss_weighting: Literal["none", "sigmoid"] = "none"
    order: Literal["drawn", "epochs"] = "drawn"
    flip: bool = False
    crop: Annotated[int, Field(ge=0, le=64)] = 0
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    seed: NaturalInt = 0
    mask_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    unmasked_share: Share = 0.1

    @property
    def averages(self) -> list[str]:
        """The names of the fields that say how weights are averaged."""
        names = ("ema_decay", "ema_half_life", "ema_width")
        return [name for name in names if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _one_average(self) -> "Training":
        if not self.min_averages <= len(self.averages) <= 1:
            raise ValueError(
                f"one of ema_decay, ema_half_life and ema_width is needed, not {len(self.averages)}"
            )
        by_other_field = self.ema_decay is not None or self.ema_half_life is not None
        if self.ema_snapshots and (by_other_field or self.ema_snapshots > self.num_steps):
            raise ValueError("ema_snapshots needs ema_width, and at least as many steps")
        return self

    @model_validator(mode="after")
    def _only_a_falling_rate_has_an_end(self) -> "Training":
        if self.final_rate and self.schedule == "constant":
            raise ValueError("final_rate needs the schedule cosine or linear")
        return self


class Expert(Model):
    """The recipe of every expert.

    Attributes:
        dtype: type of the weights that leave.
        privacy: private training, so that the weights that leave hide each unit; none by default.
    """

    architecture: Architecture
    adaptation: Adaptation = FullAdaptation()
    dtype: Literal["float32"] = "float32"
    training: Training
    privacy: DpSgd | None = None

    @model_validator(mode="after")
    def _masked_experts_have_tokens(self) -> "Expert":
        if self.training.mask_ratio and not self.architecture.supports_masking:
            raise ValueError(
                f"a mask_ratio above 0 needs the architecture dit, not {self.architecture.kind}"
            )
        return self

    @model_validator(mode="after")
    def _private_training_is_possible(self) -> "Expert":
        if self.privacy is None:
            return self
        if isinstance(self.adaptation, OwnAdaptation):
            raise ValueError(
                "private training cannot start from the silo's own expert, which was trained on its images"
            )
        # The accountant assumes Poisson sampling, and one gradient of bounded norm for each unit.
        if self.training.mask_ratio or self.training.order != "drawn":
            raise ValueError(
                'private training needs mask_ratio 0 and the order "drawn": chance alone chooses its units'
            )
        unit_images = self.privacy.images_per_unit * self.privacy.draws
        if unit_images > self.training.batch_size:
            raise ValueError(
                f"private training computes images_per_unit * draws = {unit_images} at once: raise batch_size to it"
            )
        return self

    @property
    def base(self) -> str | None:
        """The path of the public expert that training starts from, if there is one."""
        match self.adaptation:
            case OwnAdaptation():
                return None
            case FullAdaptation(base=base):
                return base
            case LoraAdaptation(base=base) | PartialAdaptation(base=base):
                return base
