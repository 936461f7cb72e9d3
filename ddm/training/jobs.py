"""Trains one expert as a job: in this process, in several of this machine, or wherever a launcher's command starts it.

Where one process of this machine trains, it is this one. Else the folder is all that the processes and this one share:
what is to be trained lies there before they start, and whoever follows them takes from it what verifies, and nothing
else. Another start is made only of a job that has ended or is lost, so a process that comes back after its own death
follows what it finds.
"""

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

import torch

from ddm.errors import ArchipelagoError, DocumentError, TensorFileError
from ddm.images.rows import Images
from ddm.io.files import link_or_copy, move_into_place, write_atomic
from ddm.io.tensors import check_file, stored_bytes
from ddm.io.untrusted import open_regular
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.privacy.secret_stream import make_secret
from ddm.protocol.base import File
from ddm.training.config import TrainingSettings
from ddm.training.distributed import num_processes
from ddm.training.following import Follower, finished, lost
from ddm.training.inputs import write_inputs
from ddm.training.job import (
    JobFolder,
    Launch,
    TrainingJob,
    TrainingResult,
    new_launch_id,
    read_document,
    work_of,
    write_document,
)
from ddm.training.launcher import Command, Processes, start_command
from ddm.training.loop import Progress
from ddm.training.planned import PlannedExpert
from ddm.training.process import only_one, train_here

_HEADER_BYTES = 1 << 20
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class TrainingTask:
    """What is to be trained.

    Attributes:
        expert: as the plan says.
        inputs: `images`, for a conditional expert `labels`, and for private training `units`.
        data: the digest of whatever names these inputs; other inputs have another.
        files: npy files that hold some of the inputs exactly, by name.
    """

    expert: PlannedExpert
    inputs: Mapping[str, Images]
    data: str
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def work(self) -> str:
        """Names what is trained."""
        return work_of(self.expert.plan.digest, self.expert.silo_id, self.expert.number, self.data)


