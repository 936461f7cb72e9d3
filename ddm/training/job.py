"""The folder of one training: what is trained, how it was started, how far it is, how it ended, as strict documents.

Anybody who wants an expert writes `job.json` and what it names; processes on any number of machines that see the folder
train it, and leave checkpoints, the expert and `result.json`. Each start has a folder of its own below `runs/`, with
the progress, the failures and the logs of its processes. Nothing here is a pickle, and each side reads what the other
wrote as it reads a stranger's: bounded, strict, and verified before use.
"""

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints

from ddm.errors import ArchipelagoError, DigestError, MissingFileError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import (
    Digest,
    Document,
    File,
    Measure,
    Model,
    NaturalInt,
    NumSteps,
    PositiveInt,
    Seconds,
    SiloId,
    sha256_hex,
)
from ddm.protocol.data import DataSpec
from ddm.protocol.plan import Plan
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.training.config import Engine
from ddm.training.metrics import METRICS_NAME

MAX_JOB_BYTES = 4 << 20
# Of the documents that processes write again and again.
MAX_DOCUMENT_BYTES = 64 << 10
MAX_TEXT = 4000
# How a process learns to which start it belongs, where its arguments do not say so.
LAUNCH_VARIABLE = "ARCHIPELAGO_LAUNCH"
# The exit code of a process that was asked to stop and wrote a checkpoint.
EXIT_STOPPED = 130
_MAX_FAILURES = 1024

# It names a folder, so that it may hold no dot and no slash.
LaunchId = Annotated[str, StringConstraints(pattern="^[a-z0-9]{1,32}$")]
BoundedText = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
DocumentT = TypeVar("DocumentT", bound=Document)


class ArrayLocation(Model):
    """An array in C order somewhere in a file.

    Attributes:
        path: the file; below the job's folder where it is relative.
        dtype: as numpy writes it, e.g. ``<f4``.
        shape: the shape of the array.
        offset: where it begins, in bytes.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    # Numbers alone: numpy reads an array of objects as a pickle, which runs code.
    dtype: Annotated[str, StringConstraints(pattern="^[<>|=][fiu][1248]$")]
    shape: Annotated[tuple[NaturalInt, ...], Field(min_length=1, max_length=8)]
    offset: NaturalInt


class CopiedArray(Model):
    """An array in the job's own folder, as it is."""

    kind: Literal["copied"] = "copied"
    location: ArrayLocation


class ReferencedImages(Model):
    """Images that are read from the files that hold them.

    Attributes:
        locations: the locations of the arrays that hold them, one after the other.
        fitted: into which range and shape their values are brought; None where they are taken as float32.
        chosen: which rows, int64; None for all.
        shift, scale: a value x is then ``(x - shift) / scale``; None where it stays.
    """

    kind: Literal["referred"] = "referred"
    locations: Annotated[tuple[ArrayLocation, ...], Field(min_length=1, max_length=4096)]
    fitted: DataSpec | None = None
    chosen: ArrayLocation | None = None
    shift: Measure | None = None
    scale: Annotated[float, Field(gt=0.0, le=1e30)] | None = None


Input = Annotated[CopiedArray | ReferencedImages, Field(discriminator="kind")]


class TrainingJob(Document):
    """What is trained.

    Attributes:
        plan_digest: the digest of `plan.json` beside it.
        silo_id: the silo, or the island.
        number: which of its experts.
        data: names the images and their conditions; other data have another.
        engine: how each machine trains.
        base: the expert that training starts from; None for random weights.
        stops: whether a gradient that is not finite ends the training.
        images: float32 (N, ...).
        labels: each image's condition; None for an unconditional expert.
        units: each image's privacy unit, int64 (N,), for a plan that trains privately.
        paid: private training, as the ledger paid for it.
    """

    format: Literal["archipelago/job/1"] = "archipelago/job/1"
    plan_digest: Digest
    silo_id: SiloId
    number: NaturalInt
    data: Digest
    engine: Engine
    base: File | None = None
    stops: bool = True
    images: Input
    labels: Input | None = None
    units: Input | None = None
    paid: DpSgdMechanism | None = None


