"""Starts a job by one command, and follows it through the job's folder: its progress, whether it continues, its end.

The command is `ddm.training.local` or the operator's: `srun`, `sbatch`, `kubectl`. It is started as words that no
shell reads, and inherits no descriptor of this process. The local command runs under a guard and ends with this
process. The operator's leads a session of its own, so neither Ctrl-C nor the end of this process reaches it, and a
later process finds it by what `launch.json` says.

Anybody who follows a start looks at nothing but the folder and the command, so a later process follows as well as the
one that made the start. Clocks of other machines are not trusted: a sign of life counts when it changes.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddm.errors import ArchipelagoError, SetupError
from ddm.system.processes import NEUTRAL_FOLDER, Child, DetachedProgram, file_tail, spawn
from ddm.system.signals import blocked
from ddm.training.config import TrainingSettings, filled
from ddm.training.job import (
    LAUNCH_VARIABLE,
    Heartbeat,
    JobFolder,
    Launch,
    ProcessFailure,
    RunFolder,
    TrainingResult,
    read_document,
    write_document,
)
from ddm.training.local import local_command
from ddm.training.progress import Progress

# Between two looks at a folder of this machine, and at one that may be on a network.
_LOCAL_POLL_S = 0.1
_SHARED_POLL_S = 0.5
# Without a sign of life, after a command has failed or the first process said that it ends.
STILL_S = 15.0
# For a job that was asked to stop to write a checkpoint of 50 GB; one that has not begun has none to write.
_STOP_S = 900.0
_STOP_UNBEGUN_S = 2.0
# For processes to end after the result was written, and for a command to end what it started elsewhere.
_EXIT_S = 30.0
# No signal but SIGKILL reaches local processes, so that the guard need not wait for its polite ones.
_GUARD_GRACE_S = 0.0

CommandCondition = Literal["running", "well", "badly", "unknown"]
StartVerdict = Literal["wait", "ended", "lost"]


class LaunchCommand:
    """The command that started a job's processes, as far as this machine sees it.

    Args:
        launch: the start that it belongs to.
        program: the command's process: a `Child` where it ends with this process.
        scratch: where it keeps files for the time that it runs.
    """

    def __init__(
        self,
        launch: Launch,
        program: Child | DetachedProgram,
        scratch: "tempfile.TemporaryDirectory[str] | None" = None,
    ) -> None:
        self._launch = launch
        self._program = program
        self._scratch = scratch

    @classmethod
    def of_earlier(cls, launch: Launch) -> "LaunchCommand":
        """Find the command that an earlier process started, on this machine or on another one."""
        ticks = launch.started
        if launch.host != socket.gethostname()[:255]:
            # The id is another machine's: no process of this one is taken for it.
            ticks = 0
        return cls(launch, DetachedProgram(launch.pid, ticks))

    @property
    def is_local(self) -> bool:
        """Whether all processes are of this machine, and end with the command."""
        return isinstance(self._program, Child)

    @property
    def returncode(self) -> int | None:
        """Its exit code, once it is known."""
        # An earlier process waited for the command and wrote this down; the process itself is gone.
        if self._launch.returned is not None:
            return self._launch.returned
        return self._program.returncode

    def condition(self) -> CommandCondition:
        """Whether it runs, or how it ended."""
        code = self.returncode
        if code is not None:
            return "badly" if code else "well"
        if self._program.running():
            return "running"
        # An earlier process started it, and nobody waited for its end.
        return "unknown"

    def wait(self, timeout_s: float) -> None:
        """Wait at most this long for its end."""
        self._program.wait(timeout_s)

    def end(self) -> None:
        """End it, and with it what it can end: local processes at once, and srun its job."""
        if isinstance(self._program, Child):
            self._program.kill()
        else:
            self._program.terminate(_EXIT_S)
        if self._scratch is not None:
            self._scratch.cleanup()


def start_local(folder: JobFolder, launch: Launch, num: int, threads: int) -> LaunchCommand:
    """Start several processes of this machine, which end with this process.

    Args:
        folder: the job's.
        launch: the start.
        num: how many processes.
        threads: the number of threads of each.
    """
    # Processes that are killed remove nothing, so this one removes the folder of their temporary files.
    scratch = tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True)
    try:
        # This process alone receives signals, and stops the others through the folder.
        with blocked():
            child = spawn(
                local_command(folder.path, launch.launch_id, num, threads),
                log_path=folder.run(launch.launch_id).command_log,
                env=os.environ | {"TMPDIR": scratch.name},
                cwd=NEUTRAL_FOLDER,
                grace_s=_GUARD_GRACE_S,
            )
    except BaseException:
        scratch.cleanup()
        raise
    return LaunchCommand(launch, child, scratch)


def start_command(
    settings: TrainingSettings, folder: JobFolder, launch: Launch
) -> tuple[Launch, LaunchCommand]:
    """Start the operator's command, and return the start with the command's process.

    Raises:
        SetupError: there is no such program.
    """
    values = {
        "folder": str(folder.path),
        "launch": launch.launch_id,
        # A number, or "auto".
        "processes": str(settings.processes),
        "python": sys.executable,
    }
    program, *arguments = filled(tuple(settings.launcher), values)
    program_path = shutil.which(program)
    if program_path is None:
        raise SetupError(
            "training.launcher",
            expected="a program on this machine",
            got=f"{program}, which is not found",
            remedy="Install it, or give its whole path in silo.toml; the worker's service has a PATH of its own.",
        )
    # Python imports nothing from its working folder, in every process that inherits the environment.
    environment = os.environ | {LAUNCH_VARIABLE: launch.launch_id, "PYTHONSAFEPATH": "1"}
    process = DetachedProgram.start(
        # A path that was relative to this process's working folder is none to the command's.
        [str(Path(program_path).absolute()), *arguments],
        log_path=folder.run(launch.launch_id).command_log,
        env=environment,
        cwd=NEUTRAL_FOLDER,
    )
    known = launch.model_copy(update={"pid": process.pid, "started": process.ticks})
    return known, LaunchCommand(known, process)


@dataclass(frozen=True)
class StartStatus:
    """What is known of a start at one moment.

    Attributes:
        condition: the condition of its command.
        is_alive: whether it ever gave a sign of life.
        has_ended: whether its first process said that it ends.
        silent_s: since its last sign of life, or since somebody looks for one.
        is_local: whether all processes are of this machine, and end with the command.
    """

    condition: CommandCondition
    is_alive: bool
    has_ended: bool
    silent_s: float
    is_local: bool


def judge(status: StartStatus, settings: TrainingSettings) -> StartVerdict:
    """Say whether a start without a result continues, has ended, or was lost; in doubt it continues.

    Taking a living start for a dead one would begin a second one beside it; taking a dead one for a living one costs
    time only.
    """
    is_silent = status.silent_s >= settings.silence_s
    if status.is_local:
        if status.condition != "running":
            return "ended"
        if status.is_alive and is_silent:
            return "lost"
        # It may still import torch, on a slow disk.
        return "wait"
    if status.has_ended or status.condition == "badly":
        # Schedulers start again what has ended, and the connection to a scheduler may be all that failed.
        is_over = status.has_ended and status.condition in ("well", "badly")
        if is_over or not status.is_alive or status.silent_s >= STILL_S:
            return "ended"
        return "wait"
    if status.is_alive and is_silent:
        return "lost"
    if status.is_alive or status.condition == "running":
        # One that never gave a sign of life may be srun, which waits in its queue.
        return "wait"
    if status.condition == "well":
        # sbatch has returned, and its job waits in the queue.
        is_silent = status.silent_s >= settings.start_s
    return "lost" if is_silent else "wait"


class StartFollower:
    """Follows one start.

    Args:
        folder: the job's.
        launch: the start.
        command: the command that made it.
        settings: the site's.
    """

    def __init__(
        self, folder: JobFolder, launch: Launch, command: LaunchCommand, settings: TrainingSettings
    ) -> None:
        self.folder = folder
        self.launch = launch
        self.command = command
        self._settings = settings
        self._heartbeat: Heartbeat | None = None
        self._reported_step = 0
        self._changed_at = time.monotonic()
        self._stopped_at: float | None = None

    @property
    def run(self) -> RunFolder:
        """The folder of the start."""
        return self.folder.run(self.launch.launch_id)

    def follow(
        self, work: str, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> TrainingResult | None:
        """Wait for the start's end.

        Args:
            work: what is trained, which the result must name.
            on_progress: called with the latest progress; what it raises stops the job, without waiting for it.
            should_stop: once it returns true the job is asked to stop, and this returns when it has.

        Returns:
            The result; None where the start died, or was lost, in a way that another start may repair.

        Raises:
            KeyboardInterrupt: the job was stopped.
            ArchipelagoError, OSError: what a process raised; a `SetupError` where a local one died.
        """
        try:
            while True:
                self._report_progress(on_progress)
                # Looked for before anything else: a start with a result has succeeded, however its command and
                # processes end.
                result = finished(self.folder, work)
                if result is not None:
                    self._report_progress(on_progress)
                    self.command.wait(_EXIT_S)
                    if self.command.is_local:
                        self.command.end()
                    return result
                if self._stopped_at is None and should_stop():
                    self._stopped_at = time.monotonic()
                    self.request_stop()
                verdict = judge(self._status(), self._settings)
                # The result is the last thing that is written, so it may have come since.
                if verdict != "wait" and finished(self.folder, work) is None:
                    self._end(verdict)
                    return None
                self._record_returncode()
                if self._has_stopped():
                    raise KeyboardInterrupt
                time.sleep(self._poll_s)
        except BaseException:
            self.request_stop()
            self.command.end()
            raise

    @property
    def _poll_s(self) -> float:
        if self.command.is_local:
            return _LOCAL_POLL_S
        return _SHARED_POLL_S

    def request_stop(self) -> None:
        """Let the job write a checkpoint and end, wherever it runs."""
        self.run.request_stop()

    def _report_progress(self, on_progress: Callable[[Progress], None]) -> None:
        heartbeat = read_document(Heartbeat, self.run.heartbeat)
        if heartbeat is None or heartbeat == self._heartbeat:
            return
        self._heartbeat = heartbeat
        self._changed_at = time.monotonic()
        if heartbeat.step > self._reported_step:
            self._reported_step = heartbeat.step
            on_progress(
                Progress(
                    heartbeat.step,
                    heartbeat.num_steps,
                    heartbeat.loss,
                    heartbeat.steps_per_second,
                    heartbeat.seconds,
                )
            )

    def _status(self) -> StartStatus:
        return StartStatus(
            condition=self.command.condition(),
            is_alive=self._heartbeat is not None,
            has_ended=self._heartbeat is not None and self._heartbeat.ended,
            silent_s=time.monotonic() - self._changed_at,
            is_local=self.command.is_local,
        )

    def _record_returncode(self) -> None:
        """Let a later process know that the command ended, and how."""
        code = self.command.returncode
        if not self.command.is_local and code is not None and self.launch.returned is None:
            # A process id says nothing once its process was collected, and anybody who follows next cannot ask for the
            # exit code.
            self.launch = self.launch.model_copy(update={"returned": code})
            write_document(self.launch, self.folder.launch)

    def _has_stopped(self) -> bool:
        """Whether a job that was asked to stop has; one that waits in a queue, or does not react, counts too."""
        if self._stopped_at is None or self.command.is_local:
            # A local command ends with its processes, so the verdict says it.
            return False
        asked_s = time.monotonic() - self._stopped_at
        if self._heartbeat is None:
            return asked_s >= _STOP_UNBEGUN_S
        return self._heartbeat.ended or asked_s >= _STOP_S

    def _end(self, verdict: StartVerdict) -> None:
        """Raise what ended the start; return where another start may repair it."""
        failures = self.run.failures()
        self.command.end()
        error = cause(failures, is_retried=not self.command.is_local)
        if error is not None:
            raise error
        if self._stopped_at is not None:
            raise KeyboardInterrupt
        if self.command.is_local and verdict == "lost":
            raise _vanished("training processes", "no sign of life")
        if self.command.is_local:
            raise _vanished("training processes", "no answer")


def cause(failures: Sequence[ProcessFailure], *, is_retried: bool) -> BaseException | None:
    """Return what ended a start: an error with a name, else a death, else what came first.

    That a neighbour has gone raises an error in the others, so such errors count only where nobody died.

    Args:
        failures: what was written about processes.
        is_retried: whether a death is answered by another start, and so is not an error.
    """
    named = [failure for failure in failures if failure.kind in ("ours", "system")]
    if named:
        return _as_error(named[0])
    if is_retried or not failures:
        return None
    for failure in failures:
        if failure.kind == "died":
            return _vanished(failure.process_name, f"its end: {failure.subject}")
    return RuntimeError(f"{failures[0].process_name}:\n{failures[0].subject}")


def finished(folder: JobFolder, work: str) -> TrainingResult | None:
    """Return the result of a job; None where there is none, or one of other work."""
    result = read_document(TrainingResult, folder.result)
    if result is None or result.work != work:
        return None
    return result


def futile_starts_error(run: RunFolder, num_starts: int) -> SetupError:
    """Return the error of a job that comes no further, however often it is started."""
    got = f"{num_starts} starts in a row that made no further step"
    last_line = _last_line(run)
    if last_line:
        got += f"; the last: {last_line}"
    return SetupError(
        "training.launcher",
        expected="a job that trains",
        got=got,
        remedy=f"Read the logs of the last start in {run.path}, and those of the scheduler. Correct "
        "the command in silo.toml, then run this again: it goes on from the last checkpoint.",
    )


def _last_line(run: RunFolder) -> str:
    """Return the end of what a command printed, for the person who has to correct it; it stays on this site."""
    lines = file_tail(run.command_log).strip().splitlines()
    return lines[-1][-200:] if lines else ""


def _vanished(subject: str, got: str) -> SetupError:
    return SetupError(
        subject,
        expected="its answer",
        got=got,
        remedy="Run the command again: it goes on from the last checkpoint. If nobody sent "
        "SIGKILL, the machine ran out of memory: fewer training.processes in silo.toml, or more training.accumulate.",
    )


def _as_error(failure: ProcessFailure) -> Exception:
    if failure.kind == "system":
        return OSError(failure.code, failure.subject)
    # The exit code is the one name of an error that is stable. A code that is unknown may be another version's.
    classes = {kind.exit_code: kind for kind in _with_subclasses(ArchipelagoError)}
    error_class = classes.get(failure.code, SetupError)
    return error_class(
        failure.subject, expected=failure.expected, got=failure.got, remedy=failure.remedy
    )


def _with_subclasses(kind: type[ArchipelagoError]) -> list[type[ArchipelagoError]]:
    classes = [kind]
    for subclass in kind.__subclasses__():
        classes += _with_subclasses(subclass)
    return classes
