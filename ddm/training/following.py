"""Follows a start of a job through its folder: how far it is, whether it goes on, how it ended.

Nothing but the folder and the condition of what was started is looked at, so that a process that comes later follows
as well as the one that started it. Clocks of other machines are not believed: a sign of life counts when it changes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddm.errors import ArchipelagoError, SetupError
from ddm.training.config import TrainingSettings
from ddm.training.group import process_name
from ddm.training.job import (
    Heartbeat,
    JobFolder,
    Launch,
    ProcessFailure,
    RunFolder,
    TrainingResult,
    read_document,
    write_document,
)
from ddm.training.launcher import Command, Condition, Started, last_line, wait_for_exit
from ddm.training.loop import Progress

POLL_S = {"processes": 0.1, "command": 0.5}  # between two looks
STILL_S = 15.0  # without a sign of life, after a command has failed or the first process said that it ends
_GRACE_S = (
    2.0  # for the cause of an error to be written, where what is known first may be its consequence
)
_STOP_S = 900.0  # for a checkpoint of 50 GB, after a job was asked to stop
_EXIT_S = 30.0  # for processes to end after the result is there
Verdict = Literal["wait", "ended", "lost"]


@dataclass(frozen=True)
class Signs:
    """What is known of a start at one moment.

    Attributes:
        condition: of what was started here.
        alive: whether it ever gave a sign of life.
        ended: whether its first process said that it ends.
        silent_s: since its last sign of life, or since somebody looks for one.
        ours: whether this machine runs all of its processes itself.
    """

    condition: Condition
    alive: bool
    ended: bool
    silent_s: float
    ours: bool


def judge(signs: Signs, settings: TrainingSettings) -> Verdict:
    """Say whether a start without a result goes on, has ended, or was lost; in doubt it goes on.

    Whoever takes a living start for a dead one begins a second beside it; who takes a dead one for a living one waits.
    """
    if signs.ours:
        if signs.condition == "running":
            return "lost" if signs.alive and signs.silent_s >= settings.silence_s else "wait"
        return "ended"
    if signs.ended or signs.condition == "badly":
        # torchrun and schedulers start again what has ended, and the connection to a scheduler may be all that failed.
        over = (signs.ended and signs.condition in ("well", "badly")) or not signs.alive
        return "ended" if over or signs.silent_s >= STILL_S else "wait"
    if signs.alive:
        return "lost" if signs.silent_s >= settings.silence_s else "wait"
    if signs.condition == "running":  # srun waits in its queue
        return "wait"
    patience_s = settings.start_s if signs.condition == "well" else settings.silence_s
    return "lost" if signs.silent_s >= patience_s else "wait"


@dataclass
class Follower:
    """Follows one start.

    Attributes:
        folder: the job's.
        launch: the start.
        started: its processes, or the command that started them.
        settings: the site's.
        num: how many processes there are; 0 where nobody here knows.
    """

    folder: JobFolder
    launch: Launch
    started: Started
    settings: TrainingSettings
    num: int = 0
    _beat: Heartbeat | None = None
    _told: int = 0
    _changed: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> RunFolder:
        """The folder of the start."""
        return self.folder.run(self.launch.launch_id)

    @property
    def step(self) -> int:
        """How far it came."""
        return self._beat.step if self._beat else 0

    def follow(
        self, work: str, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> TrainingResult | None:
        """Wait for the start's end.

        Args:
            work: what is trained, which the result must name.
            on_progress: called with the latest progress; what it raises stops the job, without waiting for it.
            should_stop: its yes asks the job to stop, and is obeyed once it has.

        Returns:
            The result; None where the start died, or was lost, in a way that another start may mend.

        Raises:
            KeyboardInterrupt: the job was stopped.
            ArchipelagoError, OSError: what a process raised; a `SetupError` where one of this machine's died.
        """
        stopped_at: float | None = None
        try:
            while True:
                self._look(on_progress)
                if (result := finished(self.folder, work)) is not None:
                    self._look(on_progress)
                    wait_for_exit(self.started, _EXIT_S)
                    if self.launch.by == "processes":
                        self.started.end()
                    return result
                if stopped_at is None and should_stop():
                    stopped_at = time.monotonic()
                    self.ask_to_stop()
                verdict = judge(self._signs(), self.settings)
                # the last thing before an end
                if verdict != "wait" and finished(self.folder, work) is None:
                    self._end(verdict, stopped=stopped_at is not None)
                    return None
                self._note_return()
                if stopped_at is not None and self._has_stopped(stopped_at):
                    raise KeyboardInterrupt
                time.sleep(POLL_S[self.launch.by])
        except BaseException:
            self.ask_to_stop()
            self.started.end()
            raise

    def ask_to_stop(self) -> None:
        """Let the job write a checkpoint and end, wherever it runs."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        self.run.stop.touch()

    def _look(self, on_progress: Callable[[Progress], None]) -> None:
        beat = read_document(Heartbeat, self.run.beat)
        if beat is None or beat == self._beat:
            return
        self._beat, self._changed = beat, time.monotonic()
        if beat.step > self._told:
            self._told = beat.step
            on_progress(
                Progress(beat.step, beat.num_steps, beat.loss, beat.steps_per_second, beat.seconds)
            )

    def _signs(self) -> Signs:
        return Signs(
            condition=self.started.condition(),
            alive=self._beat is not None,
            ended=self._beat is not None and self._beat.ended,
            silent_s=time.monotonic() - self._changed,
            ours=self.launch.by == "processes",
        )

    def _note_return(self) -> None:
        """Let whoever follows later know that the command ended, and how."""
        code = self.started.returncode if isinstance(self.started, Command) else None
        if code is not None and self.launch.returned is None:
            self.launch = self.launch.model_copy(update={"returned": code})
            write_document(self.launch, self.folder.launch)

    def _has_stopped(self, since: float) -> bool:
        """Whether a job that was asked to stop has; one that waits in a queue, or hears nothing, is ended."""
        beat, asked_s = self._beat, time.monotonic() - since
        if self.launch.by == "processes":
            return False
        return (
            (beat is None and asked_s >= _GRACE_S)
            or (beat is not None and beat.ended)
            or asked_s >= _STOP_S
        )

    def _end(self, verdict: Verdict, *, stopped: bool) -> None:
        """Raise what ended the start; return where another start may mend it."""
        failures = self.run.failures()
        if (
            verdict == "ended"
            and self.launch.by == "processes"
            and not any(each.kind == "ours" for each in failures)
        ):
            time.sleep(_GRACE_S)
            failures = self.run.failures()
        deaths = self.started.deaths()
        self.started.end()
        if error := cause(failures, deaths, self.num, again=self.launch.by == "command"):
            raise error
        if stopped:
            raise KeyboardInterrupt
        if self.launch.by == "processes":
            raise _vanished("training processes", "no answer", verdict)


