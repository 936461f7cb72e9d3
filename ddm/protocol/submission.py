"""The submission: all that one silo sends. Whatever leaves a hospital is named on this page.

The file is signed by being listed in the silo's TUF role. It is published whole; the releases it names (noised
counts and sketches) reach the aggregator only, and stand here as digests.
"""

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


class ExpertTraining(Model):
    """How the training went. `loss` and `seconds` leave without differential privacy."""

    loss: Annotated[float, Field(ge=0.0)]
    seconds: Annotated[float, Field(ge=0.0)]
    flops: Annotated[float, Field(ge=0.0)]


class NoWeightPrivacy(Model):
    """The weights carry no differential privacy guarantee."""

    kind: Literal["none"] = "none"


class SubmittedExpert(Model):
    """One expert: its weights and what is said about them."""

    expert_id: ExpertId
    cluster: NaturalInt | None = None
    num_images: PositiveInt
    steps: PositiveInt
    file: File
    training: ExpertTraining
    privacy: NoWeightPrivacy


class SubmittedCounts(Model):
    """The noised histogram over public groups."""

    kind: Literal["counts"] = "counts"
    epsilon: Epsilon
    delta: Delta
    file: File


class SubmittedSketch(Model):
    """One noised sketch per unit, released at noise level `t_release`."""

    kind: Literal["sketch"] = "sketch"
    epsilon: Epsilon
    delta: Delta
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)]
    file: File


class Spent(Model):
    """What all releases of this submission cost together, in the ledger's unit and relation."""

    epsilon: Epsilon
    delta: Delta
    unit: Literal["image"]
    relation: Literal["replace_one"] = "replace_one"


class LedgerHead(Model):
    """The end of the silo's ledger when this was drawn; `chain` lets the aggregator see that it only grew."""

    head_digest: Digest
    num_entries: PositiveInt
    chain: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _chain_ends_at_head(self) -> "LedgerHead":
        if self.chain[-1] != self.head_digest or len(self.chain) != self.num_entries:
            raise ValueError("the chain must end at the head and hold every entry's digest")
        return self


class Waiver(Model):
    """Who let an audit pass that did not, by role, and why."""

    role: ShortText
    reason: ShortText


class AuditVerdict(Model):
    """What the leak audit said."""

    verdict: Literal["pass", "waived"]
    digest: Digest
    waiver: Waiver | None = None

    @model_validator(mode="after")
    def _waived_means_waiver(self) -> "AuditVerdict":
        if (self.verdict == "waived") != (self.waiver is not None):
            raise ValueError("a waiver stands exactly where the verdict is waived")
        return self


class Approval(Model):
    """Whether a person or the policy let this leave, and when."""

    kind: Literal["person", "policy"]
    at: Time


class Submission(Document):
    """All that one silo sends for one plan."""

    format: Literal["archipelago/submission/1"] = "archipelago/submission/1"
    plan_id: PlanId
    plan_digest: Digest
    silo_id: SiloId
    sequence: Annotated[int, Field(ge=1, le=10_000)]
    created_at: Time
    num_units: PositiveInt
    isolation: Literal["none", "users", "containers"]
    experts: Annotated[tuple[SubmittedExpert, ...], Field(min_length=1, max_length=4096)]
    releases: Annotated[
        tuple[Annotated[SubmittedCounts | SubmittedSketch, Field(discriminator="kind")], ...],
        Field(min_length=1, max_length=8),
    ]
    spent: Spent
    ledger: LedgerHead
    audit: AuditVerdict
    approval: Approval | None
    software: dict[ShortText, ShortText]

    @model_validator(mode="after")
    def _no_kind_twice(self) -> "Submission":
        kinds = [release.kind for release in self.releases]
        if len(set(kinds)) != len(kinds):
            raise ValueError("a kind of release appears twice")
        if len({expert.expert_id for expert in self.experts}) != len(self.experts):
            raise ValueError("an expert_id appears twice")
        return self
