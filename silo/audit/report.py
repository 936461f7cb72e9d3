"""The audit's report and gate: experts leave with a pass, a waiver where it cannot tell, or a person after a fail.

No gate stands before privately trained experts: whether they leave, and the word that leaves with them, would depend on
the images beyond their epsilon. Their report is for the people of the site.
"""

from datetime import datetime

from ddm.audit.membership import Membership
from ddm.audit.verdict import Findings, judge, too_few
from ddm.errors import AuditError
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit, Verdict
from ddm.protocol.submission import AuditVerdict, Waiver
from silo.audit.document import AuditReport, ExpertAudit, Figure
from silo.config import AuditPolicy


def cannot_tell(plan_id: str, audit: Audit, num_holdout_units: int) -> AuditReport | None:
    """Return the report of a site that holds out too little for this plan; None where it can be audited."""
    if not (reason := too_few(num_holdout_units, audit)):
        return None
    return AuditReport(
        plan_id=plan_id, verdict="inconclusive", num_holdout_units=num_holdout_units, reason=reason
    )


def could_not_measure(plan_id: str, num_holdout_units: int, error: Exception) -> AuditReport:
    """Return the report of an audit that broke off, where that must not show."""
    return AuditReport(
        plan_id=plan_id,
        verdict="inconclusive",
        num_holdout_units=num_holdout_units,
        reason=f"the audit broke off: {error or type(error).__name__}".encode(
            "utf-8", "replace"
        ).decode()[:400],
    )


def cannot_judge(expert_id: str, num_holdout_units: int, audit: Audit) -> ExpertAudit:
    """Return the audit of one expert with too few units on either side."""
    reason = (
        too_few(num_holdout_units, audit) or "too few units that the expert learned to compare with"
    )
    return ExpertAudit(
        expert_id=expert_id,
        verdict="inconclusive",
        reason=reason,
        num_holdout_units=num_holdout_units,
    )


def whole_report(
    plan_id: str, num_holdout_units: int, experts: tuple[ExpertAudit, ...]
) -> AuditReport:
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
        auc=tuple(_figure(each.name, each.auc) for each in attacks),
        tpr=tuple(_figure(each.name, each.tpr) for each in attacks),
        copies=tuple(_figure(space, share) for space, share in found.copies.items()),
        control=_control(found.control),
        unseen=found.unseen,
        num_samples=num_samples,
    )


def _figure(name: str, estimate: Estimate) -> Figure:
    return Figure(name=name, value=estimate.value, low=estimate.low, high=estimate.high)


def _control(control: Membership) -> Figure:
    return _figure(control.worst.name, control.worst.auc)


def gate(
    report: AuditReport, policy: AuditPolicy, *, plan_digest: str, now: datetime
) -> AuditVerdict:
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
        raise AuditError(
            "leak audit", expected="pass, or a waiver for this plan", got=report.reason
        )
    check_waiver(waiver, plan_digest=plan_digest, now=now)
    return AuditVerdict(verdict="waived", digest=report.digest, waiver=waiver)


def check_waiver(waiver: Waiver, *, plan_digest: str, now: datetime) -> None:
    """Refuse a waiver of another plan, or one that is over.

    Raises:
        AuditError: it is.
    """
    if waiver.plan_digest != plan_digest:
        expected = f"a waiver for the plan in work, {plan_digest[:16]}"
        raise AuditError(
            "audit.waiver.plan_digest", expected=expected, got=f"one for {waiver.plan_digest[:16]}"
        )
    if waiver.expires_at <= now:
        got = f"one that expired {waiver.expires_at.isoformat()}"
        raise AuditError(
            "audit.waiver.expires_at", expected="a waiver that is still valid", got=got
        )
