"""What a release says about the leak audit of each silo's experts: the verdict, who waived or overruled it, and why."""

from ddm.loading.release import Release
from ddm.protocol.submission import Responsible, Submission

# A silo may have thousands of experts, one for each cluster.
_MAX_NAMED = 4


def audit_lines(opened: Release) -> list[str]:
    """Return a sentence for each silo, in the manifest's order; nothing of islands, which have no audit."""
    lines = []
    for silo in opened.manifest.silos:
        submission = opened.submissions[silo.silo_id]
        # One owner's islands have no audit.
        if isinstance(submission, Submission):
            lines.append(
                f"silo {silo.silo_id}, {_name_experts(submission)}: {_describe_verdict(submission)}"
            )
    return lines


def audits_as_json(opened: Release) -> list[dict[str, object]]:
    """Return the audits as `ddm info --json` prints them; what a silo signed is repeated whole."""
    audits: list[dict[str, object]] = []
    for silo in opened.manifest.silos:
        waiver = None
        despite_fail = None
        submission = opened.submissions[silo.silo_id]
        if isinstance(submission, Submission):
            waiver = submission.audit.waiver
            if submission.approval is not None:
                despite_fail = submission.approval.despite_fail
        experts = [
            expert.expert_id for expert in opened.manifest.experts if expert.silo_id == silo.silo_id
        ]
        audits.append(
            {
                "silo_id": silo.silo_id,
                "verdict": silo.audit,
                "experts": experts,
                "waiver": waiver.model_dump(mode="json") if waiver else None,
                "despite_fail": despite_fail.model_dump(mode="json") if despite_fail else None,
            }
        )
    return audits


def _name_experts(submission: Submission) -> str:
    names = [expert.expert_id for expert in submission.experts]
    if len(names) == 1:
        return f"expert {names[0]}"
    if len(names) <= _MAX_NAMED:
        return f"experts {', '.join(names)}"
    return f"all {len(names)} experts"


def _describe_verdict(submission: Submission) -> str:
    match submission.audit.verdict:
        case "pass":
            return "passed its leak audit"
        case "bounded":
            return "trained privately; the epsilon is given in place of an audit's verdict"
        case "fail":
            text = "failed its leak audit"
            if submission.approval and submission.approval.despite_fail:
                text += (
                    f"; allowed to leave by its {_describe_role(submission.approval.despite_fail)}"
                )
            return text
        case "waived":
            text = "an inconclusive leak audit, waived for this plan"
            waiver = submission.audit.waiver
            if waiver:
                text += f" until {waiver.expires_at:%Y-%m-%d} by its {_describe_role(waiver)}"
            return text


def _describe_role(responsible: Responsible) -> str:
    """Return role and reason on one line, which a silo's words cannot end."""
    return " ".join(f"{responsible.role}: {responsible.reason}".split())
