"""What each process of a job does, whoever started it: train its part, and leave a sign of life, an end, a result.

Every process reads the folder alone. The first one also says every few seconds that it lives, looks whether it is to
stop or another start has taken its place, and holds the folder's lock as long as it writes.
"""

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from ddm.errors import ArchipelagoError, BusyError, SetupError
from ddm.images.rows import Images
from ddm.io.locks import locked
from ddm.protocol.base import File
from ddm.protocol.submission import MAX_LOSS
from ddm.training.group import PATIENCE_S, Member, join_group, member_of, torch_environment
from ddm.training.inputs import open_input
from ddm.training.job import (
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
from ddm.training.loop import Progress
from ddm.training.planned import BaseExpert, PlannedExpert

LAUNCH_VARIABLE = "ARCHIPELAGO_LAUNCH"
BY_HAND = "byhand"  # the start of a job that no worker follows
EXIT_STOPPED, EXIT_BROKEN = 130, 1
BEAT_S = 2.0  # between two signs of life
_LOOK_S = 0.25  # between two looks at what a follower wants
_LOCK_S = 60.0  # that an earlier start's first process may take to end


def train_folder(folder: JobFolder, asked: str | None, stop: threading.Event) -> int:
    """Do this process's part of the job, and return the exit code with which it ends.

    Args:
        folder: the job's.
        asked: the start that it belongs to; None where nobody said.
        stop: once it is set, the process writes a checkpoint and ends.
    """
    launch = read_document(Launch, folder.launch)
    launch_id = asked or (launch.launch_id if launch else BY_HAND)
    run, rank = folder.run(launch_id), 0
    try:
        member = member_of(os.environ)
        rank = member.rank
        with _signs_of_life(folder, run, launch_id, stop) if rank == 0 else _silence() as report:
            _train(folder, run, member, report, stop)
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception as error:
        failure = _failure(rank, error)
        with suppress(OSError):  # where the disk is full, the exit code has to do
            write_document(failure, run.failure(rank))
        _print(failure)
        return failure.code if failure.kind == "ours" else EXIT_BROKEN
    return 0


def _train(
    folder: JobFolder,
    run: RunFolder,
    member: Member,
    report: Callable[[Progress], None],
    stop: threading.Event,
) -> None:
    import torch

    job, plan = folder.read_job()
    _check_number(job, member)
    torch.set_num_threads(job.threads)
    os.environ |= torch_environment(member, os.environ)
    base = BaseExpert(folder.path, job.base) if job.base else None
    engine = job.engine.model_copy(update={"processes": member.num})
    expert = PlannedExpert(
        plan, job.silo_id, job.number, base, engine, stops=job.stops, paid=job.paid
    )
    with ExitStack() as stack:
        stack.enter_context(_scratch())
        if member.rank == 0:
            stack.enter_context(only_one(folder))
        if member.num > 1:
            join_group(member, run.path)
        inputs: dict[str, Images] = {"images": open_input(job.images, folder)}
        for name, given in (("labels", job.labels), ("units", job.units)):
            if given is not None:
                inputs[name] = open_input(given, folder)
        with _saying_who_waits(member):
            train_here(folder, expert, inputs, job.data, report, stop.is_set)


def train_here(
    folder: JobFolder,
    expert: PlannedExpert,
    inputs: Mapping[str, Images],
    data: str,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train in this process, or this process's part, and write the expert and its result into the folder.

    Raises:
        KeyboardInterrupt, ArchipelagoError: see `ddm.training.loop.train`.
    """
    trained = expert.train(
        inputs, folder.expert, folder.checkpoints, on_progress, should_stop, secret=folder.secret
    )
    if trained is None:  # another process has it
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
    """Refuse to train beside others who each believe to be alone.

    Raises:
        SetupError: not as many processes as the job asks for.
    """
    wanted = job.engine.processes
    if isinstance(wanted, int) and wanted != member.num:
        raise SetupError(
            "training.processes",
            expected=f"{wanted} processes, as silo.toml says",
            got=f"{member.num}, as this process was told by whoever started it",
            remedy="Let training.processes in silo.toml be the number that training.launcher starts, on all machines "
            'together, or "auto". srun and torchrun tell each process; for others, set RANK and WORLD_SIZE.',
        )


@contextmanager
def only_one(folder: JobFolder) -> Iterator[None]:
    """Hold the folder; an earlier start's first process gets a moment to end.

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
    """Let torch and accelerate keep their files in a folder that goes when the process ends by itself."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def _saying_who_waits(member: Member) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "Timed out waiting" not in str(error):
            raise
        raise SetupError(
            member.name,
            expected=f"the other processes' part within {PATIENCE_S:.0f} s",
            got="no word from at least one of them",
            remedy="One of them hangs or was stopped. Run the command again: it goes on from the last checkpoint.",
        ) from error


@dataclass
class _Pulse:
    """The first process's signs of life, written by a thread of their own."""

    folder: JobFolder
    run: RunFolder
    launch_id: str
    stop: threading.Event
    count: int = 0
    latest: Progress | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def beat(self, *, ended: bool = False) -> None:
        """Write a sign of life with the latest progress; a file system that refuses one may take the next."""
        self.count += 1
        beat = Heartbeat(count=self.count, ended=ended)
        with suppress(OSError):
            told = (
                vars(self.latest) | {"loss": min(self.latest.loss, MAX_LOSS)} if self.latest else {}
            )
            write_transient(beat.model_copy(update=told), self.run.beat)

    def look(self) -> None:
        """Stop where the follower asks for it, has begun another start, or has removed the folder."""
        launch = read_document(Launch, self.folder.launch)
        fenced = launch is not None and self.launch_id not in (launch.launch_id, BY_HAND)
        if fenced or self.run.stop.exists() or not self.folder.job.exists():
            self.stop.set()

    def keep(self) -> None:
        """Beat and look until all is over."""
        shown, beaten = self.latest, time.monotonic()
        while not self.over.wait(_LOOK_S):
            self.look()
            if self.latest is not shown or time.monotonic() - beaten >= BEAT_S:
                shown, beaten = self.latest, time.monotonic()
                self.beat()


@contextmanager
def _signs_of_life(
    folder: JobFolder, run: RunFolder, launch_id: str, stop: threading.Event
) -> Iterator[Callable[[Progress], None]]:
    pulse = _Pulse(folder, run, launch_id, stop)
    pulse.beat()
    thread = threading.Thread(target=pulse.keep, daemon=True)
    thread.start()
    try:
        yield lambda progress: setattr(pulse, "latest", progress)
    finally:
        pulse.over.set()
        thread.join()
        pulse.beat(ended=True)


@contextmanager
def _silence() -> Iterator[Callable[[Progress], None]]:
    yield lambda progress: None


def _failure(rank: int, error: Exception) -> ProcessFailure:
    if isinstance(error, ArchipelagoError):
        said = [
            (text or "")[:MAX_TEXT] or None for text in (error.expected, error.got, error.remedy)
        ]
        expected, got, remedy = said
        return ProcessFailure(
            rank=rank,
            kind="ours",
            code=error.exit_code,
            subject=error.subject[:MAX_TEXT],
            expected=expected,
            got=got,
            remedy=remedy,
        )
    if isinstance(error, OSError) and error.errno is not None:
        return ProcessFailure(
            rank=rank, kind="system", code=error.errno, subject=error.strerror or ""
        )
    return ProcessFailure(rank=rank, kind="other", subject=traceback.format_exc()[-MAX_TEXT:])


def _print(failure: ProcessFailure) -> None:
    from ddm.system.console import say

    parts = {"expected": failure.expected, "found": failure.got, "to do": failure.remedy}
    say(f"error: {failure.subject}", error=True)
    for name, text in parts.items():
        if text:
            say(f"  {name + ':':<9} {text}", error=True)
