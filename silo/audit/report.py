"""The audit's report and gate.

Experts leave with a pass, with a waiver where the audit is inconclusive, or after a fail if a person approves them.
There is no gate for privately trained experts: whether they leave, and the verdict that leaves with them, would depend
on the images beyond their epsilon. Their report is for the people of the site.
"""

from datetime import datetime

from ddm.audit.membership import Attack
from ddm.audit.verdict import MeasuredLeaks, judge, too_few_units
from ddm.errors import AuditError
from ddm.evaluation.intervals import Estimate
from ddm.protocol.limits import Audit, Verdict
from ddm.protocol.submission import AuditVerdict, Waiver
from silo.audit.document import AuditReport, ExpertAudit, Figure
from silo.config import AuditPolicy

_MAX_REASON = 400  # characters


def inconclusive_report(
    plan_id: str,
    audit: Audit,
    num_holdout_units: int,
) -> AuditReport | None:
    """Return the report of a site that holds out too little for this plan; None where it can be audited."""
    reason = too_few_units(num_holdout_units, audit)
    if not reason:
        return None
    return AuditReport(
        plan_id=plan_id,
        verdict="inconclusive",
        num_holdout_units=num_holdout_units,
        reason=reason,
    )


def interrupted_report(
    plan_id: str,
    num_holdout_units: int,
    error: Exception,
) -> AuditReport:
    """Return the report of an audit that failed with an error, where that must not show outside."""
    # The error stays in this report: whether an audit breaks off may depend on the images.
    reason = f"the audit broke off: {error or type(error).__name__}"
    # A name of a file in the error may have characters that no document can hold.
    reason = reason.encode("utf-8", "replace").decode()
    return AuditReport(
        plan_id=plan_id,
        verdict="inconclusive",
        num_holdout_units=num_holdout_units,
        reason=reason[:_MAX_REASON],
    )


def inconclusive_audit(
    expert_id: str,
    num_holdout_units: int,
    audit: Audit,
) -> ExpertAudit:
    """Return the audit of one expert with too few units on either side."""
    reason = too_few_units(num_holdout_units, audit)
    if not reason:
        reason = "too few units that the expert learned to compare with"
    return ExpertAudit(
        expert_id=expert_id,
        verdict="inconclusive",
        reason=reason,
        num_holdout_units=num_holdout_units,
    )


def join_reports(
    plan_id: str,
    num_holdout_units: int,
    experts: tuple[ExpertAudit, ...],
) -> AuditReport:
    """Join the audits of all experts: the worst verdict decides, which is `fail`, then `inconclusive`."""
    worst_first: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
    # Of several experts with the worst verdict, the first.
    worst = min(experts, key=lambda audit: worst_first.index(audit.verdict))
    reason = worst.reason
    if len(experts) > 1:
        reason = f"{worst.expert_id}: {reason}"
    return AuditReport(
        plan_id=plan_id,
        verdict=worst.verdict,
        num_holdout_units=num_holdout_units,
        reason=reason[:_MAX_REASON],
        experts=experts,
    )


def expert_audit(
    expert_id: str,
    findings: MeasuredLeaks,
    limits: Audit,
    num_samples: int,
) -> ExpertAudit:
    """Judge one expert, and return the verdict with the figures."""
    verdict, reason = judge(findings, limits)
    deciding = findings.membership.deciding
    attacks = findings.membership.attacks
    worst_on_control = findings.control.worst
    return ExpertAudit(
        expert_id=expert_id,
        verdict=verdict,
        reason=reason[:_MAX_REASON],
        num_members=findings.membership.num_members,
        num_holdout_units=findings.num_holdout,
        deciding_auc=_auc_figures(deciding),
        deciding_tpr=_tpr_figures(deciding),
        auc=_auc_figures(attacks),
        tpr=_tpr_figures(attacks),
        copies=tuple(_figure(space, share) for space, share in findings.copies.items()),
        control=_figure(worst_on_control.name, worst_on_control.auc),
        unseen=findings.sides_alike,
        num_samples=num_samples,
    )


def _auc_figures(attacks: tuple[Attack, ...]) -> tuple[Figure, ...]:
    return tuple(_figure(attack.name, attack.auc) for attack in attacks)


def _tpr_figures(attacks: tuple[Attack, ...]) -> tuple[Figure, ...]:
    return tuple(_figure(attack.name, attack.tpr) for attack in attacks)


def _figure(name: str, estimate: Estimate) -> Figure:
    return Figure(
        name=name,
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
    )


def gate(
    report: AuditReport,
    policy: AuditPolicy,
    *,
    plan_digest: str,
    now: datetime,
) -> AuditVerdict:
    """Return the verdict under which the experts may leave: the audit's, or the site's waiver if it is inconclusive.

    After a `fail` they leave only if a person approves that very draft, see `silo.worker.approval.approve`.

    Args:
        report: the audit's.
        policy: the site's.
        plan_digest: the digest of the plan in progress.
        now: the time at which the waiver must be valid.

    Raises:
        AuditError: the audit was inconclusive, and policy.toml holds no waiver for this plan and time.
    """
    # A waiver is for what could not be measured; it never turns a failure into a pass.
    if report.verdict != "inconclusive":
        return AuditVerdict(verdict=report.verdict, digest=report.digest)
    waiver = policy.waiver
    if waiver is None:
        raise AuditError(
            "leak audit",
            expected="pass, or a waiver for this plan",
            got=report.reason,
        )
    check_waiver(waiver, plan_digest=plan_digest, now=now)
    return AuditVerdict(verdict="waived", digest=report.digest, waiver=waiver)


def check_waiver(
    waiver: Waiver,
    *,
    plan_digest: str,
    now: datetime,
) -> None:
    """Refuse a waiver of another plan, or one that has expired.

    Raises:
        AuditError: it is.
    """
    if waiver.plan_digest != plan_digest:
        expected = f"a waiver for the plan in progress, {plan_digest[:16]}"
        got = f"one for {waiver.plan_digest[:16]}"
        raise AuditError("audit.waiver.plan_digest", expected=expected, got=got)
    if waiver.expires_at <= now:
        got = f"one that expired {waiver.expires_at.isoformat()}"
        raise AuditError(
            "audit.waiver.expires_at",
            expected="a waiver that is still valid",
            got=got,
        )
