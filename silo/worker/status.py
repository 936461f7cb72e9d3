"""How far a site's work is: what is done, what goes on, what comes next, and the command to type for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddm.io.locks import is_locked
from ddm.protocol.base import now_utc
from ddm.system.console import human_seconds
from silo.config import Site
from silo.worker.approval import approval_path
from silo.worker.pause import Request, halted, paused
from silo.worker.progress import NOTE_S, Note, read_note
from silo.worker.state import State, StateName, load_state, state_path

_OLD_S = 15 * NOTE_S  # a note of a step that takes longer is not of now
_WORK: tuple[StateName, ...] = ("plan_accepted", "scanned", "assigned", "training", "audited", "released")
# What was done when a state is entered, what goes on in it, and what follows.
_DONE: Mapping[StateName, str] = {
    "scanned": "images read and counted",
    "assigned": "images assigned to public clusters",
    "audited": "experts trained, leak audit",
    "released": "statistics drawn and debited",
}
_NOW: Mapping[StateName, str] = {
    "waiting": "waits for a plan",
    "plan_refused": "the plan was refused; waits for another one",
    "plan_accepted": "looks through the images",
    "scanned": "assigns images to public clusters, and encodes them where the plan says so",
    "assigned": "prepares the training",
    "training": "trains",
    "audited": "draws the statistics",
    "released": "drafts the submission",
    "awaiting_approval": "a submission waits for a person; nothing leaves before",
    "in_outbox": "sends the submission, and waits for the aggregator's receipt",
    "accepted": "the aggregator accepted the submission",
    "refused": "the aggregator refused the submission",
    "withdrawn": "the plan was given up",
}
_STAGES = ("images", "clusters", "training", "audit", "statistics", "approval", "receipt")
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
class Status:
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
    """

    silo_id: str
    folder: str
    state: State
    running: bool
    halted: bool
    pause: Request | None
    approved: bool
    note: Note | None

    @property
    def next_command(self) -> str | None:
        """What the operator types next; None where the work goes on by itself."""
        state, name = self.state, self.folder
        if self.pause is not None:
            return f"silo resume {name}"
        if state.state == "awaiting_approval" and not self.approved:
            return f"silo review {name}"
        return None if self.running else f"silo run {name}"

    def as_json(self) -> dict[str, object]:
        """Return everything for scripts: the state's own fields, and what else is known here."""
        pause = {"at": _iso(self.pause.at), "by": self.pause.by} if self.pause else None
        note = self.note.model_dump(mode="json", exclude={"format", "plan_id"}) if self.note else None
        beside = {
            "running": self.running,
            "halted": self.halted,
            "paused": pause,
            "progress": note,
            "next": self.next_command,
        }
        return self.state.model_dump(mode="json", exclude={"format"}) | beside

    def text(self) -> str:
        """Describe it in a few lines."""
        state = self.state
        lines = [f"{self.silo_id}: {state.state}" + (f", plan {state.plan_id}" if state.plan_id else "")]
        if self.pause:
            stops = "stops at its next step, asked" if self.running and not self.halted else "paused since"
            lines.append(f"  {stops} {self.pause.since}")
        if done := [words for name, words in _DONE.items() if _reached(state.state, name)]:
            lines.append(f"  done     {'; '.join(done)}")
        if not self.pause:
            lines.append(f"  now      {_NOW[state.state] if self.running or state.state not in _WORK else 'nothing'}")
        if state.state == "training":
            lines.append(f"  step     {_steps(state, self.note)}")
        elif self.note:
            lines.append(f"  {self.note.stage}: {_counted(self.note)}")
        if state.submission_digest:
            lines.append(f"  submission {state.sequence}, digest {state.submission_digest}")
        if state.state in _AHEAD:
            lines.append(f"  ahead    {', '.join(_STAGES[_AHEAD[state.state] :])}")
        if not self.running and not self.pause:
            lines.append("  no worker is at work")
        if state.problem:
            lines.append(f"  problem (code {state.problem.code}): {state.problem.message}")
        lines.append(f"  to do    {self.next_command or 'nothing: keep `silo run` running'}")
        return "\n".join(lines)


def look(site: Site) -> Status:
    """Look at a site; opens no key and changes nothing.

    Raises:
        DocumentError: the state is damaged.
    """
    state, running = load_state(state_path(site.private)), is_locked(site.private, "worker")
    pause, note = paused(site), read_note(site.private)
    # What an earlier stage, plan or process left behind says nothing about now.
    at_work = running and state.state in _WORK and note is not None and note.plan_id == state.plan_id
    fresh = at_work and note is not None and (now_utc() - note.at).total_seconds() <= _OLD_S
    ours = note is not None and (note.stage == "training") == (state.state == "training")
    return Status(
        site.settings().silo_id,
        str(site.path),
        state,
        running=running,
        halted=halted(site),
        pause=pause,
        approved=approval_path(site).exists(),
        note=note if fresh and ours else None,
    )


def _reached(state: StateName, name: StateName) -> bool:
    return state in _WORK and _WORK.index(name) <= _WORK.index(state)


def _steps(state: State, note: Note | None) -> str:
    if note is None:
        return f"{state.step} of {state.num_steps}"
    loss = f", loss {note.loss:.4g}" if note.loss is not None else ""
    return _counted(note) + loss


def _counted(note: Note) -> str:
    part = f" ({100 * note.done // note.total}%)" if note.total else ""
    speed = f", {note.images_per_s:.3g} images/s" if note.images_per_s else ""
    left = f", {human_seconds(note.seconds_left)} left" if note.seconds_left is not None else ""
    return f"{note.done} of {note.total}{part}{speed}{left}"


def _iso(at: object) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
