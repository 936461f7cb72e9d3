"""The manifest: the signed list of a release's files, and of the experts and the router of its ensemble.

It is the same for a federation and for one owner's islands, which are listed where silos are.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from ddm.protocol.base import (
    MAX_SILOS,
    UNSHOWN,
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
from ddm.protocol.bases import Base
from ddm.protocol.routers import RouterKind
from ddm.protocol.weight_privacy import DpSgdPrivacy

# A bound on what a reader parses before any signature of a silo is looked at, as `MAX_SILOS` is.
MAX_EXPERTS = 16384
# Pages, the plan's files, and the class counts of each silo.
MAX_FILES = MAX_SILOS + 128
_PRIOR_SUM_TOLERANCE = 1e-6

Probability = Annotated[float, Field(ge=0.0, le=1.0)]

# The operator's words: at least one visible character. Not of `ShortText`, whose pattern this one would replace.
_NOT_BLANK = rf"^[^{UNSHOWN}]*[^{UNSHOWN}\x20\xa0][^{UNSHOWN}]*$"
ReasonText = Annotated[str, StringConstraints(max_length=200, pattern=_NOT_BLANK)]

ScreeningRule = Literal[
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
    "unchanged",
]
"""A rule of screening that an expert violates."""

Standing = Literal["new", "carried", "again", "late"]
"""How a silo takes part: see `PublishedSilo.standing`."""


class PublishedSilo(Model):
    """One silo, or one island of an owner: its signed submission, its key, and what its prior counts.

    Attributes:
        silo_id: its name.
        standing: `new` in a plan that carries no experts over. In one that does, a silo's experts are `carried` from an
            earlier plan, or it trained `again`, or it came `late`.
        submission: the document that it signed.
        key_fingerprint: the fingerprint of the key that it signed with.
        epsilon: what its statistics cost; null for an island, of which nothing was hidden.
        delta: see `epsilon`.
        audit: the verdict of its leak audit; `none` for an island.
        isolation: what separated the process that has the data from the network; `none` for an island.
        admitted: whether a person admitted it although screening had flagged it.
        units: the number of units that its prior counts: what its submission states, or less.
        units_reason: why it counts less, in the operator's words; null where it counts what it stated.
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
    """One expert. The order of experts is the router's class order.

    Attributes:
        expert_id: its name.
        silo_id: the silo that trained it.
        cluster: the coarse cluster that it was trained on; null with other partitions.
        prior: its share of all units.
        file: its weights.
        flags: the rules of screening that it violates.
        privacy: the guarantee that its silo signed, where it was trained privately; else null.
    """

    expert_id: ExpertId
    silo_id: SiloId
    cluster: NaturalInt | None = None
    prior: Probability
    file: File
    flags: Annotated[tuple[ScreeningRule, ...], Field(max_length=16)] = ()
    privacy: DpSgdPrivacy | None = None


class PublishedRouter(Model):
    """The router.

    Attributes:
        kind: its family.
        t_release: the noise level of the sketches that a learned router was trained on; else null.
        training_prior: the prior that its answers include, one entry per expert.
        temperature: what its answers are divided by.
        file: its tensors.
    """

    kind: RouterKind
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    training_prior: Annotated[tuple[Probability, ...], Field(max_length=MAX_EXPERTS)]
    # At t = 0. It falls with the noise, T_t = 1 + (T - 1) alpha_t^2, since routers are overconfident at small t only
    # (docs/adr/0063).
    temperature: Annotated[float, Field(gt=0.0, le=1e6)]
    file: File


class PublishedFigure(Model):
    """One metric with its 95% interval."""

    metric: ShortText
    value: Measure
    low: Measure
    high: Measure


