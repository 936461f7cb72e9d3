"""Describes a draft for its approver as text: every file that would leave, and what no privacy guarantee covers."""

from ddm.protocol.submission import Submission, SubmittedExpert
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.system.console import human_bytes, human_seconds, table
from silo.config import Site
from silo.review.facts import Facts, Leaving
from silo.review.leaks import figure_rows
from silo.worker.approval import review_folder

_CARRY_OVER = {
    True: "may carry these experts and statistics over, in this federation, where they mean the same",
    False: "may not carry them over",
}


def review_text(site: Site, facts: Facts) -> str:
    """Describe the draft that waits for approval, on one screen."""
    draft = facts.draft
    parts = [
        _heading(facts),
        _files(facts.files),
        _noise(facts),
        _without_dp(draft),
        _leaks(facts),
        _news(facts),
        _next_step(site, draft),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(facts: Facts) -> str:
    draft, budget = facts.draft, facts.budget
    spent = draft.spent
    audit: str = draft.audit.verdict
    if draft.audit.waiver:
        waiver = draft.audit.waiver
        audit += f" until {waiver.expires_at:%Y-%m-%d} by {waiver.role}: {waiver.reason}"
    elif draft.audit.verdict == "bounded":
        audit += ", the epsilon of the experts, is all that leaves of it"
    measured = (
        f"{facts.audit.verdict}: {facts.audit.reason}"
        if facts.audit
        else "the report cannot be read"
    )
    lines = [
        f"Submission {draft.sequence} of silo {draft.silo_id} for plan {draft.plan_id}",
        *([f"  REHEARSAL       {facts.rehearsal}"] if facts.rehearsal else []),
        f"  it costs        epsilon {spent.epsilon:g}, delta {spent.delta:g} per {spent.unit} ({spent.relation})",
        f"  budget          epsilon {budget.spent:.4g} of {budget.budget_epsilon:g} spent, {budget.left:.4g} left",
        f"  leak audit      {audit}",
        f"  measured here   {measured}",
        f"  isolation       {draft.isolation}" + _isolation_note(draft.isolation),
        f"  later plans     {_CARRY_OVER[draft.carry_over]}",
        f"  ledger          {draft.ledger.num_entries} entries, head {draft.ledger.head_digest[:16]}",
    ]
    return "\n".join(lines)


def _isolation_note(isolation: str) -> str:
    note = " (worker and courier run as the same user, so nothing prevents the courier from reading the data)"
    return note if isolation == "none" else ""


def _files(files: tuple[Leaving, ...]) -> str:
    rows = [(each.path, human_bytes(each.bytes), each.privacy, each.digest[:16]) for each in files]
    return table(rows, ("file", "size", "privacy", "sha256"))


def _noise(facts: Facts) -> str:
    return table([(each.kind, each.level) for each in facts.noises], ("statistic", "noise"))


def _news(facts: Facts) -> str:
    if not facts.previous:
        return ""
    rows = [(each.name, each.before or "", each.now) for each in facts.numbers if each.changed]
    return "Since the submission before:\n" + table(rows, ("what", "before", "now"))


def _without_dp(draft: Submission) -> str:
    exposed = sum(isinstance(expert.privacy, NoWeightPrivacy) for expert in draft.experts)
    weights = f"{exposed} expert(s), trained without DP-SGD: they may memorise single images"
    rows = [
        *([("expert weights", weights)] if exposed else []),
        (f"number of {draft.spent.unit}s", f"{draft.num_units}"),
        *((f"training of {expert.expert_id}", _training(expert)) for expert in draft.experts),
        ("audit", draft.audit.verdict),
        (
            "software",
            ", ".join(f"{name} {number}" for name, number in sorted(draft.software.items())),
        ),
    ]
    return "Leaves without differential privacy:\n" + table(rows, ("what", "value"))


def _leaks(facts: Facts) -> str:
    audits = facts.audit.experts if facts.audit else ()
    rows = [
        (audit.expert_id, name, f"{figure.value:.3f}", f"{figure.low:.3f} to {figure.high:.3f}")
        for audit in audits
        for name, figure in figure_rows(audit)
    ]
    if not rows:
        return ""
    return "Measured by the leak audit; none of it leaves:\n" + table(
        rows, ("expert", "figure", "value", "95% interval")
    )


def _training(expert: SubmittedExpert) -> str:
    seconds = expert.training.seconds
    return f"{expert.steps} steps" + ("" if seconds is None else f", {human_seconds(seconds)}")


def _next_step(site: Site, draft: Submission) -> str:
    return (
        f"The files to inspect: {review_folder(site)}\n"
        f"To approve exactly these bytes:\n  silo approve {site.path} --digest {draft.digest}"
        + (" --despite-fail --role ROLE --reason REASON" if draft.audit.verdict == "fail" else "")
    )
