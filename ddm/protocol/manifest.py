"""The manifest: the signed list of a release's files, and of the experts and the router of its ensemble."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.base import (
    Delta,
    Digest,
    Document,
    Epsilon,
    ExpertId,
    File,
    Measure,
    Model,
    NaturalInt,
    PlanId,
    PositiveInt,
    ShortText,
    SiloId,
    Time,
)
from ddm.protocol.weight_privacy import DpSgdPrivacy

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
MOST_SILOS, MOST_EXPERTS = 1024, 16384
_CONTROL = r"\x00-\x1f\x7f-\x9f"
ReasonText = Annotated[
    str,
    StringConstraints(
        max_length=200, pattern=rf"^[^{_CONTROL}]*[^{_CONTROL}\x20\xa0][^{_CONTROL}]*$"
    ),
]
Flag = Literal[
    "alike_images",
    "answers_zero",
    "broken_images",
    "copy",
    "far_images",
    "high_loss",
    "high_loss_once",
    "large_weights",
    "not_learnt",
    "refused_before",
    "stands_apart",
]


Standing = Literal["new", "carried", "again", "late"]


class PublishedSilo(Model):
    """One silo: its signed submission, its key, its privacy cost, and whether a person admitted it.

    An island of one owner has no epsilon and no delta, since nothing of it was hidden, and no audit.

    Attributes:
        standing: what it is in a plan that carries experts over: one whose experts are `carried` from an earlier plan,
            one that trained `again`, one that came `late`; `new` in a plan that carries none.
        units: the number of units that its prior counts: what its submission states, or less.
        units_reason: why it counts less; the operator's words.
    """

    silo_id: SiloId
    standing: Standing = "new"
    submission: File
    key_fingerprint: Digest
    epsilon: Epsilon | None = None
    delta: Delta | None = None
    audit: Literal["pass", "waived", "fail", "bounded", "none"]
    isolation: Literal["none", "users", "containers"]
    admitted: bool = False
    units: PositiveInt
    units_reason: ReasonText | None = None


class PublishedExpert(Model):
    """One expert, and the screening rules that it violates. The order of experts is the router's class order.

    `privacy` repeats what its silo signed where it was trained privately.
    """

    expert_id: ExpertId
    silo_id: SiloId
    cluster: NaturalInt | None = None
    prior: Probability
    file: File
    flags: Annotated[tuple[Flag, ...], Field(max_length=16)] = ()
    privacy: DpSgdPrivacy | None = None


class PublishedRouter(Model):
    """The router: its family, its calibration, and the noise level of the sketches that it was trained on."""

    kind: Literal["counts", "learned", "samples"]
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    training_prior: Annotated[tuple[Probability, ...], Field(max_length=MOST_EXPERTS)]
    temperature: Annotated[float, Field(gt=0.0, le=1e6)]
    file: File


class Evaluation(Model):
    """One metric with its 95% interval."""

    metric: ShortText
    strategy: ShortText | None
    value: Measure
    low: Measure
    high: Measure


class Manifest(Document):
    """The signed list of a release's contents."""

    format: Literal["archipelago/manifest/1"] = "archipelago/manifest/1"
    plan_id: PlanId
    plan_digest: Digest
    version: PositiveInt
    supersedes_digest: Digest | None
    published_at: Time
    licence: ShortText
    cite: ShortText
    missing_silos: Annotated[tuple[SiloId, ...], Field(max_length=MOST_SILOS)]
    withdrawn_silos: Annotated[tuple[SiloId, ...], Field(max_length=MOST_SILOS)]
    silos: Annotated[tuple[PublishedSilo, ...], Field(min_length=1, max_length=MOST_SILOS)]
    experts: Annotated[tuple[PublishedExpert, ...], Field(min_length=1, max_length=MOST_EXPERTS)]
    router: PublishedRouter
    evaluation: Annotated[tuple[Evaluation, ...], Field(max_length=1024)]
    files: Annotated[tuple[File, ...], Field(max_length=1024)]

    @property
    def private_experts(self) -> tuple[PublishedExpert, ...]:
        """The experts whose weights hide each unit of their silo."""
        return tuple(expert for expert in self.experts if expert.privacy)

    @property
    def weights_in_words(self) -> str:
        """How private the experts' weights are, in a sentence; each private expert's guarantee is in its entry."""
        num, private = len(self.experts), len(self.private_experts)
        if not private:
            return "The experts' weights were trained without differential privacy"
        if private == num:
            return "The experts' weights were trained with differential privacy (DP-SGD)"
        return f"{private} of {num} experts were trained with differential privacy (DP-SGD), the others without"

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        _check_distinct("silo_id", [silo.silo_id for silo in self.silos])
        _check_distinct("expert_id", [expert.expert_id for expert in self.experts])
        _check_distinct("expert's file", [expert.file.path for expert in self.experts])
        total = sum(expert.prior for expert in self.experts)
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"the experts' priors must sum to 1, got {total:.6f}")
        if len(self.router.training_prior) != len(self.experts):
            got = f"got {len(self.router.training_prior)} for {len(self.experts)} experts"
            raise ValueError(f"training_prior needs one entry per expert, {got}")
        silos, admitted = (
            {s.silo_id for s in self.silos},
            {s.silo_id for s in self.silos if s.admitted},
        )
        if unlisted := {expert.silo_id for expert in self.experts} - silos:
            raise ValueError(
                f"the silos of all experts must be listed in silos; {len(unlisted)} of them are not"
            )
        if refused := {expert.silo_id for expert in self.experts if expert.flags} - admitted:
            raise ValueError(
                f"silos of flagged experts must be marked as admitted; {len(refused)} of them are not"
            )
        return self


def _check_distinct(what: str, values: Sequence[str]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(
            f"each {what} must appear once, got {len(values)} entries of {len(set(values))} distinct ones"
        )
