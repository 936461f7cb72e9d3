"""Describes a draft for its approver as text: every file that would leave, and what no privacy guarantee covers."""

from ddm.protocol.submission import Submission, SubmittedExpert
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.system.console import human_bytes, human_seconds, table
from silo.config import Site
from silo.review.facts import OutgoingFile, ReviewFacts
from silo.review.leaks import figure_rows
from silo.worker.approval import review_folder

_CARRY_OVER = {
    True: "may carry these experts and statistics over, in this federation, where they mean the same",
    False: "may not carry them over",
}
_SERVE_AS_BASE = {
    True: "and may start training from these experts",
    False: "and may not start training from them",
}


def review_text(site: Site, facts: ReviewFacts) -> str:
    """Describe the draft that waits for approval, on one screen."""
    draft = facts.draft
    parts = [
        _heading(facts),
        _files(facts.files),
        _noise(facts),
        _without_dp(draft),
        _leaks(facts),
        _changes(facts),
        _next_step(site, draft),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(facts: ReviewFacts) -> str:
    draft = facts.draft
    budget = facts.budget
    spent = draft.spent
    measured = "the report cannot be read"
    if facts.audit is not None:
        measured = f"{facts.audit.verdict}: {facts.audit.reason}"
    lines = [f"Submission {draft.sequence} of silo {draft.silo_id} for plan {draft.plan_id}"]
    if facts.rehearsal:
        lines.append(f"  REHEARSAL       {facts.rehearsal}")
    if facts.plan.base is not None:
        lines.append(f"  starts from     {facts.plan.base.words}")
    lines += [
        f"  it costs        epsilon {spent.epsilon:g}, delta {spent.delta:g} per {spent.unit} ({spent.relation})",
        f"  budget          epsilon {budget.spent:.4g} of {budget.budget_epsilon:g} spent, {budget.left:.4g} left",
        f"  leak audit      {_audit_words(draft)}",
        f"  measured here   {measured}",
        f"  isolation       {draft.isolation}" + _isolation_note(draft.isolation),
        f"  licence         {facts.plan.licence}, of every release that contains it",
        f"  later plans     {_CARRY_OVER[draft.carry_over]}",
        f"                  {_SERVE_AS_BASE[draft.serve_as_base]}",
        f"  ledger          {draft.ledger.num_entries} entries, head {draft.ledger.head_digest[:16]}",
    ]
    return "\n".join(lines)


def _audit_words(draft: Submission) -> str:
    audit = draft.audit
    if audit.waiver is not None:
        waiver = audit.waiver
        return (
            f"{audit.verdict} until {waiver.expires_at:%Y-%m-%d} by {waiver.role}: {waiver.reason}"
        )
    # The word for privately trained experts: the measurement stays here, and epsilon speaks in its place (ADR 0059).
    if audit.verdict == "bounded":
        return f"{audit.verdict}, the epsilon of the experts, is all that leaves of it"
    return audit.verdict


def _isolation_note(isolation: str) -> str:
    if isolation != "none":
        return ""
    return " (worker and courier run as the same user, so nothing prevents the courier from reading the data)"


def _files(files: tuple[OutgoingFile, ...]) -> str:
    rows = []
    for file in files:
        digest_start = file.digest[:16]
        rows.append((file.path, human_bytes(file.bytes), file.privacy, digest_start))
    return table(rows, ("file", "size", "privacy", "sha256"))


def _noise(facts: ReviewFacts) -> str:
    rows = [(noise.kind, noise.level) for noise in facts.noises]
    return table(rows, ("statistic", "noise"))


def _changes(facts: ReviewFacts) -> str:
    if not facts.previous:
        return ""
    rows = [
        (number.name, number.before or "", number.now) for number in facts.numbers if number.changed
    ]
    return "Since the submission before:\n" + table(rows, ("what", "before", "now"))


def _without_dp(draft: Submission) -> str:
    rows = []
    num_exposed = sum(isinstance(expert.privacy, NoWeightPrivacy) for expert in draft.experts)
    if num_exposed:
        weights = (
            f"{num_exposed} expert(s), trained without DP-SGD: they may memorise single images"
        )
        rows.append(("expert weights", weights))
    rows.append((f"number of {draft.spent.unit}s", f"{draft.num_units}"))
    for expert in draft.experts:
        rows.append((f"training of {expert.expert_id}", _training(expert)))
    rows.append(("audit", draft.audit.verdict))
    software = [f"{name} {version}" for name, version in sorted(draft.software.items())]
    rows.append(("software", ", ".join(software)))
    return "Leaves without differential privacy:\n" + table(rows, ("what", "value"))


def _leaks(facts: ReviewFacts) -> str:
    if facts.audit is None:
        return ""
    rows = []
    for audit in facts.audit.experts:
        for name, figure in figure_rows(audit):
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            rows.append((audit.expert_id, name, f"{figure.value:.3f}", interval))
    if not rows:
        return ""
    columns = ("expert", "figure", "value", "95% interval")
    return "Measured by the leak audit; none of it leaves:\n" + table(rows, columns)


def _training(expert: SubmittedExpert) -> str:
    text = f"{expert.steps} steps"
    if expert.training.seconds is not None:
        text += f", {human_seconds(expert.training.seconds)}"
    return text


def _next_step(site: Site, draft: Submission) -> str:
    command = f"silo approve {site.path} --digest {draft.digest}"
    # Experts that failed leave only if somebody answers for them by name, which is published with them (ADR 0051).
    if draft.audit.verdict == "fail":
        command += " --despite-fail --role ROLE --reason REASON"
    return (
        f"The files to inspect: {review_folder(site)}\nTo approve exactly these bytes:\n  {command}"
    )
