"""The manifest: the signed list of what is published, and of what an ensemble is made."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.base import (
    Delta,
    Digest,
    Document,
    Epsilon,
    ExpertId,
    File,
    Model,
    NaturalInt,
    PlanId,
    PositiveInt,
    ShortText,
    SiloId,
    Time,
)

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Flag = Literal["answers_zero", "copy", "high_loss", "large_weights", "not_learnt", "stands_apart"]


class PublishedSilo(Model):
    """One silo's part: its signed submission, its key, what it spent, and whether it is in by a person's decision."""

    silo_id: SiloId
    submission: File
    key_fingerprint: Digest
    epsilon: Epsilon
    delta: Delta
    audit: Literal["pass", "waived"]
    isolation: Literal["none", "users", "containers"]
    admitted: bool = False


class PublishedExpert(Model):
    """One expert, and the rules of screening that it broke. The order of experts is the router's class order."""

    expert_id: ExpertId
    silo_id: SiloId
    cluster: NaturalInt | None = None
    prior: Probability
    file: File
    flags: tuple[Flag, ...] = ()


class PublishedRouter(Model):
    """The router: which family, how it was calibrated, and the noise level of the sketches that it was trained on."""

    kind: Literal["counts", "moments", "learned", "samples"]
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    training_prior: tuple[Probability, ...]
    temperature: Annotated[float, Field(gt=0.0)]
    file: File


class Evaluation(Model):
    """One measured figure with its 95% interval."""

    metric: ShortText
    strategy: ShortText | None
    value: float
    low: float
    high: float


class Manifest(Document):
    """The signed list of what is published."""

    format: Literal["archipelago/manifest/1", "archipelago/manifest/2"] = "archipelago/manifest/2"
    plan_id: PlanId
    plan_digest: Digest
    version: PositiveInt
    supersedes_digest: Digest | None
    published_at: Time
    licence: ShortText
    cite: ShortText
    missing_silos: tuple[SiloId, ...]
    withdrawn_silos: tuple[SiloId, ...]
    silos: Annotated[tuple[PublishedSilo, ...], Field(min_length=1)]
    experts: Annotated[tuple[PublishedExpert, ...], Field(min_length=1)]
    router: PublishedRouter
    evaluation: tuple[Evaluation, ...]
    files: tuple[File, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        _check_distinct("silo_id", [silo.silo_id for silo in self.silos])
        _check_distinct("expert_id", [expert.expert_id for expert in self.experts])
        _check_distinct("expert's file", [expert.file.path for expert in self.experts])
        if abs(sum(expert.prior for expert in self.experts) - 1.0) > 1e-6:
            raise ValueError("the experts' priors must sum to 1")
        if len(self.router.training_prior) != len(self.experts):
            raise ValueError("training_prior needs one entry per expert")
        if {expert.silo_id for expert in self.experts} - {silo.silo_id for silo in self.silos}:
            raise ValueError("an expert names a silo that is not listed")
        if {expert.silo_id for expert in self.experts if expert.flags} - {s.silo_id for s in self.silos if s.admitted}:
            raise ValueError("an expert that screening flagged needs a silo that was admitted")
        return self


def _check_distinct(what: str, values: Sequence[str]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"the same {what} appears twice")
