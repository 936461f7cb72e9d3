"""Trains one expert as a job: in this process, or by a command that starts the processes.

Where one process of this machine trains, it is this one. Otherwise the folder is all that the processes and this one
share: what is to be trained is there before they start, and anybody who follows them takes from it what verifies, and
nothing else. Another start is made only of a job that has ended or is lost, so a worker that starts again after its
own death follows the job that continues.
"""

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch

from ddm.errors import ArchipelagoError, DocumentError, TensorFileError
from ddm.images.rows import Images
from ddm.io.files import link_or_copy, move_into_place, write_atomic
from ddm.io.own_folder import make_own_folder, make_own_path
from ddm.io.tensors import check_file, stored_bytes
from ddm.io.untrusted import open_regular
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.privacy.secret_stream import make_secret
from ddm.protocol.base import File
from ddm.training.config import TrainingSettings
from ddm.training.distributed import num_processes
from ddm.training.group import refuse_torchrun
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
from ddm.training.launch import (
    LaunchCommand,
    StartFollower,
    finished,
    futile_starts_error,
    start_command,
    start_local,
)
from ddm.training.metrics import copy_metrics
from ddm.training.planned import PlannedExpert
from ddm.training.process import only_one, train_here
from ddm.training.progress import Progress

# Of a safetensors file, beyond its tensors.
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
    task: TrainingTask,
    folder: JobFolder,
    settings: TrainingSettings,
    to: Path,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    metrics: Path | None = None,
) -> TrainingResult:
    """Train an expert, from the last checkpoint where there is one, and put it in its place once it verifies.

    Args:
        task: the expert and its inputs.
        folder: the job's.
        settings: how, and by which processes.
        to: where the expert goes.
        on_progress: called every few steps; what it raises stops the training.
        should_stop: once it returns true the training stops after a checkpoint.
        metrics: where the learning curve goes with the expert; None leaves it in the job's folder.

    Raises:
        KeyboardInterrupt: `should_stop` returned true.
        TrustError: torchrun has started this process, or other users could put something into the folder.
        ArchipelagoError: what training raised; a `SetupError` where its processes die or do not start, a
            `DigestError`, `TensorFileError` or `DocumentError` where what they left is not an expert of the plan.
    """
    refuse_torchrun(os.environ)
    # Its processes believe what is in it.
    if settings.jobs is None:
        # Above it is what the caller has everything else in.
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(folder.path)
    else:
        make_own_path(folder.path)
    if task.expert.plan.expert.privacy:
        # Kept where it exists: a run that is resumed must draw the same units and the same noise.
        make_secret(folder.secret)
    run = _JobRun(task, folder, settings, on_progress, should_stop)
    result = run.train()
    _collect(task.expert, result, folder, to)
    if metrics is not None:
        copy_metrics(folder.metrics, metrics)
    return result


@dataclass(frozen=True)
class _JobRun:
    """A job and the process that waits for it, see `train_job`."""

    task: TrainingTask
    folder: JobFolder
    settings: TrainingSettings
    on_progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]

    @property
    def _is_local(self) -> bool:
        return self.settings.launcher == "local"

    def train(self) -> TrainingResult:
        """Train until there is a result."""
        result = finished(self.folder, self.task.work)
        if result is None:
            result = self._follow_earlier_start()
        if result is None and self._is_local and num_processes(self.settings) == 1:
            result = self._train_in_this_process()
        while result is None:
            result = self._follow(self._start())
        return result

    def _follow(self, follower: StartFollower) -> TrainingResult | None:
        return follower.follow(self.task.work, self.on_progress, self.should_stop)

    def _follow_earlier_start(self) -> TrainingResult | None:
        """Follow the start that an earlier process made by a command, if it may still continue."""
        launch = read_document(Launch, self.folder.launch)
        if launch is None or launch.by != "command":
            return None
        command = LaunchCommand.of_earlier(launch)
        follower = StartFollower(self.folder, launch, command, self.settings)
        # Its plan or its data are not those of this task any more, and it would keep its GPUs until it has ended.
        if launch.work != self.task.work:
            follower.request_stop()
            return None
        if follower.run.stop.exists():
            # It was stopped, and has ended or will.
            return None
        return self._follow(follower)

    def _train_in_this_process(self) -> TrainingResult | None:
        # With another start in force, late processes of an earlier one end.
        self._put_in_force(self._new_launch())
        with only_one(self.folder):
            train_here(
                self.folder,
                self.task.expert,
                self.task.inputs,
                self.task.data,
                self.on_progress,
                self.should_stop,
            )
        return finished(self.folder, self.task.work)

    def _start(self) -> StartFollower:
        """Start the job's processes.

        Raises:
            SetupError: the last starts came no step further.
        """
        launch = self._next_launch()
        # The documents come before the launch: a process that was told no start takes the one in force, and reads them.
        write_job(self.task, self.folder, self.settings)
        self._put_in_force(launch)
        if self._is_local:
            num = num_processes(self.settings)
            command = start_local(self.folder, launch, num, threads_of_process(self.settings))
        else:
            # The process id is known only now. After a crash before the next line a later process follows the signs of
            # life alone.
            launch, command = start_command(self.settings, self.folder, launch)
            write_document(launch, self.folder.launch)
        return StartFollower(self.folder, launch, command, self.settings)

    def _next_launch(self) -> Launch:
        launch = self._new_launch()
        earlier = read_document(Launch, self.folder.launch)
        step = _last_step(self.folder)
        num_futile = 0
        # A local start that fails raises its error itself, and is not repeated.
        is_comparable = (
            earlier is not None
            and earlier.work == launch.work
            and earlier.by == launch.by == "command"
        )
        if earlier is not None and is_comparable:
            run = self.folder.run(earlier.launch_id)
            # The end of a start that was stopped says nothing about it.
            if not run.stop.exists() and step <= earlier.step:
                num_futile = earlier.futile + 1
            if num_futile >= self.settings.retries:
                # The next call counts from 0: by then somebody has looked into it.
                self.folder.launch.unlink(missing_ok=True)
                raise futile_starts_error(run, num_futile)
        return launch.model_copy(update={"futile": num_futile, "step": step})

    def _new_launch(self) -> Launch:
        return Launch(
            launch_id=new_launch_id(),
            work=self.task.work,
            by="local" if self._is_local else "command",
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            started=0,
        )

    def _put_in_force(self, launch: Launch) -> None:
        """Write which start is in force; the folders of earlier ones go, except that the last one's logs stay."""
        earlier = read_document(Launch, self.folder.launch)
        recent = {launch.launch_id}
        if earlier is not None:
            recent.add(earlier.launch_id)
        if self.folder.runs.is_dir():
            for path in self.folder.runs.iterdir():
                if path.name not in recent:
                    shutil.rmtree(path, ignore_errors=True)
        write_document(launch, self.folder.launch)


