"""What a status means to a person: words for the terminal and for the page, and what wants their attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aggregator.monitoring.doctor import NOTICE
from aggregator.monitoring.silo_status import SiloStatus, Standing, SubmissionStatus
from aggregator.monitoring.status import FederationStatus
from ddm.system.console import human_bytes, human_seconds, table

Tone = Literal["ok", "busy", "idle", "warn", "bad"]
_STANDINGS: Mapping[Standing, tuple[str, Tone]] = {
    "absent": ("not seen yet", "idle"),
    "working": ("at work", "busy"),
    "approval": ("waits for its approver", "idle"),
    "sending": ("sending", "busy"),
    "silent": ("does not answer", "warn"),
    "arrived": ("being verified", "busy"),
    "quarantined": ("quarantined: waits for you", "warn"),
    "refused": ("refused", "bad"),
    "accepted": ("accepted", "ok"),
    "withdrawn": ("withdrawn from this plan", "idle"),
    "removed": ("removed from the federation", "idle"),
}
_VERDICT_TONES: Mapping[str, Tone] = {"accepted": "ok", "refused": "bad", "quarantined": "warn", "unreadable": "bad"}


@dataclass(frozen=True)
class SiloWords:
    """One silo in words.

    Attributes:
        silo: the facts.
        label: where it stands.
        tone: how good that is.
        says: its own last word.
        seen: when it answered last.
        arriving: how much of its submission is here, and how fast it comes; empty when none is on its way.
        percent: of the submission that is here.
    """

    silo: SiloStatus
    label: str
    tone: Tone
    says: str
    seen: str
    arriving: str
    percent: int


def words_of(silo: SiloStatus, now: datetime) -> SiloWords:
    """Put one silo into words."""
    label, tone = _STANDINGS[silo.standing]
    arrival, arriving, percent = silo.arrival, "", 0
    if arrival:
        percent = min(100 * arrival.bytes_here // max(arrival.bytes_total, 1), 100)
        arriving = f"{human_bytes(arrival.bytes_here)} of {human_bytes(arrival.bytes_total)}"
        arriving += f", {human_bytes(arrival.bytes_per_s)}/s" if arrival.bytes_per_s >= 1 else ", standing still"
        if arrival.bytes_per_s >= 1:
            left = (arrival.bytes_total - arrival.bytes_here) / arrival.bytes_per_s
            arriving += f", about {_span(timedelta(seconds=max(left, 0)))} left"
    seen = f"seen {when(silo.last_seen, now)}" if silo.last_seen else ""
    return SiloWords(silo, label, tone, silo.state.replace("_", " "), seen, arriving, percent)


def when(at: datetime, now: datetime) -> str:
    """Say a time as people do: `12 s ago`, `in 89 days`."""
    return f"{_span(now - at)} ago" if at <= now else f"in {_span(at - now)}"


def _span(length: timedelta) -> str:
    if length >= timedelta(days=730):
        return f"{length.days // 365} years"
    return f"{length.days} days" if length >= timedelta(days=2) else human_seconds(length.total_seconds())


def attention(status: FederationStatus) -> Iterator[str]:
    """Say what a person should look at, the most urgent first."""
    yield from status.problems
    if not status.processes.running and any(not silo.final for silo in status.silos):
        yield "aggregator run is not at work, so no silo gets an answer"
    for program in status.processes.programs:
        if status.processes.running and not program.alive:
            yield f"{program.name} has ended; aggregator run starts it again"
    for silo in status.silos:
        if silo.standing == "quarantined":
            yield f"{silo.silo_id} was set aside by screening: aggregator quarantine shows why, admit or refuse decides"
        elif silo.standing == "refused":
            yield f"{silo.silo_id}: {_said(silo.submissions[-1])}"
    yield from _still_published(status)
    silent = [silo.silo_id for silo in status.silos if silo.standing == "silent"]
    if silent:
        yield f"no answer from {', '.join(silent)}: call who operates them"
    for expiry in status.expiries:
        if expiry.at - status.at < NOTICE:
            verb = "expired" if expiry.at <= status.at else "expires"
            yield f"{expiry.what} {verb} {when(expiry.at, status.at)}"


def _still_published(status: FederationStatus) -> Iterator[str]:
    """Name who is gone and yet in the newest version."""
    newest = status.releases[0] if status.releases else None
    if newest is None or newest.plan_id != status.plan_id:
        return
    for silo in status.silos:
        if silo.standing in ("removed", "withdrawn") and silo.silo_id in newest.silos:
            held = f"version {newest.version} still holds {silo.silo_id}, {silo.standing} since"
            yield f"{held}: aggregator router, then aggregator publish"


def _said(submission: SubmissionStatus) -> str:
    code = f", code {submission.code}" if submission.code is not None else ""
    reasons = f": {'; '.join(submission.reasons)}" if submission.reasons else ""
    return f"submission {submission.sequence} {submission.verdict}{code}{reasons}"


def page_values(status: FederationStatus) -> dict[str, Any]:
    """Return what the page's template is filled with."""
    return {
        "status": status,
        "silos": [words_of(silo, status.at) for silo in status.silos],
        "attention": list(attention(status)),
        "num_accepted": sum(silo.standing == "accepted" for silo in status.silos),
        "verdict_tones": _VERDICT_TONES,
        "when": lambda at: when(at, status.at),
    }


def describe(status: FederationStatus) -> str:
    """Lay a status out for a terminal."""
    running = "running" if status.processes.running else "not running"
    lines = [f"{status.federation} at {status.address}, {running}; plan {status.plan_id or 'none'}"]
    rows = [
        (words.silo.silo_id, words.label, _own_words(words), words.seen.removeprefix("seen "), words.arriving)
        for words in (words_of(silo, status.at) for silo in status.silos)
    ]
    if rows:
        lines += ["", table(rows, ("silo", "stands", "says", "seen", "arriving"))]
    said = [f"  {silo.silo_id}: {_said(submission)}" for silo in status.silos for submission in silo.submissions]
    lines += ["", "Submissions", *said] if said else []
    lines += ["", *_rest(status)]
    wanted = list(attention(status))
    lines += ["", "Look at", *(f"  {text}" for text in wanted)] if wanted else []
    return "\n".join(lines)


def _own_words(words: SiloWords) -> str:
    return f"{words.says} {words.silo.progress}%" if words.silo.state == "training" else words.says


def _rest(status: FederationStatus) -> Iterator[str]:
    router = status.router
    yield "router     " + (f"{router.family}, trained on {', '.join(router.silos)}" if router else "not trained")
    newest = status.releases[0] if status.releases else None
    yield "release    " + (f"version {newest.version}, {when(newest.published_at, status.at)}" if newest else "none")
    if status.processes.running:
        programs = [f"{one.name} {one.pid if one.alive else 'ENDED'}" for one in status.processes.programs]
        yield f"processes  {', '.join(programs)}; {status.processes.num_restarts} restarts"
    yield f"disk       {human_bytes(status.disk_free_bytes)} free"
    for expiry in status.expiries[:1]:
        yield f"expires    {expiry.what} {when(expiry.at, status.at)}"
