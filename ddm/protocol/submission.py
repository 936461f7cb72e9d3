"""The submission: everything that one silo sends. Whatever leaves a silo is listed on this page.

The silo signs it by listing it in its TUF role. It is published whole. Of the statistics that it lists, the noised
class counts are published beside it, since readers compute from them who holds a class; the others (the noised
histogram over groups, sketches) go to the aggregator only, and appear here as digests.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddm.protocol.base import (
    MAX_INTEGER,
    Delta,
    Digest,
    Epsilon,
    ExpertId,
    File,
    Model,
    NaturalInt,
    NumImages,
    NumSteps,
    PlanId,
    PositiveInt,
    Seconds,
    ShortText,
    SiloId,
    Time,
    Unit,
)
from ddm.protocol.federation import FederationDocument
from ddm.protocol.statistics import SubmittedStatistic
from ddm.protocol.weight_privacy import NoWeightPrivacy, WeightPrivacy

MAX_LOSS = 1e30


def expert_path(silo_id: str, expert_id: str) -> str:
    """Return the published path of an expert, relative to ``targets/<plan_id>/``."""
    return f"silos/{silo_id}/experts/{expert_id}/expert.safetensors"


def is_expert_path(path: str) -> bool:
    """Whether a published path is an expert's."""
    return path.startswith("silos/") and path.endswith("/expert.safetensors")


def submission_path(silo_id: str) -> str:
    """Return the published path of a submission, relative to ``targets/<plan_id>/``."""
    return f"silos/{silo_id}/submission.json"


def class_counts_path(silo_id: str) -> str:
    """Return the published path of a silo's class counts, relative to ``targets/<plan_id>/``."""
    return f"class_counts/{silo_id}.safetensors"


class SubmittedTraining(Model):
    """How long the training took. Its loss stays on the site: it is a function of private images and of a plan.

    Of private training `seconds` stays there too, since it grows with the number of images of the units that entered;
    `flops` are what the plan implies.
    """

    seconds: Seconds | None
    flops: Annotated[float, Field(ge=0.0, le=1e36)]


class ExpertTraining(SubmittedTraining):
    """How the training went, for the one who trained."""

    seconds: Seconds
    loss: Annotated[float, Field(ge=0.0, le=MAX_LOSS)]


class SubmittedExpert(Model):
    """One expert: its weights and their description.

    `num_images` is set only where it is the silo's public number of units, with one expert per silo and the image as
    the unit. Otherwise it would reveal what the noise of the statistics hides.
    """

    expert_id: ExpertId
    cluster: NaturalInt | None = None
    num_images: NumImages | None
    steps: NumSteps
    file: File
    training: SubmittedTraining
    privacy: WeightPrivacy


class Spent(Model):
    """The plan's budget: an upper bound on the cost of this submission's statistics and, where it was trained
    privately, its expert; independent of the data.
    """

    epsilon: Epsilon
    delta: Delta
    unit: Unit
    relation: Literal["replace_one"] = "replace_one"


class LedgerHead(Model):
    """The head of the silo's ledger at this submission; `chain` shows the aggregator that entries were only added."""

    head_digest: Digest
    num_entries: PositiveInt
    # Every entry's digest: from a head alone an extension of a ledger cannot be told from another ledger
    # (docs/adr/0002).
    chain: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _chain_ends_at_head(self) -> "LedgerHead":
        if self.chain[-1] != self.head_digest or len(self.chain) != self.num_entries:
            end = "head_digest" if self.chain[-1] == self.head_digest else "another digest"
            got = f"{len(self.chain)} digests for {self.num_entries} entries, ending with {end}"
            raise ValueError(
                f"chain must hold every entry's digest and end with head_digest, got {got}"
            )
        return self


class Responsible(Model):
    """Who answers for what leaves, by role, and why it does."""

    role: Annotated[ShortText, Field(min_length=1)]
    reason: Annotated[ShortText, Field(min_length=1)]


class Waiver(Responsible):
    """A waiver of an inconclusive audit, for one plan and until a day; nothing waives an audit that failed."""

    plan_digest: Digest
    verdict: Literal["inconclusive"]
    expires_at: Time


class AuditVerdict(Model):
    """The verdict of the leak audit; one that was inconclusive is `waived`, or nothing leaves.

    Of privately trained experts nothing that was measured leaves, not even a digest: `bounded` says that their epsilon
    stands in its place.
    """

    verdict: Literal["pass", "waived", "fail", "bounded"]
    # The report holds a random number, so that its digest reveals nothing of its figures (docs/adr/0055).
    digest: Digest | None = None
    waiver: Waiver | None = None

    @model_validator(mode="after")
    def _waived_means_waiver(self) -> "AuditVerdict":
        if (self.verdict == "waived") != (self.waiver is not None):
            needed = "a waiver" if self.waiver is None else "no waiver"
            raise ValueError(f"the verdict {self.verdict} needs {needed}")
        if (self.verdict == "bounded") != (self.digest is None):
            needed = "the report's digest" if self.digest is None else "no digest"
            raise ValueError(f"the verdict {self.verdict} needs {needed}")
        return self


