"""The leak audit: no expert leaves without a verdict of `pass`, or a waiver for which somebody is responsible."""

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


def gate(report: AuditReport, policy: AuditPolicy) -> AuditVerdict:
    """Return the verdict under which the expert may leave: the audit's, or the site's waiver.

    Raises:
        AuditError: the audit did not pass and policy.toml holds no waiver.
    """
    if report.verdict == "pass":
        return AuditVerdict(verdict="pass", digest=report.digest)
    if policy.waiver is None:
        raise AuditError("leak audit", expected="pass, or a waiver in policy.toml", got=report.reason)
    waiver = Waiver(role=policy.waiver.role, reason=policy.waiver.reason)
    return AuditVerdict(verdict="waived", digest=report.digest, waiver=waiver)
