"""How far a site's work is: what is done, what is in progress, what comes next, and the command to type for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ddm.errors import ArchipelagoError
from ddm.io.locks import is_locked
from ddm.protocol.base import now_utc
from ddm.system.console import human_bytes, human_seconds
from silo.audit.document import read_report
from silo.config import AUDIT_REPORT, Site
from silo.plan.consent import is_accepted, read_waiting
from silo.query_note import read_unnamed_plan
from silo.worker.approval import approval_path
from silo.worker.curves import ExpertCurve, read_curves
from silo.worker.descriptions import Circumstances, Situation, describe_site, situation_lines
from silo.worker.pause import Pause, is_halted, present_pause
from silo.worker.progress import NOTE_S, ProgressNote, Stage, read_note
from silo.worker.state import State, StateName, present_state, reported_code

# An older note was left by a process that stopped.
_MAX_NOTE_AGE_S = 15 * NOTE_S
_WORK: tuple[StateName, ...] = (
    "plan_accepted",
    "scanned",
    "assigned",
    "training",
    "auditing",
    "audited",
    "released",
)
# In these the experts of the plan, or their beginnings, are in its folder.
_WITH_CURVES: tuple[StateName, ...] = (
    "training",
    "auditing",
    "audited",
    "released",
    "awaiting_approval",
)
_BEFORE_TRAINING: tuple[StateName, ...] = ("plan_accepted", "scanned", "assigned")
_STATE_OF_STAGE: Mapping[Stage, StateName] = {
    "assigning images": "scanned",
    "encoding images": "scanned",
    "encoding captions": "scanned",
    "training": "training",
    "auditing": "auditing",
}
# What was done when a state is entered.
_DONE: Mapping[StateName, str] = {
    "scanned": "images read and counted",
    "assigned": "images assigned to public clusters",
    "auditing": "experts trained",
    "audited": "experts audited",
    "released": "statistics drawn and debited",
}
_STAGES = ("images", "clusters", "training", "audit", "statistics", "approval", "receipt")
_AUDITED: tuple[StateName, ...] = (
    "auditing",
    "audited",
    "released",
    "awaiting_approval",
    "in_outbox",
    "accepted",
    "refused",
)
# How many of `_STAGES` are over, or at work, in each state.
_NUM_STAGES_BEGUN: Mapping[StateName, int] = {
    "plan_accepted": 1,
    "scanned": 2,
    "assigned": 2,
    "training": 3,
    "auditing": 4,
    "audited": 5,
    "released": 5,
    "awaiting_approval": 6,
}


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of a plan's training on one device, and of its leak audit."""

    train_s: float
    audit_s: float


@dataclass(frozen=True)
class PlanEstimate:
    """What a plan will take at this site, estimated before its training begins.

    Attributes:
        memory_bytes: of a training step.
        disk_bytes: that the plan writes into `private/`, without the audit's files and transformed images.
        times: on this machine, and on named devices by their published rates.
    """

    memory_bytes: int
    disk_bytes: int
    times: Mapping[str, TrainingTime]

    def lines(self) -> list[str]:
        """Describe it, one thing a line."""
        lines = [
            "  before it trains, estimated:",
            f"    memory of a training step: {human_bytes(self.memory_bytes)}",
            f"    disk: {human_bytes(self.disk_bytes)}, without the audit's files and transformed images",
        ]
        for device, duration in self.times.items():
            line = f"    training on {device}: about {human_seconds(duration.train_s)}"
            if duration.audit_s:
                line += f", leak audit {human_seconds(duration.audit_s)}"
            lines.append(line)
        lines.append("    (named devices by published rates, not measured)")
        return lines