def cause(
    failures: Sequence[ProcessFailure], deaths: Sequence[str], num: int, *, again: bool
) -> BaseException | None:
    """Return what ended a start: an error of ours, else a death, else what came first.

    That a neighbour has gone raises an error in the others, so such errors count only where nobody died.

    Args:
        failures: what processes said.
        deaths: how those ended that said nothing.
        num: how many processes there are.
        again: whether a death is answered by another start, and so is no error.
    """
    if told := [each for each in failures if each.kind != "other"]:
        return _as_error(told[0])
    if again:
        return None
    if deaths:
        name, _, how = deaths[0].partition(": ")
        return _vanished(name, f"its end: {how}", "ended")
    if failures:
        return RuntimeError(f"{process_name(failures[0].rank, num)}:\n{failures[0].subject}")
    return None


def finished(folder: JobFolder, work: str) -> TrainingResult | None:
    """Return the result of a job; None where there is none, or one of other work."""
    result = read_document(TrainingResult, folder.result)
    return result if result is not None and result.work == work else None


def lost(run: RunFolder, num_starts: int) -> SetupError:
    """Return the error of a job that comes no further, however often it is started."""
    said = last_line(run)
    return SetupError(
        "training.launcher",
        expected="a job that trains",
        got=f"{num_starts} starts in a row that ended without a step further"
        + (f"; the last: {said}" if said else ""),
        remedy=f"Look into {run.path}, where the logs of the last start are, and into those of the scheduler. Mend the "
        "command in silo.toml, then run this again: it goes on from the last checkpoint.",
    )


def _vanished(name: str, got: str, verdict: Verdict) -> SetupError:
    return SetupError(
        name,
        expected="its answer",
        got=got if verdict == "ended" else "no sign of life",
        remedy="Run the command again: it goes on from the last checkpoint. SIGKILL without anybody's doing is a "
        "machine out of memory: fewer training.processes in silo.toml, or more training.accumulate.",
    )


def _as_error(failure: ProcessFailure) -> Exception:
    if failure.kind == "system":
        return OSError(failure.code, failure.subject)
    kinds = {each.exit_code: each for each in _all_errors(ArchipelagoError)}
    kind = kinds.get(failure.code, SetupError)
    return kind(failure.subject, expected=failure.expected, got=failure.got, remedy=failure.remedy)


def _all_errors(kind: type[ArchipelagoError]) -> list[type[ArchipelagoError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _all_errors(below))]
