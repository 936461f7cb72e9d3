"""The audit's report and gate: experts leave with a pass, a waiver where it cannot tell, or a person after a fail."""

import secrets
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from ddm.audit.membership import Membership
from ddm.audit.verdict import Findings, Verdict, judge, too_few
from ddm.errors import AuditError
from ddm.evaluation import intervals
from ddm.protocol.base import Digest, Document, ExpertId, Model, NaturalInt, PlanId, ShortText
from ddm.protocol.plan import Audit
from ddm.protocol.submission import AuditVerdict, Waiver
from silo.config import AuditPolicy

_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Figure(Model):
    """A measured share, with its 95% interval."""

    name: ShortText
    value: _Share
    low: _Share
    high: _Share

    @classmethod
    def of(cls, name: str, estimate: intervals.Estimate) -> "Figure":
        """Write an estimate down."""
        return cls(name=name, value=estimate.value, low=estimate.low, high=estimate.high)


class ExpertAudit(Model):
    """What was measured on one expert.

    Attributes:
        verdict: on it.
        reason: for it.
        num_members: units trained on that were attacked.
        num_holdout_units: units held out that are no duplicates of training images.
        auc: of each attack.
        tpr: share of members that each attack finds at 1% false positives.
        copies: share of samples that are near copies, by space.
        control: the largest AUC on the overfitted copy.
        unseen: whether an expert that learned neither side takes them for the same.
        num_samples: drawn.
    """

    expert_id: ExpertId
    verdict: Verdict
    reason: ShortText
    num_members: NaturalInt = 0
    num_holdout_units: NaturalInt
    auc: Annotated[tuple[Figure, ...], Field(max_length=256)] = ()
    tpr: Annotated[tuple[Figure, ...], Field(max_length=256)] = ()
    copies: Annotated[tuple[Figure, ...], Field(max_length=16)] = ()
    control: Figure | None = None
    unseen: bool | None = None
    num_samples: NaturalInt = 0


class AuditReport(Document):
    """The measurement and its verdict. Stays on the site; only its digest leaves, which `salt` makes a blank number.

    Attributes:
        num_holdout_units: of the site.
        salt: random, so that nobody can try reports against the digest.
        experts: each expert's audit, where there was one.
    """

    format: Literal["archipelago/audit/1"] = "archipelago/audit/1"
    plan_id: PlanId
    verdict: Verdict
    num_holdout_units: NaturalInt
    reason: ShortText
    salt: Digest = Field(default_factory=lambda: secrets.token_hex(32))
    experts: Annotated[tuple[ExpertAudit, ...], Field(max_length=4096)] = ()


def cannot_tell(plan_id: str, audit: Audit, num_holdout_units: int) -> AuditReport | None:
    """Return the report of a site that holds out too little for this plan; None where it can be audited."""
    if not (reason := too_few(num_holdout_units, audit)):
        return None
    return AuditReport(plan_id=plan_id, verdict="inconclusive", num_holdout_units=num_holdout_units, reason=reason)


def cannot_judge(expert_id: str, num_holdout_units: int, audit: Audit) -> ExpertAudit:
    """Return the audit of one expert with too few units on either side."""
    reason = too_few(num_holdout_units, audit) or "too few units that the expert learned to compare with"
    return ExpertAudit(expert_id=expert_id, verdict="inconclusive", reason=reason, num_holdout_units=num_holdout_units)


def whole_report(plan_id: str, num_holdout_units: int, experts: tuple[ExpertAudit, ...]) -> AuditReport:
    """Join the audits of all experts: one that fails fails all, else one that cannot tell decides."""
    order: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
    worst = min(experts, key=lambda each: order.index(each.verdict))
    reason = worst.reason if len(experts) == 1 else f"{worst.expert_id}: {worst.reason}"
    return AuditReport(
        plan_id=plan_id,
        verdict=worst.verdict,
        num_holdout_units=num_holdout_units,
        reason=reason[:400],
        experts=experts,
    )


def expert_audit(expert_id: str, found: Findings, limits: Audit, num_samples: int) -> ExpertAudit:
    """Judge one expert and write down what was found."""
    verdict, reason = judge(found, limits)
    attacks = found.membership.attacks
    return ExpertAudit(
        expert_id=expert_id,
        verdict=verdict,
        reason=reason[:400],
        num_members=found.membership.num_members,
        num_holdout_units=found.num_holdout,
        auc=tuple(Figure.of(each.name, each.auc) for each in attacks),
        tpr=tuple(Figure.of(each.name, each.tpr) for each in attacks),
        copies=tuple(Figure.of(space, share) for space, share in found.copies.items()),
        control=_control(found.control),
        unseen=found.unseen,
        num_samples=num_samples,
    )


def _control(control: Membership) -> Figure:
    return Figure.of(control.worst.name, control.worst.auc)


def gate(report: AuditReport, policy: AuditPolicy, *, plan_digest: str, now: datetime) -> AuditVerdict:
    """Return the verdict under which the experts may leave: the audit's, or the site's waiver of one that cannot tell.

    After a `fail` they leave only if a person approves that very draft, see `silo.worker.approval.approve`.

    Args:
        report: the audit's.
        policy: the site's.
        plan_digest: of the plan in work.
        now: the time at which the waiver must be valid.

    Raises:
        AuditError: the audit was inconclusive, and policy.toml holds no waiver for this plan and time.
    """
    if report.verdict != "inconclusive":
        return AuditVerdict(verdict=report.verdict, digest=report.digest)
    waiver = policy.waiver
    if waiver is None:
        raise AuditError("leak audit", expected="pass, or a waiver for this plan", got=report.reason)
    check_waiver(waiver, plan_digest=plan_digest, now=now)
    return AuditVerdict(verdict="waived", digest=report.digest, waiver=waiver)


def check_waiver(waiver: Waiver, *, plan_digest: str, now: datetime) -> None:
    """Refuse a waiver of another plan, or one that is over.

    Raises:
        AuditError: it is.
    """
    if waiver.plan_digest != plan_digest:
        expected = f"a waiver for the plan in work, {plan_digest[:16]}"
        raise AuditError("audit.waiver.plan_digest", expected=expected, got=f"one for {waiver.plan_digest[:16]}")
    if waiver.expires_at <= now:
        got = f"one that expired {waiver.expires_at.isoformat()}"
        raise AuditError("audit.waiver.expires_at", expected="a waiver that is still valid", got=got)