class Launch(Document):
    """One start of a job's processes.

    Attributes:
        launch_id: names its folder, and fences off processes of earlier starts.
        work: what is trained, see `work_of`.
        by: this machine alone, in processes that end with the worker, or the operator's command, which outlives it.
        host: where the command was started.
        pid: the process id of the command; with `started`, in ticks since the machine started, no other process is
            taken for it.
        returned: its exit code, once it is known.
        futile: how many starts before this one came no step further.
        step: how far the job was.
    """

    format: Literal["archipelago/launch/1"] = "archipelago/launch/1"
    launch_id: LaunchId
    work: Digest
    by: Literal["local", "command"]
    host: Annotated[str, Field(max_length=255)]
    pid: NaturalInt
    started: NaturalInt
    returned: int | None = None
    futile: NaturalInt = 0
    step: NaturalInt = 0


class Heartbeat(Document):
    """The sign of life of a start's first process: `count` changes every few seconds, whatever training does.

    Attributes:
        count: of its signs of life.
        ended: whether it was its last.
        step, num_steps, loss, steps_per_second, seconds: as `ddm.training.progress.Progress`; step 0 before the first.
    """

    format: Literal["archipelago/heartbeat/1"] = "archipelago/heartbeat/1"
    count: PositiveInt
    ended: bool = False
    step: NaturalInt = 0
    num_steps: NaturalInt = 0
    loss: Measure = 0.0
    steps_per_second: Annotated[float, Field(ge=0.0, le=1e12)] = 0.0
    seconds: Seconds = 0.0


class ProcessFailure(Document):
    """Why a process ended.

    Attributes:
        rank: the process's number.
        num_processes: how many share the work.
        kind: one of our errors, by its exit code; an error of the operating system, by its number; died, for a process
            that could not say why; or another error, as text.
        code: the exit code or the number.
        subject, expected, got, remedy: of an error of ours; otherwise the subject says all.
    """

    format: Literal["archipelago/failure/1"] = "archipelago/failure/1"
    rank: NaturalInt
    num_processes: PositiveInt
    kind: Literal["ours", "system", "died", "other"]
    code: NaturalInt = 0
    subject: BoundedText
    expected: BoundedText | None = None
    got: BoundedText | None = None
    remedy: BoundedText | None = None

    @property
    def process_name(self) -> str:
        """How errors call the process."""
        return process_name(self.rank, self.num_processes)


class TrainingResult(Document):
    """The outcome, written after the expert: once it exists, the expert is trained.

    Attributes:
        work: what was trained, see `work_of`.
        steps, loss, seconds, flops: as `ddm.training.loop.Trained`.
        expert: the file.
    """

    format: Literal["archipelago/result/1"] = "archipelago/result/1"
    work: Digest
    steps: NumSteps
    loss: Measure
    seconds: Seconds
    flops: Annotated[float, Field(ge=0.0, le=1e30)]
    expert: File


def work_of(plan_digest: str, silo_id: str, number: int, data: str) -> str:
    """Name what is trained, and not who trains it: two folders with the same name lead to the same expert."""
    return sha256_hex(f"{plan_digest} {silo_id} {number} {data}".encode())


def new_launch_id() -> str:
    """Return a name that no other start has."""
    return secrets.token_hex(8)