class Approval(Model):
    """Whether a person or the policy approved the submission, and when.

    `despite_fail` says who let experts leave whose audit failed: a person, for this submission alone.
    """

    kind: Literal["person", "policy"]
    at: Time
    despite_fail: Responsible | None = None


class Submission(FederationDocument):
    """Everything that one silo sends for one plan.

    `carry_over` is the silo's consent that its experts and statistics are used in later plans of the federation in
    which they mean the same. `serve_as_base` is its consent that training of later plans starts from its experts.
    """

    format: Literal["archipelago/submission/1"] = "archipelago/submission/1"
    plan_id: PlanId
    plan_digest: Digest
    silo_id: SiloId
    # 1, then one more after every refusal.
    sequence: Annotated[int, Field(ge=1, le=10_000)]
    created_at: Time
    num_units: Annotated[int, Field(ge=2, le=MAX_INTEGER)]
    isolation: Literal["none", "users", "containers"]
    # 4096 is the largest number of coarse clusters, of which each may have an expert.
    experts: Annotated[tuple[SubmittedExpert, ...], Field(min_length=1, max_length=4096)]
    statistics: Annotated[tuple[SubmittedStatistic, ...], Field(min_length=1, max_length=8)]
    spent: Spent
    ledger: LedgerHead
    audit: AuditVerdict
    approval: Approval | None
    # Signing for a plan is no consent to the next: that one is another ensemble, with other partners (docs/adr/0031).
    carry_over: bool = False
    # No consent by default, since anybody who trains on knows what the expert knows about this silo's images.
    serve_as_base: bool = False
    software: Annotated[dict[ShortText, ShortText], Field(max_length=256)]

    @property
    def class_counts(self) -> File | None:
        """Its noised class counts, None for a plan without them."""
        for statistic in self.statistics:
            if statistic.kind == "class_counts":
                return statistic.file
        return None

    @model_validator(mode="after")
    def _audit_lets_it_leave(self) -> "Submission":
        # A waiver is for one plan: one that was written once would cover every later plan as well (docs/adr/0051).
        waiver, leaves = self.audit.waiver, self.approval
        if waiver and waiver.plan_digest != self.plan_digest:
            raise ValueError(
                f"audit.waiver must be for plan_digest {self.plan_digest}, got {waiver.plan_digest}"
            )
        # A person may approve days after the submission was made, and the waiver must still hold on that day.
        last = max(self.created_at, leaves.at) if leaves else self.created_at
        if waiver and waiver.expires_at <= last:
            expired = waiver.expires_at.isoformat()
            raise ValueError(
                f"audit.waiver must be valid at {last.isoformat()}, got one that expired {expired}"
            )
        released = leaves.despite_fail if leaves else None
        # A draft that nobody has approved may have failed its audit: it has not left the site.
        if leaves and (self.audit.verdict == "fail") != (released is not None):
            needed = (
                "a fail needs approval.despite_fail"
                if released is None
                else f"{self.audit.verdict} needs none"
            )
            raise ValueError(f"approval.despite_fail stands beside a failed audit alone: {needed}")
        # A policy was written before these experts existed: what a person decides is whether these may leave.
        if leaves and released and leaves.kind != "person":
            raise ValueError(f"a failed audit needs the approval of a person, got {leaves.kind}")
        return self

    @model_validator(mode="after")
    def _verdict_says_no_more_than_epsilon(self) -> "Submission":
        # A verdict is computed from private images and no epsilon covers it, so that none may stand beside weights for
        # which an epsilon speaks (docs/adr/0059).
        private = {not isinstance(expert.privacy, NoWeightPrivacy) for expert in self.experts}
        if private != {self.audit.verdict == "bounded"}:
            expected = "bounded where experts were trained privately, all of them, and only there"
            raise ValueError(f"audit.verdict must be {expected}, got {self.audit.verdict}")
        return self

    @model_validator(mode="after")
    def _no_kind_twice(self) -> "Submission":
        kinds = [statistic.kind for statistic in self.statistics]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"statistics must be of distinct kinds, got {', '.join(kinds)}")
        num_distinct = len({expert.expert_id for expert in self.experts})
        if num_distinct != len(self.experts):
            raise ValueError(
                f"expert_ids must be distinct, got {num_distinct} for {len(self.experts)} experts"
            )
        return self