@dataclass(frozen=True)
class SiteStatus:
    """A site at one moment. For its operator alone: it holds loss, speed and numbers of images.

    Attributes:
        silo_id: this silo.
        folder: the site's, as it was named.
        state: the state of the work.
        circumstances: what decides about the next step besides the state.
        pause: the pause that is in force.
        note: the note of the present stage; None where there is no fresh one.
        audit: what the leak audit of the plan in progress found: its verdict and the reason; None before it did.
        curves: the learning curves of the plan in progress.
        estimate: of a plan whose training has not begun; None where nobody asked for it.
    """

    silo_id: str
    folder: str
    state: State
    circumstances: Circumstances
    pause: Pause | None
    note: ProgressNote | None
    audit: tuple[str, str] | None
    curves: tuple[ExpertCurve, ...] = ()
    estimate: PlanEstimate | None = None

    @property
    def plan_ahead(self) -> tuple[str, str] | None:
        """The plan whose training has not begun, by id and digest; None where there is none."""
        waiting_plan = self.circumstances.waiting_plan
        if waiting_plan is not None:
            return waiting_plan.plan_id, waiting_plan.plan_digest
        state = self.state
        if state.plan_id is None or state.plan_digest is None:
            return None
        if state.state not in _BEFORE_TRAINING:
            return None
        return state.plan_id, state.plan_digest

    @property
    def situation(self) -> Situation:
        """What is happening, what it needs, from whom, and what the operator types next."""
        return describe_site(self.state, self.circumstances, self.folder)

    @property
    def next_command(self) -> str | None:
        """What the operator types next; None where there is nothing to type."""
        commands = self.situation.commands
        return commands[0] if commands else None

    def as_json(self) -> dict[str, object]:
        """Return everything for scripts: the state's own fields, and what else is known here."""
        pause = None
        if self.pause is not None:
            pause = {"at": _iso(self.pause.at), "by": self.pause.by}
        progress = None
        if self.note is not None:
            progress = self.note.model_dump(mode="json", exclude={"format", "plan_id"})
        audit = None
        if self.audit is not None:
            verdict, reason = self.audit
            audit = {"verdict": verdict, "reason": reason}
        situation = self.situation
        return self.state.model_dump(mode="json", exclude={"format"}) | {
            "running": self.circumstances.running,
            "halted": self.circumstances.stopped_for_pause,
            "paused": pause,
            "progress": progress,
            "audit": audit,
            "curves": [curve.as_json() for curve in self.curves],
            "estimate": asdict(self.estimate) if self.estimate else None,
            "now": situation.now,
            "needs": situation.needs,
            "person": situation.person,
            "next": self.next_command,
        }

    def text(self, *, draws_bars: bool = False) -> str:
        """Describe it in a few lines.

        Args:
            draws_bars: whether learning curves are drawn too, for a person at a terminal.
        """
        state = self.state
        heading = f"{self.silo_id}: {state.state}"
        if state.plan_id:
            heading += f", plan {state.plan_id}"
        lines = [heading]
        lines += self._work_lines()
        lines += [f"  curve    {curve.line(draws_bars=draws_bars)}" for curve in self.curves]
        if self.estimate:
            lines += self.estimate.lines()
        lines += situation_lines(self.situation, state, self.circumstances)
        return "\n".join(lines)

    def _work_lines(self) -> list[str]:
        """Describe what was done for the plan, what is in progress, and what comes later."""
        state = self.state
        lines = []
        done_words = [words for name, words in _DONE.items() if _reached(state.state, name)]
        if done_words:
            lines.append(f"  done     {'; '.join(done_words)}")
        if state.state == "training" and (self.note is None or self.note.stage == "training"):
            lines.append(f"  step     {_steps(state, self.note)}")
        elif self.note is not None:
            lines.append(f"  {self.note.stage}: {_counted(self.note)}")
        if self.audit is not None:
            verdict, reason = self.audit
            lines.append(f"  leak audit: {verdict}: {reason}")
        if state.submission_digest:
            lines.append(f"  submission {state.sequence}, digest {state.submission_digest}")
        if state.state in _NUM_STAGES_BEGUN:
            stages_ahead = _STAGES[_NUM_STAGES_BEGUN[state.state] :]
            lines.append(f"  ahead    {', '.join(stages_ahead)}")
        return lines


def read_status(site: Site) -> SiteStatus:
    """Look at a site; opens no key and changes nothing.

    Raises:
        DocumentError: the state is damaged.
    """
    state = present_state(site)
    # A lock says who is at work: the system releases it however a process ends, so that none is left behind.
    running = is_locked(site.private, "worker")
    pause = present_pause(site)
    waiting_plan = read_waiting(site)
    # Accepted meanwhile: the worker takes it with its next look.
    if waiting_plan is not None and is_accepted(site, waiting_plan.plan_digest):
        waiting_plan = None
    circumstances = Circumstances(
        running=running,
        blocked=running and reported_code(site) != 0,
        pause=pause.since if pause else None,
        stopped_for_pause=is_halted(site),
        approved=approval_path(site).exists(),
        waiting_plan=waiting_plan,
        unnamed_plan=read_unnamed_plan(site.path),
    )
    return SiteStatus(
        silo_id=site.settings().silo_id,
        folder=str(site.path),
        state=state,
        circumstances=circumstances,
        pause=pause,
        # A worker that waits for a person left its last note behind.
        note=_present_note(site, state) if running and not circumstances.blocked else None,
        audit=_audit(site, state),
        curves=_curves(site, state),
    )


def _present_note(site: Site, state: State) -> ProgressNote | None:
    """Read the note of the present stage: what an earlier stage, plan or process left behind says nothing about now."""
    note = read_note(site.private)
    if note is None or state.state not in _WORK or note.plan_id != state.plan_id:
        return None
    is_fresh = (now_utc() - note.at).total_seconds() <= _MAX_NOTE_AGE_S
    # Images are read in every state, and what is read completely is over.
    is_being_read = note.stage == "reading images" and note.done < note.total
    if not is_fresh or not (is_being_read or _STATE_OF_STAGE.get(note.stage) == state.state):
        return None
    return note


def _audit(site: Site, state: State) -> tuple[str, str] | None:
    """Read what the audit found; nothing where the plan is gone or the report cannot be read."""
    if state.plan_id is None or state.state not in _AUDITED:
        return None
    # A status shows what can be read, also where something is damaged: it is what a person types first.
    try:
        report = read_report(site.work_folder(state.plan_id) / AUDIT_REPORT)
    except (ArchipelagoError, OSError):
        return None
    return report.verdict, report.reason


def _curves(site: Site, state: State) -> tuple[ExpertCurve, ...]:
    if state.plan_id is None or state.state not in _WITH_CURVES:
        return ()
    return read_curves(site, state.plan_id)


def _reached(state: StateName, name: StateName) -> bool:
    return state in _WORK and _WORK.index(name) <= _WORK.index(state)


def _steps(state: State, note: ProgressNote | None) -> str:
    if note is None:
        return f"{state.step} of {state.num_steps}"
    text = _counted(note)
    if note.loss is not None:
        text += f", loss {note.loss:.4g}"
    return text


def _counted(note: ProgressNote) -> str:
    text = f"{note.done} of {note.total}"
    if note.total:
        text += f" ({100 * note.done // note.total}%)"
    if note.images_per_s:
        text += f", {note.images_per_s:.3g} images/s"
    if note.seconds_left is not None:
        text += f", {human_seconds(note.seconds_left)} left"
    return text


def _iso(at: object) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
