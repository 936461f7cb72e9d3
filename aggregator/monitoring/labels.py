"""Describes a status in words for the terminal and the live page, and lists what needs the operator's attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aggregator.monitoring.doctor import NOTICE
from aggregator.monitoring.silo_status import Arrival, SiloStatus, Standing, SubmissionStatus
from aggregator.monitoring.status import FederationStatus
from ddm.system.console import human_bytes, human_seconds, table

Tone = Literal["ok", "busy", "idle", "warn", "bad"]
STANDINGS: Mapping[Standing, tuple[str, Tone]] = {
    "absent": ("not seen yet", "idle"),
    "offered": ("has not taken the plan yet", "idle"),
    "working": ("working", "busy"),
    "approval": ("awaiting approval", "idle"),
    "declined": ("refused the plan", "warn"),
    "leaving": ("gave the plan up", "warn"),
    "sending": ("sending", "busy"),
    "silent": ("not responding", "warn"),
    "arrived": ("being verified", "busy"),
    "quarantined": ("quarantined: decision needed", "warn"),
    "refused": ("refused", "bad"),
    "accepted": ("accepted", "ok"),
    "carried": ("carried over from an earlier plan", "ok"),
    "withdrawn": ("withdrawn from this plan", "idle"),
    "removed": ("removed from the federation", "idle"),
}
_VERDICT_TONES: Mapping[str, Tone] = {
    "accepted": "ok",
    "refused": "bad",
    "quarantined": "warn",
    "unreadable": "bad",
}


@dataclass(frozen=True)
class SiloLabels:
    """One silo's status in words.

    Attributes:
        silo: the status.
        label: its standing.
        tone: the colour of that label.
        reported: the state that it reported last.
        last_seen: when it answered last.
        arriving: how much of its submission has arrived, and at which rate; empty when none is on its way.
        percent: of the submission that has arrived.
    """

    silo: SiloStatus
    label: str
    tone: Tone
    reported: str
    last_seen: str
    arriving: str
    percent: int


def labels_of(silo: SiloStatus, now: datetime) -> SiloLabels:
    """Describe one silo's status in words."""
    label, tone = STANDINGS[silo.standing]
    arriving = ""
    percent = 0
    if silo.arrival is not None:
        arriving = _arrival_words(silo.arrival)
        # A silo announces its files itself, and may announce empty ones.
        bytes_total = max(silo.arrival.bytes_total, 1)
        percent = min(100 * silo.arrival.bytes_here // bytes_total, 100)
    last_seen = ""
    if silo.last_seen is not None:
        last_seen = relative_time(silo.last_seen, now)
    return SiloLabels(
        silo=silo,
        label=label,
        tone=tone,
        reported=silo.state.replace("_", " "),
        last_seen=last_seen,
        arriving=arriving,
        percent=percent,
    )


def _arrival_words(arrival: Arrival) -> str:
    text = f"{human_bytes(arrival.bytes_here)} of {human_bytes(arrival.bytes_total)}"
    if arrival.bytes_per_s < 1:
        return f"{text}, stalled"
    left_s = (arrival.bytes_total - arrival.bytes_here) / arrival.bytes_per_s
    left = timedelta(seconds=max(left_s, 0))
    return f"{text}, {human_bytes(arrival.bytes_per_s)}/s, about {_span(left)} left"


def relative_time(at: datetime, now: datetime) -> str:
    """Describe a time relative to now: `12 s ago`, `in 89 days`."""
    if at <= now:
        return f"{_span(now - at)} ago"
    return f"in {_span(at - now)}"


def _span(length: timedelta) -> str:
    if length >= timedelta(days=730):
        return f"{length.days // 365} years"
    if length >= timedelta(days=2):
        return f"{length.days} days"
    return human_seconds(length.total_seconds())


def attention_points(status: FederationStatus) -> Iterator[str]:
    """Yield what needs the operator's attention, the most urgent first."""
    yield from status.problems
    # While nothing runs, no silo gets an answer, and what follows may be a consequence of that.
    if not status.processes.running and any(not silo.final for silo in status.silos):
        yield "aggregator run is not running, so no silo gets an answer"
    for program in status.processes.programs:
        if status.processes.running and not program.alive:
            yield f"{program.name} has ended; aggregator run restarts it"
    for silo in status.silos:
        yield from _silo_attention(silo)
    yield from _still_published(status)
    silent_silos = [silo.silo_id for silo in status.silos if silo.standing == "silent"]
    if silent_silos:
        yield f"no answer from {', '.join(silent_silos)}: contact their operators"
    for expiry in status.expiries:
        if expiry.at - status.at < NOTICE:
            verb = "expired" if expiry.at <= status.at else "expires"
            yield f"{expiry.what} {verb} {relative_time(expiry.at, status.at)}"


def _silo_attention(silo: SiloStatus) -> Iterator[str]:
    match silo.standing:
        case "quarantined":
            yield f"{silo.silo_id} was quarantined: aggregator quarantine shows why; then aggregator admit or refuse"
        case "refused":
            # A silo stands as refused by its last submission (`silo_status.standing`).
            yield f"{silo.silo_id}: {_answer(silo.submissions[-1])}"
        case "declined":
            yield f"{silo.silo_id} refused the plan: ask its operator, whose `silo status` says why"
        case "leaving":
            yield f"{silo.silo_id} gave the plan up: aggregator run leaves it out; if only its node says so, ask it"


def _still_published(status: FederationStatus) -> Iterator[str]:
    """Yield the silos that are gone but still in the newest release."""
    if not status.releases:
        return
    # Earlier versions are not withdrawn: a researcher's copy of them stays what it was.
    newest = status.releases[0]
    if newest.plan_id != status.plan_id:
        return
    for silo in status.silos:
        if silo.standing in ("removed", "withdrawn") and silo.silo_id in newest.silos:
            yield (
                f"version {newest.version} still contains {silo.silo_id}, which was {silo.standing} since: aggregator "
                "router, then aggregator publish"
            )


def _answer(submission: SubmissionStatus) -> str:
    text = f"submission {submission.sequence} {submission.verdict}"
    if submission.code is not None:
        text += f", code {submission.code}"
    if submission.reasons:
        text += f": {'; '.join(submission.reasons)}"
    return text


def page_values(status: FederationStatus) -> dict[str, Any]:
    """Return the values of the page's template."""
    return {
        "status": status,
        "silos": [labels_of(silo, status.at) for silo in status.silos],
        "attention": list(attention_points(status)),
        "num_accepted": sum(silo.standing in ("accepted", "carried") for silo in status.silos),
        "verdict_tones": _VERDICT_TONES,
        "when": lambda at: relative_time(at, status.at),
    }


def status_text(status: FederationStatus) -> str:
    """Format a status for a terminal."""
    running = "running" if status.processes.running else "not running"
    lines = [f"{status.federation} at {status.address}, {running}; plan {status.plan_id or 'none'}"]
    rows = []
    for silo in status.silos:
        labels = labels_of(silo, status.at)
        rows.append(
            (silo.silo_id, labels.label, _reported(labels), labels.last_seen, labels.arriving)
        )
    if rows:
        lines += ["", table(rows, ("silo", "status", "reports", "last seen", "arriving"))]
    answers = [
        f"  {silo.silo_id}: {_answer(submission)}"
        for silo in status.silos
        for submission in silo.submissions
    ]
    if answers:
        lines += ["", "Submissions", *answers]
    lines += ["", *_federation_lines(status)]
    points = list(attention_points(status))
    if points:
        lines += ["", "Needs attention", *(f"  {text}" for text in points)]
    return "\n".join(lines)


def _reported(labels: SiloLabels) -> str:
    if labels.silo.state == "training":
        return f"{labels.reported} {labels.silo.progress}%"
    return labels.reported


def _federation_lines(status: FederationStatus) -> Iterator[str]:
    router = "not trained"
    if status.router is not None:
        router = f"{status.router.family}, trained on {', '.join(status.router.silos)}"
    yield f"router     {router}"
    release = "none"
    if status.releases:
        newest = status.releases[0]
        release = f"version {newest.version}, {relative_time(newest.published_at, status.at)}"
    yield f"release    {release}"
    if status.processes.running:
        programs = []
        for program in status.processes.programs:
            pid = program.pid if program.alive else "ENDED"
            programs.append(f"{program.name} {pid}")
        yield f"processes  {', '.join(programs)}; {status.processes.num_restarts} restarts"
    yield f"disk       {human_bytes(status.disk_free_bytes)} free"
    if status.expiries:
        earliest = status.expiries[0]
        yield f"expires    {earliest.what} {relative_time(earliest.at, status.at)}"
