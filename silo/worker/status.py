"""How far a site's work is: what is done, what goes on, what comes next, and the command to type for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.errors import ArchipelagoError
from ddm.io.locks import is_locked
from ddm.protocol.base import now_utc
from ddm.system.console import human_seconds
from silo.audit.document import read_report
from silo.config import AUDIT_REPORT, Site
from silo.plan.consent import WaitingPlan, read_waiting
from silo.worker.approval import approval_path
from silo.worker.descriptions import state_lines
from silo.worker.pause import Pause, is_halted, present_pause
from silo.worker.progress import NOTE_S, ProgressNote, read_note
from silo.worker.state import State, StateName, present_state

_OLD_S = 15 * NOTE_S  # a note of a step that takes longer is not of now
_WORK: tuple[StateName, ...] = (
    "plan_accepted",
    "scanned",
    "assigned",
    "training",
    "audited",
    "released",
)
# What was done when a state is entered.
_DONE: Mapping[StateName, str] = {
    "scanned": "images read and counted",
    "assigned": "images assigned to public clusters",
    "audited": "experts trained, leak audit",
    "released": "statistics drawn and debited",
}
_STAGES = ("images", "clusters", "training", "audit", "statistics", "approval", "receipt")
_AUDITED: tuple[StateName, ...] = (
    "audited",
    "released",
    "awaiting_approval",
    "in_outbox",
    "accepted",
    "refused",
)
_AHEAD: Mapping[StateName, int] = {
    "plan_accepted": 1,
    "scanned": 2,
    "assigned": 2,
    "training": 3,
    "audited": 5,
    "released": 5,
    "awaiting_approval": 6,
}


@dataclass(frozen=True)
class SiteStatus:
    """A site at one moment. For its operator alone: it holds loss, speed and numbers of images.

    Attributes:
        silo_id: this silo.
        folder: the site's, as it was named.
        state: of the work.
        running: whether a worker is at work.
        halted: whether it has stopped for a pause.
        pause: that is in force.
        approved: whether a person's approval waits for the worker.
        note: of the present stage; None where there is no fresh one.
        waiting: a plan that waits for a person.
        audit: what the leak audit of the plan in work found: its verdict and the reason; None before it did.
    """

    silo_id: str
    folder: str
    state: State
    running: bool
    halted: bool
    pause: Pause | None
    approved: bool
    note: ProgressNote | None
    waiting: WaitingPlan | None
    audit: tuple[str, str] | None

    @property
    def next_command(self) -> str | None:
        """What the operator types next; None where the work goes on by itself."""
        state, name = self.state, self.folder
        if self.pause is not None:
            return f"silo resume {name}"
        if self.waiting:
            return f"silo accept {name} --digest {self.waiting.plan_digest}"
        if state.state == "awaiting_approval" and not self.approved:
            return f"silo review {name}"
        return None if self.running else f"silo run {name}"

    @property
    def _beside(self) -> str | None:
        """What comes next, where the state alone does not tell."""
        if self.pause is not None:
            return f"to go on where it stopped: silo resume {self.folder}"
        if self.approved and self.state.state == "awaiting_approval":
            return f"approved; it leaves while `silo run {self.folder}` runs"
        return None

    def as_json(self) -> dict[str, object]:
        """Return everything for scripts: the state's own fields, and what else is known here."""
        pause = {"at": _iso(self.pause.at), "by": self.pause.by} if self.pause else None
        note = (
            self.note.model_dump(mode="json", exclude={"format", "plan_id"}) if self.note else None
        )
        beside = {
            "running": self.running,
            "halted": self.halted,
            "paused": pause,
            "progress": note,
            "audit": {"verdict": self.audit[0], "reason": self.audit[1]} if self.audit else None,
            "next": self.next_command,
        }
        return self.state.model_dump(mode="json", exclude={"format"}) | beside

    def text(self) -> str:
        """Describe it in a few lines."""
        state = self.state
        lines = [
            f"{self.silo_id}: {state.state}" + (f", plan {state.plan_id}" if state.plan_id else "")
        ]
        if self.pause:
            stops = (
                "stops at its next step, asked"
                if self.running and not self.halted
                else "paused since"
            )
            lines.append(f"  {stops} {self.pause.since}")
        if done := [words for name, words in _DONE.items() if _reached(state.state, name)]:
            lines.append(f"  done     {'; '.join(done)}")
        if state.state == "training" and not (self.note and self.note.stage == "auditing"):
            lines.append(f"  step     {_steps(state, self.note)}")
        elif self.note:
            lines.append(f"  {self.note.stage}: {_counted(self.note)}")
        if self.audit:
            lines.append(f"  leak audit: {self.audit[0]}: {self.audit[1]}")
        if state.submission_digest:
            lines.append(f"  submission {state.sequence}, digest {state.submission_digest}")
        if state.state in _AHEAD:
            lines.append(f"  ahead    {', '.join(_STAGES[_AHEAD[state.state] :])}")
        if self.waiting:
            lines.append(
                f"  plan {self.waiting.plan_id} waits for a person; it brings {self.waiting.in_words}:"
            )
            lines.append(f"    silo accept {self.folder} --digest {self.waiting.plan_digest}")
        if not self.running and not self.pause:
            lines.append("  no worker is at work")
        lines += state_lines(state, self.folder, self._beside)
        return "\n".join(lines)


def read_status(site: Site) -> SiteStatus:
    """Look at a site; opens no key and changes nothing.

    Raises:
        DocumentError: the state is damaged.
    """
    state, running = present_state(site), is_locked(site.private, "worker")
    pause, note = present_pause(site), read_note(site.private)
    # What an earlier stage, plan or process left behind says nothing about now.
    at_work = (
        running and state.state in _WORK and note is not None and note.plan_id == state.plan_id
    )
    fresh = at_work and note is not None and (now_utc() - note.at).total_seconds() <= _OLD_S
    ours = note is not None and (note.stage in ("training", "auditing")) == (
        state.state == "training"
    )
    return SiteStatus(
        site.settings().silo_id,
        str(site.path),
        state,
        running=running,
        halted=is_halted(site),
        pause=pause,
        approved=approval_path(site).exists(),
        note=note if fresh and ours else None,
        waiting=read_waiting(site),
        audit=_audit(site, state),
    )


def _audit(site: Site, state: State) -> tuple[str, str] | None:
    """Read what the audit found; nothing where the plan is gone or the report cannot be read."""
    if state.plan_id is None or state.state not in _AUDITED:
        return None
    try:
        report = read_report(site.work_folder(state.plan_id) / AUDIT_REPORT)
    except (ArchipelagoError, OSError):
        return None
    return report.verdict, report.reason


def _reached(state: StateName, name: StateName) -> bool:
    return state in _WORK and _WORK.index(name) <= _WORK.index(state)


def _steps(state: State, note: ProgressNote | None) -> str:
    if note is None:
        return f"{state.step} of {state.num_steps}"
    loss = f", loss {note.loss:.4g}" if note.loss is not None else ""
    return _counted(note) + loss


def _counted(note: ProgressNote) -> str:
    part = f" ({100 * note.done // note.total}%)" if note.total else ""
    speed = f", {note.images_per_s:.3g} images/s" if note.images_per_s else ""
    left = f", {human_seconds(note.seconds_left)} left" if note.seconds_left is not None else ""
    return f"{note.done} of {note.total}{part}{speed}{left}"


def _iso(at: object) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