def process_name(rank: int, num: int) -> str:
    """Return how errors call a process."""
    return f"training process {rank + 1} of {num}"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one start."""

    path: Path

    @property
    def heartbeat(self) -> Path:
        """See `Heartbeat`."""
        return self.path / "heartbeat.json"

    @property
    def stop(self) -> Path:
        """The file that makes the processes write a checkpoint and end."""
        return self.path / "stop"

    @property
    def command_log(self) -> Path:
        """What the command that started the processes printed, and processes of this machine."""
        return self.path / "command.log"

    def request_stop(self) -> None:
        """Let the processes write a checkpoint and end, wherever they run."""
        # A file that takes the place of whatever has the name: `touch` would follow a link.
        write_atomic(self.stop, b"")

    def failure(self, rank: int) -> Path:
        """See `ProcessFailure`."""
        return self.path / f"failure-{rank}.json"

    def failures(self) -> list[ProcessFailure]:
        """Read why processes ended, by their ranks; what is not whole is left out."""
        failures = []
        # Bounded, since others may write into a folder that several machines share.
        for path in sorted(self.path.glob("failure-*.json"))[:_MAX_FAILURES]:
            failure = read_document(ProcessFailure, path)
            if failure is not None:
                failures.append(failure)
        return sorted(failures, key=lambda failure: failure.rank)


@dataclass(frozen=True)
class JobFolder:
    """A job's folder: see this module."""

    path: Path

    @property
    def job(self) -> Path:
        """See `TrainingJob`."""
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.path / "plan.json"

    @property
    def base(self) -> Path:
        """The expert that training starts from, where there is one."""
        return self.path / "base.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints from which training continues."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The learning curve, see `ddm.training.metrics`."""
        return self.path / METRICS_NAME

    @property
    def secret(self) -> Path:
        """What decides whom private training draws, and its noise; goes with this folder."""
        return self.path / "secret"

    @property
    def launch(self) -> Path:
        """See `Launch`: the start that is in force."""
        return self.path / "launch.json"

    @property
    def expert(self) -> Path:
        """The trained expert, averaged weights, adaptations merged."""
        return self.path / "expert.safetensors"

    @property
    def result(self) -> Path:
        """See `TrainingResult`."""
        return self.path / "result.json"

    @property
    def runs(self) -> Path:
        """The folder that holds a folder for each start."""
        return self.path / "runs"

    def array(self, name: str) -> Path:
        """An array of the inputs that was copied."""
        return self.path / f"{name}.npy"

    def run(self, launch_id: str) -> RunFolder:
        """Return the folder of one start."""
        return RunFolder(self.runs / launch_id)

    def read_job(self) -> tuple[TrainingJob, Plan]:
        """Read what is trained, and the plan.

        Raises:
            MissingFileError: no such folder.
            FormatError: a document that is too long, damaged or not of its schema.
            DigestError: another plan than the job's.
        """
        if not self.job.is_file():
            raise MissingFileError(
                str(self.path),
                expected="a job's folder, with job.json",
                got="a folder without it" if self.path.is_dir() else "nothing there",
                remedy=(
                    "Name the folder that a silo's worker or `ddm train DIR` made, as every machine of the "
                    "job sees it."
                ),
            )
        # Bounded: a job's folder may be on a disk that others can write.
        job = TrainingJob.parse(read_bounded(self.job, MAX_JOB_BYTES), subject=self.job.name)
        data = read_bounded(self.plan, MAX_JOB_BYTES)
        digest = sha256_hex(data)
        if digest != job.plan_digest:
            raise DigestError(
                self.plan.name,
                expected=f"sha256 {job.plan_digest[:16]}...",
                got=f"sha256 {digest[:16]}...",
                remedy="Start the training again.",
            )
        return job, Plan.parse(data, subject=self.plan.name)


def discard_job(folder: JobFolder, *, keep_checkpoints: bool = False) -> None:
    """Remove a job's folder once its expert is where it belongs, the copies of images above all.

    Args:
        folder: the job's.
        keep_checkpoints: whether the checkpoints' folder stays, with averages that somebody asked for.
    """
    if not folder.path.is_dir():
        return
    for path in sorted(folder.path.iterdir()):
        # A link is removed itself, never what it leads to.
        if path == folder.checkpoints and keep_checkpoints:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.path.rmdir()


def write_document(document: Document, path: Path) -> None:
    """Write a small document in one piece, durably."""
    write_atomic(path, document.encode())


def write_transient(document: Document, path: Path) -> None:
    """Write a document in one piece that will soon be written again, and so need not survive a crash of the machine."""
    write_atomic(path, document.encode(), is_durable=False)


def read_document(kind: type[DocumentT], path: Path) -> DocumentT | None:
    """Read a small document; None where there is none, or none that can be read."""
    try:
        return kind.parse(
            read_bounded(path, MAX_DOCUMENT_BYTES), subject=path.name, limit=MAX_DOCUMENT_BYTES
        )
    except (ArchipelagoError, OSError):
        return None
