"""What each process of a job does: train its part, and leave signs of life, an end, a result.

Every process reads the folder alone. The first one also writes every few seconds that it is alive, checks whether it
is to stop or another start has taken its place, and holds the folder's lock as long as it writes.
"""

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from types import TracebackType

import torch

from ddm.errors import ArchipelagoError, BusyError, SetupError, UnsafePathError
from ddm.images.rows import Images
from ddm.io.locks import locked
from ddm.io.own_folder import require_own_folder
from ddm.protocol.base import File
from ddm.protocol.submission import MAX_LOSS
from ddm.system.console import say
from ddm.system.cores import default_threads
from ddm.training.group import (
    PATIENCE_S,
    Member,
    enter_group_environment,
    join_group,
    member_of,
)
from ddm.training.inputs import open_input
from ddm.training.job import (
    EXIT_STOPPED,
    MAX_TEXT,
    Heartbeat,
    JobFolder,
    Launch,
    ProcessFailure,
    RunFolder,
    TrainingJob,
    TrainingResult,
    read_document,
    work_of,
    write_document,
    write_transient,
)
from ddm.training.metrics import MetricsRecorder
from ddm.training.planned import BaseExpert, PlannedExpert
from ddm.training.progress import Progress

# The start of a job that no worker follows.
BY_HAND = "byhand"
_EXIT_BROKEN = 1
# Between two signs of life, and between two looks at what a follower wrote.
_HEARTBEAT_S = 2.0
_LOOK_S = 0.25
# For an earlier start's first process to end.
_LOCK_S = 60.0


def train_folder(folder: JobFolder, launch_id: str | None, stop: threading.Event) -> int:
    """Do this process's part of the job, and return the exit code with which it ends.

    Args:
        folder: the job's.
        launch_id: the start that it belongs to; None where nobody said.
        stop: once it is set, the process writes a checkpoint and ends.
    """
    # Before anything in the folder is believed or written: other users of the machine, or of the file system that
    # several machines see, may have made it.
    if os.path.lexists(folder.path):
        try:
            require_own_folder(folder.path)
        except UnsafePathError as error:
            _print(_failure_of(Member(rank=0, num=1, local_rank=0, on_one_machine=True), error))
            return error.exit_code
    # The operator's command need not pass {launch} on; a scheduler may also drop the environment.
    if launch_id is None:
        launch = read_document(Launch, folder.launch)
        launch_id = launch.launch_id if launch else BY_HAND
    run = folder.run(launch_id)
    member = Member(rank=0, num=1, local_rank=0, on_one_machine=True)
    try:
        member = member_of(os.environ)
        if member.rank == 0:
            with _HeartbeatThread(folder, launch_id, stop) as heartbeats:
                _train(folder, run, member, heartbeats.note, stop)
        else:
            _train(folder, run, member, lambda progress: None, stop)
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception as error:
        failure = _failure_of(member, error)
        # Where the disk is full, the exit code has to suffice.
        with suppress(OSError):
            write_document(failure, run.failure(member.rank))
        _print(failure)
        return failure.code if failure.kind == "ours" else _EXIT_BROKEN
    return 0


def _train(
    folder: JobFolder,
    run: RunFolder,
    member: Member,
    on_progress: Callable[[Progress], None],
    stop: threading.Event,
) -> None:
    job, plan = folder.read_job()
    _check_number(job, member)
    torch.set_num_threads(job.engine.threads or default_threads())
    # torch and accelerate read from the environment which process this is.
    enter_group_environment(member)
    expert = PlannedExpert(
        plan,
        job.silo_id,
        job.number,
        BaseExpert(folder.path, job.base) if job.base else None,
        job.engine.model_copy(update={"processes": member.num}),
        stops=job.stops,
        paid=job.paid,
    )
    with ExitStack() as stack:
        stack.enter_context(_scratch())
        # The first process alone writes checkpoints and the expert.
        if member.rank == 0:
            # The others wait for it in `join_group` meanwhile.
            stack.enter_context(only_one(folder))
        if member.num > 1:
            join_group(member, run.path)
        inputs: dict[str, Images] = {"images": open_input(job.images, folder)}
        for name, array in (("labels", job.labels), ("units", job.units)):
            if array is not None:
                inputs[name] = open_input(array, folder)
        with _explained_timeouts(member):
            train_here(folder, expert, inputs, job.data, on_progress, stop.is_set)