class Manifest(Document):
    """The signed list of a release's contents.

    Attributes:
        plan_id: the plan.
        plan_digest: sha256 of its bytes.
        version: 1, 2, ... over all releases of the same publisher.
        supersedes_digest: sha256 of the manifest of the version before; null for the first.
        published_at: when.
        licence: the licence of the release: that of the plan.
        cite: how to cite it.
        base: the base of the experts that were trained for this plan; null where the plan has none. Experts that are
            carried over started as their own plan says.
        missing_silos: silos of the plan that sent no submission that was accepted.
        withdrawn_silos: silos that left the plan.
        silos: silos whose experts are here. With the two lists above, each silo of the plan is named once.
        experts: all experts, in the router's class order.
        router: the router.
        evaluation: how the router did.
        files: all other files that are signed with the manifest.
    """

    format: Literal["archipelago/manifest/1"] = "archipelago/manifest/1"
    plan_id: PlanId
    plan_digest: Digest
    version: PositiveInt
    supersedes_digest: Digest | None
    published_at: Time
    licence: ShortText
    cite: ShortText
    base: Base | None = None
    missing_silos: Annotated[tuple[SiloId, ...], Field(max_length=MAX_SILOS)]
    withdrawn_silos: Annotated[tuple[SiloId, ...], Field(max_length=MAX_SILOS)]
    silos: Annotated[tuple[PublishedSilo, ...], Field(min_length=1, max_length=MAX_SILOS)]
    experts: Annotated[tuple[PublishedExpert, ...], Field(min_length=1, max_length=MAX_EXPERTS)]
    router: PublishedRouter
    evaluation: Annotated[tuple[PublishedFigure, ...], Field(max_length=1024)]
    files: Annotated[tuple[File, ...], Field(max_length=MAX_FILES)]

    @property
    def private_experts(self) -> tuple[PublishedExpert, ...]:
        """The experts whose weights hide each unit of their silo."""
        return tuple(expert for expert in self.experts if expert.privacy)

    @property
    def weights_in_words(self) -> str:
        """How private the experts' weights are, in a sentence; each private expert's guarantee is in its entry."""
        num_experts = len(self.experts)
        num_private = len(self.private_experts)
        if num_private == 0:
            return "The experts' weights were trained without differential privacy"
        if num_private == num_experts:
            return "The experts' weights were trained with differential privacy (DP-SGD)"
        return (
            f"{num_private} of {num_experts} experts were trained with differential privacy (DP-SGD), "
            "the others without"
        )

    def silo_priors(self) -> dict[str, float]:
        """Return each silo's share, the sum of its experts' priors, in the order of `silos`."""
        priors = {silo.silo_id: 0.0 for silo in self.silos}
        for expert in self.experts:
            priors[expert.silo_id] += expert.prior
        return priors

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        # A name that appears twice would have two priors, or two keys.
        _check_distinct("silo_id", [silo.silo_id for silo in self.silos])
        _check_distinct("expert_id", [expert.expert_id for expert in self.experts])
        _check_distinct("expert's file", [expert.file.path for expert in self.experts])
        # The priors are the shares of a mixture (McAllister et al. 2025).
        total = sum(expert.prior for expert in self.experts)
        if abs(total - 1.0) > _PRIOR_SUM_TOLERANCE:
            raise ValueError(f"the experts' priors must sum to 1, got {total:.6f}")
        # One entry for each class of the router.
        if len(self.router.training_prior) != len(self.experts):
            got = f"got {len(self.router.training_prior)} for {len(self.experts)} experts"
            raise ValueError(f"training_prior needs one entry per expert, {got}")

        listed_silos = {silo.silo_id for silo in self.silos}
        unlisted_silos = {expert.silo_id for expert in self.experts} - listed_silos
        if unlisted_silos:
            num = len(unlisted_silos)
            raise ValueError(
                f"the silos of all experts must be listed in silos; {num} of them are not"
            )

        # A flagged expert is published only because a person decided so, and readers must see that.
        admitted_silos = {silo.silo_id for silo in self.silos if silo.admitted}
        flagged_silos = {expert.silo_id for expert in self.experts if expert.flags}
        if not flagged_silos <= admitted_silos:
            num = len(flagged_silos - admitted_silos)
            raise ValueError(
                f"silos of flagged experts must be marked as admitted; {num} of them are not"
            )
        return self


def _check_distinct(field: str, values: Sequence[str]) -> None:
    num_distinct = len(set(values))
    if num_distinct != len(values):
        raise ValueError(
            f"each {field} must appear once, got {len(values)} entries of {num_distinct} distinct ones"
        )
