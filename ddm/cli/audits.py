"""What a release says of the leak audit of each silo's experts: the verdict, who waived or overruled it, and why."""

from ddm.loading.release import Release
from ddm.protocol.submission import Responsible, Submission

_MOST_NAMED = 4


def audit_lines(opened: Release) -> list[str]:
    """Return a sentence for each silo, in the manifest's order; nothing of islands, which have no audit."""
    lines = []
    for silo in opened.manifest.silos:
        submission = opened.submissions[silo.silo_id]
        if isinstance(submission, Submission):
            lines.append(f"silo {silo.silo_id}, {_experts(submission)}: {_in_words(submission)}")
    return lines


def audits_as_json(opened: Release) -> list[dict[str, object]]:
    """Return the same for scripts; what a silo has signed of it is repeated field by field."""
    found: list[dict[str, object]] = []
    for silo in opened.manifest.silos:
        submission = opened.submissions[silo.silo_id]
        signed = submission if isinstance(submission, Submission) else None
        waiver = signed.audit.waiver if signed else None
        released = signed.approval.despite_fail if signed and signed.approval else None
        found.append(
            {
                "silo_id": silo.silo_id,
                "verdict": silo.audit,
                "experts": [
                    each.expert_id
                    for each in opened.manifest.experts
                    if each.silo_id == silo.silo_id
                ],
                "waiver": waiver.model_dump(mode="json") if waiver else None,
                "despite_fail": released.model_dump(mode="json") if released else None,
            }
        )
    return found


def _experts(submission: Submission) -> str:
    names = [each.expert_id for each in submission.experts]
    if len(names) == 1:
        return f"expert {names[0]}"
    return (
        f"experts {', '.join(names)}" if len(names) <= _MOST_NAMED else f"all {len(names)} experts"
    )


def _in_words(submission: Submission) -> str:
    match submission.audit.verdict:
        case "pass":
            return "passed its leak audit"
        case "bounded":
            return "trained privately; the epsilon stands in the place of an audit's verdict"
        case "fail":
            person = submission.approval.despite_fail if submission.approval else None
            return "failed its leak audit" + (f"; let go by its {_who(person)}" if person else "")
        case "waived":
            waiver = submission.audit.waiver
            words = f" until {waiver.expires_at:%Y-%m-%d} by its {_who(waiver)}" if waiver else ""
            return f"a leak audit that could not tell, waived for this plan{words}"


def _who(answers: Responsible) -> str:
    """Return role and reason on one line, which a silo's words cannot end."""
    return " ".join(f"{answers.role}: {answers.reason}".split())
