"""The leak audit: an expert leaves with a `pass`, a waiver of one that cannot tell, or a person after a `fail`."""

from datetime import datetime
from typing import Literal

from ddm.errors import AuditError
from ddm.protocol.base import Document, NaturalInt, PlanId, ShortText
from ddm.protocol.plan import Audit
from ddm.protocol.submission import AuditVerdict, Waiver
from silo.config import AuditPolicy


class AuditReport(Document):
    """The measurement and its verdict. Stays on the site; only its digest leaves."""

    format: Literal["archipelago/audit/1"] = "archipelago/audit/1"
    plan_id: PlanId
    verdict: Literal["pass", "fail", "inconclusive"]
    num_holdout_units: NaturalInt
    reason: ShortText


def measure(plan_id: str, audit: Audit, *, num_holdout_units: int) -> AuditReport:
    """Audit one expert against the site's held-out units.

    Too little held-out data makes the verdict `inconclusive`, which blocks the submission as `fail` does.
    """
    if num_holdout_units < audit.min_holdout_units:
        reason = f"{num_holdout_units} held-out units; the plan needs {audit.min_holdout_units} to measure leakage"
    else:
        reason = "this version measures no leakage on held-out units, so it cannot say that the expert passes"
    return AuditReport(plan_id=plan_id, verdict="inconclusive", num_holdout_units=num_holdout_units, reason=reason)


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