def train_here(
    folder: JobFolder,
    expert: PlannedExpert,
    inputs: Mapping[str, Images],
    data: str,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train in this process, or this process's part, and write the expert and its result into the folder.

    Args:
        folder: the job's.
        expert: as the plan says.
        inputs: see `ddm.training.jobs.TrainingTask`, and so is `data`.
        data: the digest of whatever names the inputs.
        on_progress: called every few steps, once the learning curve has them; what it raises stops the training.
        should_stop: once it returns true the training stops after a checkpoint.

    Raises:
        KeyboardInterrupt, ArchipelagoError: see `ddm.training.loop.train`.
    """
    recorder = MetricsRecorder(folder.metrics)

    def record_and_report(progress: Progress) -> None:
        recorder.report(progress)
        on_progress(progress)

    trained = expert.train(
        inputs,
        folder.expert,
        folder.checkpoints,
        record_and_report,
        should_stop,
        secret=folder.secret,
    )
    # All processes trained; the first one gathered the weights and wrote them.
    if trained is None:
        # Another process writes the expert.
        return
    result = TrainingResult(
        work=work_of(expert.plan.digest, expert.silo_id, expert.number, data),
        steps=trained.steps,
        loss=min(trained.loss, MAX_LOSS),
        seconds=trained.seconds,
        flops=trained.flops,
        expert=File.of(folder.expert.name, folder.expert),
    )
    write_document(result, folder.result)


def _check_number(job: TrainingJob, member: Member) -> None:
    """Refuse to train beside others each of which would take itself for the only one.

    Raises:
        SetupError: not as many processes as the job requires.
    """
    num = job.engine.processes
    if isinstance(num, int) and num != member.num:
        raise SetupError(
            "training.processes",
            expected=f"{num} processes, as silo.toml says",
            got=f"{member.num}, as the launcher told this process",
            remedy="Set training.processes in silo.toml to the number that training.launcher starts, on all machines "
            'together, or "auto". srun and mpirun tell each process; for others, set RANK and WORLD_SIZE.',
        )


@contextmanager
def only_one(folder: JobFolder) -> Iterator[None]:
    """Hold the folder's lock; an earlier start's first process gets a moment to end.

    Raises:
        BusyError: it does not.
    """
    deadline = time.monotonic() + _LOCK_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder.path, "training"))
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
        yield


@contextmanager
def _scratch() -> Iterator[None]:
    """Let torch and accelerate keep their files in a folder that is removed when the process ends by itself."""
    outer = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = outer


@contextmanager
def _explained_timeouts(member: Member) -> Iterator[None]:
    """Turn torch's timeout into an error that says who waited for whom."""
    try:
        yield
    except RuntimeError as error:
        if "Timed out waiting" not in str(error):
            raise
        raise SetupError(
            member.name,
            expected=f"an answer of the other processes within {PATIENCE_S:.0f} s",
            got="no answer from at least one of them",
            remedy="One of them hangs or was stopped. Run the command again: it goes on from the last checkpoint.",
        ) from error


class _HeartbeatThread:
    """Writes the first process's signs of life, and stops the training where the folder says so.

    A thread of its own does both, because one step may take longer than a sign of life may stay away.

    Args:
        folder: the job's.
        launch_id: the start.
        stop: set once the training is to stop.
    """

    def __init__(self, folder: JobFolder, launch_id: str, stop: threading.Event) -> None:
        self._folder = folder
        self._run = folder.run(launch_id)
        self._launch_id = launch_id
        self._stop = stop
        self._count = 0
        self._progress: Progress | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> "_HeartbeatThread":
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        # The thread has written its last, so that nothing overwrites the sign of life that says it is the end.
        self._thread.join()
        self._write(ended=True)

    def note(self, progress: Progress) -> None:
        """Let the next sign of life report this progress."""
        self._progress = progress

    def _write(self, *, ended: bool = False) -> None:
        self._count += 1
        heartbeat = Heartbeat(count=self._count, ended=ended)
        if self._progress is not None:
            fields = asdict(self._progress)
            # The learning curve has these, in a file of its own.
            del fields["interval"]
            fields["loss"] = min(self._progress.loss, MAX_LOSS)
            heartbeat = heartbeat.model_copy(update=fields)
        # A file system that refuses one may take the next.
        with suppress(OSError):
            write_transient(heartbeat, self._run.heartbeat)

    def _check_stop(self) -> None:
        """Stop where the follower requests it, has begun another start, or has removed the folder."""
        launch = read_document(Launch, self._folder.launch)
        # A process that a person started follows no launch, and none takes its place.
        is_replaced = launch is not None and self._launch_id not in (launch.launch_id, BY_HAND)
        if is_replaced or self._run.stop.exists() or not self._folder.job.exists():
            self._stop.set()

    def _keep(self) -> None:
        """Write, and check for a stop, until the training is over."""
        written_progress = self._progress
        written_at = time.monotonic()
        while not self._is_over.wait(_LOOK_S):
            self._check_stop()
            is_due = time.monotonic() - written_at >= _HEARTBEAT_S
            if is_due or self._progress is not written_progress:
                written_progress = self._progress
                written_at = time.monotonic()
                self._write()


def _failure_of(member: Member, error: Exception) -> ProcessFailure:
    failure = ProcessFailure(
        rank=member.rank, num_processes=member.num, kind="other", subject=_text(str(error))
    )
    if isinstance(error, ArchipelagoError):
        fields = {
            "kind": "ours",
            "code": error.exit_code,
            "subject": _text(error.subject),
            "expected": _text(error.expected) or None,
            "got": _text(error.got) or None,
            "remedy": _text(error.remedy) or None,
        }
    elif isinstance(error, OSError) and error.errno is not None:
        fields = {"kind": "system", "code": error.errno, "subject": _text(error.strerror)}
    else:
        fields = {"subject": traceback.format_exc()[-MAX_TEXT:]}
    return failure.model_copy(update=fields)


def _text(text: str | None) -> str:
    return (text or "")[:MAX_TEXT]


def _print(failure: ProcessFailure) -> None:
    say(f"error: {failure.subject}", error=True)
    for name, text in (
        ("expected", failure.expected),
        ("found", failure.got),
        ("to do", failure.remedy),
    ):
        if text:
            say(f"  {name + ':':<9} {text}", error=True)