def _last_step(folder: JobFolder) -> int:
    """Return the step of the last checkpoint: what a start that ends has gained."""
    names = (path.stem.removeprefix("step-") for path in folder.checkpoints.glob("step-*.json"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def threads_of_process(settings: TrainingSettings) -> int:
    """Return in how many threads each of the job's processes on this machine computes."""
    if settings.threads is not None:
        return settings.threads
    return max(1, torch.get_num_threads() // num_processes(settings))


def write_job(task: TrainingTask, folder: JobFolder, settings: TrainingSettings) -> None:
    """Write what the processes of a job read, with `job.json` last.

    Args:
        task: the expert and its inputs.
        folder: the job's.
        settings: the site's; with a launcher's command, images are copied into the folder.
    """
    expert = task.expert
    plan = expert.plan
    # A result of earlier work must not end the new start.
    folder.result.unlink(missing_ok=True)
    base = None
    if expert.base is not None:
        # A link to the file of an earlier plan may be here, and must not be written through.
        folder.base.unlink(missing_ok=True)
        link_or_copy(expert.base.folder / expert.base.file.path, folder.base)
        base = File(
            path=folder.base.name, bytes=expert.base.file.bytes, digest=expert.base.file.digest
        )
    is_local = settings.launcher == "local"
    engine = settings.engine
    if is_local:
        engine = engine.model_copy(update={"threads": threads_of_process(settings)})
    inputs = write_inputs(task.inputs, task.files, folder, is_complete=not is_local)
    write_atomic(folder.plan, plan.encode())
    job = TrainingJob(
        plan_digest=plan.digest,
        silo_id=expert.silo_id,
        number=expert.number,
        data=task.data,
        engine=engine,
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

    The copy is verified and not the original, which the processes of the job could change after the check.

    Raises:
        DigestError, TensorFileError, DocumentError: not an expert of the plan, with finite weights.
    """
    plan = expert.plan
    name = folder.expert.name
    num_steps = plan.expert.training.num_steps
    if result.steps != num_steps or not isfinite(result.loss) or result.expert.path != name:
        folder.result.unlink(missing_ok=True)
        raise DocumentError(
            folder.result.name,
            expected=f"{num_steps} steps, and {name}",
            got=f"{result.steps} steps of {result.expert.path}",
        )
    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    max_bytes = stored_bytes(specs) + _HEADER_BYTES
    part = to.with_name(f".{to.name}.unverified")
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_regular(folder.expert, name) as (reader, size), part.open("wb") as writer:
            # The size comes before the copy, which could otherwise fill the disk.
            if size != result.expert.bytes or size > max_bytes:
                raise TensorFileError(
                    name, expected=f"{stored_bytes(specs)} bytes and a header", got=f"{size} bytes"
                )
            shutil.copyfileobj(reader, writer, _COPY_BYTES)
        check_file(part, specs, max_bytes=size, max_abs=MAX_WEIGHT, digest=result.expert.digest)
        move_into_place(part, to)
    except ArchipelagoError:
        # The next call trains again, from the last checkpoint.
        folder.result.unlink(missing_ok=True)
        raise
    finally:
        part.unlink(missing_ok=True)
