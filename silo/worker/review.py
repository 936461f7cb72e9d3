"""Describes a draft for its approver: every file that would leave, and what no privacy guarantee covers."""

from ddm.protocol.submission import Submission, SubmittedExpert
from ddm.system.console import human_bytes, human_seconds, table
from silo.config import Site
from silo.worker.approval import load_draft, review_folder

_CARRY_OVER = {
    True: "may carry these experts and statistics over, in this federation, where they mean the same",
    False: "may not carry them over",
}


def review_text(site: Site) -> str:
    """Describe the draft that waits for approval, on one screen."""
    draft = load_draft(site)
    return "\n\n".join([_heading(draft), _files(draft), _without_dp(draft), _next_step(site, draft)])


def _heading(draft: Submission) -> str:
    spent = draft.spent
    audit: str = draft.audit.verdict
    if draft.audit.waiver:
        waiver = draft.audit.waiver
        audit += f" until {waiver.expires_at:%Y-%m-%d} by {waiver.role}: {waiver.reason}"
    lines = [
        f"Submission {draft.sequence} of silo {draft.silo_id} for plan {draft.plan_id}",
        f"  statistics cost epsilon {spent.epsilon:g}, delta {spent.delta:g} per {spent.unit} ({spent.relation})",
        f"  leak audit      {audit}",
        f"  isolation       {draft.isolation}" + _isolation_note(draft.isolation),
        f"  later plans     {_CARRY_OVER[draft.carry_over]}",
        f"  ledger          {draft.ledger.num_entries} entries, head {draft.ledger.head_digest[:16]}",
    ]
    return "\n".join(lines)


def _isolation_note(isolation: str) -> str:
    note = " (worker and courier run as the same user, so nothing prevents the courier from reading the data)"
    return note if isolation == "none" else ""


def _files(draft: Submission) -> str:
    rows: list[tuple[str, str, str, str]] = []
    for expert in draft.experts:
        private = "no differential privacy" if expert.privacy.kind == "none" else "DP-SGD"
        rows.append((expert.file.path, human_bytes(expert.file.bytes), private, expert.file.digest[:16]))
    for statistic in draft.statistics:
        cost = f"epsilon {statistic.epsilon:g}, delta {statistic.delta:g}"
        rows.append((statistic.file.path, human_bytes(statistic.file.bytes), cost, statistic.file.digest[:16]))
    return table(rows, ("file", "size", "privacy", "sha256"))


def _without_dp(draft: Submission) -> str:
    rows = [
        ("expert weights", f"{len(draft.experts)} expert(s), trained without DP-SGD: they may memorise single images"),
        (f"number of {draft.spent.unit}s", f"{draft.num_units}"),
        *((f"training of {expert.expert_id}", _training(expert)) for expert in draft.experts),
        ("audit", draft.audit.verdict),
        ("software", ", ".join(f"{name} {number}" for name, number in sorted(draft.software.items()))),
    ]
    return "Leaves without differential privacy:\n" + table(rows, ("what", "value"))


def _training(expert: SubmittedExpert) -> str:
    return f"{expert.steps} steps, {human_seconds(expert.training.seconds)}"


def _next_step(site: Site, draft: Submission) -> str:
    return (
        f"The files to inspect: {review_folder(site)}\n"
        f"To approve exactly these bytes:\n  silo approve {site.path} --digest {draft.digest}"
        + (" --despite-fail --role ROLE --reason REASON" if draft.audit.verdict == "fail" else "")
    )
