"""Describes a status in words for the terminal and the live page, and lists what needs the operator's attention."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aggregator.monitoring.doctor import NOTICE
from aggregator.monitoring.silo_status import SiloStatus
from aggregator.monitoring.standing import STANDINGS, Arrival, SiloStanding, SubmissionStatus, Tone
from aggregator.monitoring.status import FederationStatus
from ddm.system.console import human_bytes, human_seconds, table

# Of one standing, in a list that is shortened.
_MAX_SHOWN = 10
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
        percent: the percentage of the submission that has arrived.
    """

    silo: SiloStatus
    label: str
    tone: Tone
    reported: str
    last_seen: str
    arriving: str
    percent: int


@dataclass(frozen=True)
class SiloGroup:
    """The silos of one standing, by name.

    Attributes:
        standing: theirs.
        silos: all of them.
        shown: the first of them, or all.
    """

    standing: SiloStanding
    silos: tuple[SiloStatus, ...]
    shown: tuple[SiloStatus, ...]

    @property
    def num_hidden(self) -> int:
        """How many are not shown."""
        return len(self.silos) - len(self.shown)


def groups_of(status: FederationStatus, *, show_all: bool) -> list[SiloGroup]:
    """Group the silos by standing: first those that need a person here, then those that need one at the silo.

    Args:
        status: the status of the federation.
        show_all: show every silo of a group, however many there are.
    """
    groups = []
    for standing in STANDINGS:
        silos = [silo for silo in status.silos if silo.standing == standing]
        silos.sort(key=lambda silo: silo.silo_id)
        if silos:
            num_shown = len(silos) if show_all else _MAX_SHOWN
            groups.append(SiloGroup(standing, tuple(silos), tuple(silos[:num_shown])))
    return groups


def labels_of(silo: SiloStatus, now: datetime) -> SiloLabels:
    """Describe one silo's status in words."""
    words = STANDINGS[silo.standing]
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
        label=words.label,
        tone=words.tone,
        reported=_reported(silo),
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


def attention_points(status: FederationStatus, *, show_all: bool = False) -> Iterator[str]:
    """Yield what needs the operator's attention, the most urgent first; of many silos alike the first ones only.

    Args:
        status: the status of the federation.
        show_all: name every silo.
    """
    yield from status.problems
    # While nothing runs, no silo gets an answer, and what follows may be a consequence of that.
    if not status.processes.running and any(not silo.final for silo in status.silos):
        yield "aggregator run is not running, so no silo gets an answer"
    for program in status.processes.programs:
        if status.processes.running and not program.alive:
            yield f"{program.name} has ended; aggregator run restarts it"
    for group in groups_of(status, show_all=show_all):
        yield from _group_attention(group)
    yield from _still_published(status)
    for expiry in status.expiries:
        if expiry.at - status.at < NOTICE:
            verb = "expired" if expiry.at <= status.at else "expires"
            yield f"{expiry.what} {verb} {relative_time(expiry.at, status.at)}"


def _group_attention(group: SiloGroup) -> Iterator[str]:
    """Yield what the silos of one standing need from a person: one line, or one for each where their reasons differ."""
    words = STANDINGS[group.standing]
    if words.person == "nobody":
        if group.standing == "leaving":
            yield (
                f"{_names(group)} gave the plan up: aggregator run leaves it out once its signed notice has arrived; "
                "if that does not come, ask the silo"
            )
        return
    if group.standing not in ("refused", "blocked"):
        yield f"{_names(group)}: {words.label}; {words.step}"
        return
    for silo in group.shown:
        reason = f"{words.label} (code {silo.code})"
        if group.standing == "refused":
            # A silo stands as refused by its last submission (`standing.decide_standing`).
            reason = _answer(silo.submissions[-1])
        yield f"{silo.silo_id}: {reason}; {words.step}"
    if group.num_hidden:
        yield f"{group.num_hidden} more silos: {words.label}"


def _names(group: SiloGroup) -> str:
    return _shortened([silo.silo_id for silo in group.silos], len(group.shown))


def _shortened(names: Sequence[str], max_shown: int = _MAX_SHOWN) -> str:
    """Join names; of a long list the first ones, and how many more there are."""
    text = ", ".join(names[:max_shown])
    num_hidden = len(names) - max_shown
    if num_hidden > 0:
        return f"{text} and {num_hidden} more"
    return text


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
                "release"
            )


