"""The plan: everything the aggregator asks of every silo, signed before any silo acts on it."""

from math import prod
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.base import (
    Delta,
    Document,
    Epsilon,
    File,
    KeyText,
    Model,
    PlanId,
    PositiveInt,
    RelativePath,
    SiloId,
    Time,
)


class DataSpec(Model):
    """What one image is: its shape (C, H, W) and the range of its values."""

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=3, max_length=3)]
    range: tuple[float, float]

    @model_validator(mode="after")
    def _range_ascends(self) -> "DataSpec":
        if not self.range[0] < self.range[1]:
            raise ValueError("range must ascend")
        return self

    @property
    def dim(self) -> int:
        """The number of values in one image."""
        return prod(self.shape)


class IdentityLatent(Model):
    """Experts work on the pixels themselves."""

    kind: Literal["identity"] = "identity"


class PcaEncoder(Model):
    """Principal components of the public images; needs no weights from elsewhere."""

    kind: Literal["pca"] = "pca"
    path: RelativePath = "plan/encoder.safetensors"
    dim: Annotated[int, Field(gt=0, le=4096)]


class Clustering(Model):
    """Two-level k-means of public features."""

    path: RelativePath = "plan/centroids.safetensors"
    num_fine: Annotated[int, Field(gt=0, le=65536)]
    num_coarse: Annotated[int, Field(gt=0, le=4096)]


class SiloPartition(Model):
    """One expert per silo."""

    kind: Literal["silo"] = "silo"
    min_images: PositiveInt


class Objective(Model):
    """The probability path and what an expert predicts on it."""

    path: Literal["linear"] = "linear"
    prediction: Literal["velocity"] = "velocity"


class UniformT(Model):
    """Training times drawn uniformly from (0, 1)."""

    kind: Literal["uniform"] = "uniform"


class LogitNormalT(Model):
    """Training times ``sigmoid(mean + std * normal)``."""

    kind: Literal["logit_normal"] = "logit_normal"
    mean: float = 0.0
    std: Annotated[float, Field(gt=0.0)] = 1.0


class NoCondition(Model):
    """Unconditional experts."""

    kind: Literal["none"] = "none"


class Dit(Model):
    """A diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023)."""

    kind: Literal["dit"] = "dit"
    patch: Annotated[int, Field(gt=0, le=64)]
    hidden: Annotated[int, Field(gt=0, le=8192)]
    depth: Annotated[int, Field(gt=0, le=128)]
    heads: Annotated[int, Field(gt=0, le=128)]

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "Dit":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError("hidden must be an even multiple of heads")
        return self


class FullAdaptation(Model):
    """Every weight of the expert is trained."""

    kind: Literal["full"] = "full"


class Training(Model):
    """How an expert is trained. `seed` covers training only, never the noise of a release."""

    num_steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpoint_steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class Expert(Model):
    """The recipe of every expert."""

    architecture: Dit
    adaptation: FullAdaptation = FullAdaptation()
    dtype: Literal["float32"] = "float32"
    training: Training
    dp_sgd: None = None


class Budget(Model):
    """An (epsilon, delta) under the replace-one relation."""

    epsilon: Epsilon
    delta: Delta


class CountsRelease(Model):
    """A histogram over public groups of fine centroids, by discrete Laplace noise."""

    epsilon: Epsilon
    num_groups: Annotated[int, Field(gt=0, le=4096)]


class SketchRelease(Model):
    """One noised sketch per unit, by the Gaussian mechanism at t_release."""

    epsilon: Epsilon
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]
    rank: Annotated[int, Field(gt=0, le=1024)]
    path: RelativePath = "plan/sketch.safetensors"


class Releases(Model):
    """Everything differentially private that the plan asks for, and the total it may cost."""

    unit: Literal["image"]
    relation: Literal["replace_one"] = "replace_one"
    total: Budget
    counts: CountsRelease
    sketch: SketchRelease
    moments: None = None

    @model_validator(mode="after")
    def _total_covers_parts(self) -> "Releases":
        if self.counts.epsilon + self.sketch.epsilon > self.total.epsilon * (1 + 1e-9):
            raise ValueError("the releases ask for more epsilon than total")
        if self.sketch.delta > self.total.delta:
            raise ValueError("the releases ask for more delta than total")
        return self


class CountsRouter(Model):
    """The counts router as it is: no training."""

    kind: Literal["counts"] = "counts"


class LearnedRouter(Model):
    """A router trained on the noised sketches; published only where it is not worse than counts."""

    kind: Literal["learned"] = "learned"
    hidden: Annotated[int, Field(gt=0, le=4096)]
    depth: Annotated[int, Field(gt=0, le=32)]
    num_steps: PositiveInt


class Audit(Model):
    """What the leak audit must show before anything is released."""

    required: bool
    min_holdout_units: PositiveInt
    max_near_copy_rate: Annotated[float, Field(ge=0.0, le=1.0)]
    max_mia_auc: Annotated[float, Field(ge=0.5, le=1.0)]


class Limits(Model):
    """Bounds on what a silo sends and on how long it works."""

    expert_bytes: PositiveInt
    release_bytes: PositiveInt
    train_s: PositiveInt
    gpu_hours: Annotated[float, Field(ge=0.0)]


class Plan(Document):
    """The signed instructions of one federation; see `docs/reference` for an example."""

    format: Literal["archipelago/plan/1"] = "archipelago/plan/1"
    plan_id: PlanId
    created_at: Time
    expires_at: Time
    silos: Annotated[tuple[SiloId, ...], Field(min_length=1, max_length=1024)]
    receipt_key: KeyText
    files: Annotated[tuple[File, ...], Field(min_length=1, max_length=64)]
    data: DataSpec
    latent: IdentityLatent
    encoder: PcaEncoder
    clustering: Clustering
    partition: SiloPartition
    objective: Objective
    t_distribution: Annotated[UniformT | LogitNormalT, Field(discriminator="kind")]
    condition: NoCondition
    expert: Expert
    releases: Releases
    router: Annotated[LearnedRouter | CountsRouter, Field(discriminator="kind")]
    audit: Audit
    limits: Limits

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        if list(self.silos) != sorted(set(self.silos)):
            raise ValueError("silos must be sorted and distinct")
        listed = [file.path for file in self.files]
        if len(set(listed)) != len(listed):
            raise ValueError("a file is listed twice")
        if not {self.encoder.path, self.clustering.path, self.releases.sketch.path} <= set(listed):
            raise ValueError("the plan names a file that it does not list")
        if any(side % self.expert.architecture.patch for side in self.data.shape[1:]):
            raise ValueError("patch must divide the image's height and width")
        if self.expires_at <= self.created_at:
            raise ValueError("the plan expires before it is created")
        return self

    def file(self, path: str) -> File:
        """Return the listed file called `path`."""
        return next(file for file in self.files if file.path == path)