def train_job(
    wanted: TrainingTask,
    folder: JobFolder,
    settings: TrainingSettings,
    to: Path,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainingResult:
    """Train an expert, from the last checkpoint where there is one, and put it where it belongs once it verifies.

    Args:
        wanted: the expert and its inputs.
        folder: the job's.
        settings: how, and by which processes.
        to: where the expert goes.
        on_progress: called every few steps; what it raises stops the training.
        should_stop: its yes stops the training after a checkpoint.

    Raises:
        KeyboardInterrupt: `should_stop` said yes.
        ArchipelagoError: what training raised; a `SetupError` where its processes die or do not start, a
            `DigestError`, `TensorFileError` or `DocumentError` where what they left is not an expert of the plan.
    """
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if wanted.expert.plan.expert.privacy:
        make_secret(folder.secret)
    result = finished(folder, wanted.work) or _resumed(
        wanted, folder, settings, on_progress, should_stop
    )
    if result is None and settings.launcher == "local" and num_processes(settings) == 1:
        result = _train_in_this_process(wanted, folder, on_progress, should_stop)
    while result is None:
        result = _started(wanted, folder, settings).follow(wanted.work, on_progress, should_stop)
    _collect(wanted.expert, result, folder, to)
    return result


def _train_in_this_process(
    wanted: TrainingTask,
    folder: JobFolder,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainingResult | None:
    # so that late processes of an earlier start end
    _note(folder, _new_launch(wanted, "processes"))
    with only_one(folder):
        train_here(folder, wanted.expert, wanted.inputs, wanted.data, on_progress, should_stop)
    return finished(folder, wanted.work)


def _resumed(
    wanted: TrainingTask,
    folder: JobFolder,
    settings: TrainingSettings,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainingResult | None:
    """Follow the start that an earlier process made by a command, if it may still go on."""
    launch = read_document(Launch, folder.launch)
    if launch is None or launch.by != "command":
        return None
    follower = Follower(folder, launch, Command(launch), settings)
    if launch.work != wanted.work:
        follower.ask_to_stop()
        return None
    if follower.run.stop.exists():  # it was stopped, and has ended or will
        return None
    return follower.follow(wanted.work, on_progress, should_stop)


def _started(wanted: TrainingTask, folder: JobFolder, settings: TrainingSettings) -> Follower:
    """Start the job's processes.

    Raises:
        SetupError: the last starts came no step further.
    """
    launch = _next_launch(wanted, folder, settings)
    _prepare(wanted, folder, settings)
    _note(folder, launch)
    if settings.launcher == "local":
        num = num_processes(settings)
        processes = Processes(folder, launch.launch_id, num, torch.get_num_threads())
        return Follower(folder, launch, processes, settings, num)
    launch, command = start_command(settings, folder, launch)
    write_document(launch, folder.launch)
    return Follower(folder, launch, command, settings)


def _next_launch(wanted: TrainingTask, folder: JobFolder, settings: TrainingSettings) -> Launch:
    by: Literal["processes", "command"] = "processes" if settings.launcher == "local" else "command"
    before, step, futile = read_document(Launch, folder.launch), _last_step(folder), 0
    if before is not None and (before.work, before.by, by) == (wanted.work, "command", "command"):
        run = folder.run(before.launch_id)
        # the end of one that was stopped tells nothing
        if not run.stop.exists() and step <= before.step:
            futile = before.futile + 1
        if futile >= settings.retries:
            # the next call begins to count anew: somebody has looked into it
            folder.launch.unlink(missing_ok=True)
            raise lost(run, futile)
    return _new_launch(wanted, by).model_copy(update={"futile": futile, "step": step})


def _last_step(folder: JobFolder) -> int:
    """Return the step of the last checkpoint: what a start that ends has gained."""
    names = (path.stem.removeprefix("step-") for path in folder.checkpoints.glob("step-*.json"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def _new_launch(wanted: TrainingTask, by: Literal["processes", "command"]) -> Launch:
    host = socket.gethostname()[:255]
    return Launch(
        launch_id=new_launch_id(), work=wanted.work, by=by, host=host, pid=os.getpid(), started=0
    )


def _note(folder: JobFolder, launch: Launch) -> None:
    """Put a start in force; the folders of earlier ones go, but for the last one's logs."""
    before = read_document(Launch, folder.launch)
    kept = {launch.launch_id, before.launch_id if before else None}
    for path in folder.runs.iterdir() if folder.runs.is_dir() else ():
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    write_document(launch, folder.launch)


def _prepare(wanted: TrainingTask, folder: JobFolder, settings: TrainingSettings) -> None:
    """Write what the processes read; the job itself last."""
    expert, plan = wanted.expert, wanted.expert.plan
    folder.result.unlink(missing_ok=True)
    base = None
    if expert.base is not None:
        folder.base.unlink(missing_ok=True)
        link_or_copy(expert.base.folder / expert.base.file.path, folder.base)
        base = File(
            path=folder.base.name, bytes=expert.base.file.bytes, digest=expert.base.file.digest
        )
    alone = settings.launcher != "local"
    inputs = write_inputs(wanted.inputs, wanted.files, folder, alone=alone)
    write_atomic(folder.plan, plan.encode())
    job = TrainingJob(
        plan_digest=plan.digest,
        silo_id=expert.silo_id,
        number=expert.number,
        data=wanted.data,
        engine=settings.engine,
        threads=torch.get_num_threads(),
        base=base,
        stops=expert.stops,
        images=inputs["images"],
        labels=inputs.get("labels"),
        units=inputs.get("units"),
        paid=expert.paid,
    )
    write_atomic(folder.job, job.encode())


def _collect(expert: PlannedExpert, result: TrainingResult, folder: JobFolder, to: Path) -> None:
    """Copy the expert to where nobody but this process's user writes, verify the copy, and give it its name.

    Raises:
        DigestError, TensorFileError, DocumentError: not an expert of the plan, with finite weights.
    """
    plan, name = expert.plan, folder.expert.name
    steps = plan.expert.training.num_steps
    if result.steps != steps or not isfinite(result.loss) or result.expert.path != name:
        folder.result.unlink(missing_ok=True)
        got = f"{result.steps} steps of {result.expert.path}"
        raise DocumentError(folder.result.name, expected=f"{steps} steps, and {name}", got=got)
    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    part = to.with_name(f".{to.name}.unverified")
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_regular(folder.expert, name) as (reader, size), part.open("wb") as writer:
            if size != result.expert.bytes or size > stored_bytes(specs) + _HEADER_BYTES:
                raise TensorFileError(
                    name, expected=f"{stored_bytes(specs)} bytes and a header", got=f"{size} bytes"
                )
            shutil.copyfileobj(reader, writer, _COPY_BYTES)
        check_file(part, specs, max_bytes=size, max_abs=MAX_WEIGHT, digest=result.expert.digest)
        move_into_place(part, to)
    except ArchipelagoError:
        # the next call trains again, from the last checkpoint
        folder.result.unlink(missing_ok=True)
        raise
    finally:
        part.unlink(missing_ok=True)