def _answer(submission: SubmissionStatus) -> str:
    text = f"submission {submission.sequence} {submission.verdict}"
    if submission.code is not None:
        text += f", code {submission.code}"
    if submission.reasons:
        text += f": {'; '.join(submission.reasons)}"
    return text


def page_values(status: FederationStatus, *, show_all: bool = False) -> dict[str, Any]:
    """Return the values of the page's template.

    Args:
        status: the status of the federation.
        show_all: show every silo, even if many have the same standing.
    """
    planned_silos = [silo for silo in status.silos if silo.standing != "unnamed"]
    groups = groups_of(status, show_all=show_all)
    return {
        "status": status,
        "groups": groups,
        "labels": {silo.silo_id: labels_of(silo, status.at) for silo in status.silos},
        "words": STANDINGS,
        "show_all": show_all,
        "num_hidden": sum(group.num_hidden for group in groups),
        "attention": list(attention_points(status, show_all=show_all)),
        "num_planned": len(planned_silos),
        "num_accepted": sum(silo.standing in ("accepted", "carried") for silo in planned_silos),
        "verdict_tones": _VERDICT_TONES,
        "shortened": _shortened,
        "when": lambda at: relative_time(at, status.at),
    }


def status_text(status: FederationStatus, *, show_all: bool = False) -> str:
    """Format a status for a terminal.

    Args:
        status: the status of the federation.
        show_all: list every silo, even if many have the same standing.
    """
    running = "running" if status.processes.running else "not running"
    lines = [f"{status.federation} at {status.address}, {running}; plan {status.plan_id or 'none'}"]
    groups = groups_of(status, show_all=show_all)
    rows = []
    answers = []
    for group in groups:
        for silo in group.shown:
            labels = labels_of(silo, status.at)
            rows.append(
                (silo.silo_id, labels.label, labels.reported, labels.last_seen, labels.arriving)
            )
            for submission in silo.submissions:
                answers.append(f"  {silo.silo_id}: {_answer(submission)}")
        if group.num_hidden:
            label = STANDINGS[group.standing].label
            rows.append((f"and {group.num_hidden} more", label, "", "", ""))
    if rows:
        lines.append(_summary(status))
        lines += ["", table(rows, ("silo", "status", "reports", "last seen", "arriving"))]
    if any(group.num_hidden for group in groups):
        lines += ["", "Long lists are shortened; --all lists every silo."]
    if answers:
        lines += ["", "Submissions", *answers]
    lines += ["", *_federation_lines(status)]
    points = list(attention_points(status, show_all=show_all))
    if points:
        lines += ["", "Needs attention", *(f"  {text}" for text in points)]
    return "\n".join(lines)


def _summary(status: FederationStatus) -> str:
    """Count the silos, and those that need a person."""
    num_silos = len(status.silos)
    parts = [f"{num_silos} silo" if num_silos == 1 else f"{num_silos} silos"]
    num_here = sum(silo.person == "aggregator" for silo in status.silos)
    num_there = sum(silo.person == "silo" for silo in status.silos)
    if num_here:
        parts.append(f"{num_here} for you to decide")
    if num_there:
        parts.append(f"{num_there} waiting for a person at the silo")
    return "; ".join(parts)


def _reported(silo: SiloStatus) -> str:
    """Repeat what a silo reported last: its state, how far it is in training, and what keeps it from going on."""
    text = silo.state.replace("_", " ")
    if silo.state == "training":
        text += f" {silo.progress}%"
    if silo.code:
        text += f", code {silo.code}"
    return text


def _federation_lines(status: FederationStatus) -> Iterator[str]:
    router = "not trained"
    if status.router is not None:
        router = f"{status.router.family}, trained on {_shortened(status.router.silos)}"
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
        yield f"processes  {', '.join(programs) or 'starting'}; {status.processes.num_restarts} restarts"
    yield f"disk       {human_bytes(status.disk_free_bytes)} free"
    if status.expiries:
        earliest = status.expiries[0]
        yield f"expires    {earliest.what} {relative_time(earliest.at, status.at)}"
