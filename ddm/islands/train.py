"""Trains islands, each alone and resumable to the byte; no two processes ever train the same one."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ddm.errors import BusyError, SetupError
from ddm.io.files import write_atomic
from ddm.io.images import Images
from ddm.io.locks import locked
from ddm.io.space import check_writable
from ddm.islands.arrays import map_array
from ddm.islands.folder import IslandFolder, Islands, TrainedIsland
from ddm.protocol.base import File
from ddm.protocol.plan import NoCondition
from ddm.protocol.submission import ExpertTraining, expert_path
from ddm.training.config import Engine
from ddm.training.distributed import num_processes
from ddm.training.launcher import do_together
from ddm.training.loop import Progress
from ddm.training.planned import PlannedExpert


def check_number(islands: Islands, number: int) -> None:
    """Refuse the number of an island that does not exist.

    Raises:
        SetupError: there is none.
    """
    last = len(islands.split.islands) - 1
    if not 0 <= number <= last:
        remedy = f"For a scheduler's array job, give the range 0-{last}."
        raise SetupError("--island", expected=f"0 to {last}", got=str(number), remedy=remedy)


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return int(os.environ.get("RANK", "0")) == 0


def train_island(
    islands: Islands,
    number: int,
    engine: Engine,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainedIsland | None:
    """Train one island from its last checkpoint on, and write its expert; return its record, also if it was there.

    Args:
        islands: the folder.
        number: the island's.
        engine: how this machine trains.
        on_progress: called every few steps.
        should_stop: called before every step.

    Returns:
        The record; None in a process of torchrun that is not the first.

    Raises:
        SetupError: no such island, or see `ddm.training.loop.train`.
        BusyError: another process trains it.
        DataError: its images are not there.
        KeyboardInterrupt: `should_stop` returned true; a checkpoint was written.
    """
    check_number(islands, number)
    folder = islands.island(number)
    with _held(folder, number):
        if not folder.is_trained:
            _train(islands, number, engine, on_progress, should_stop)
        if not is_first_process():
            return None
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        return islands.trained(number)


@contextmanager
def _held(folder: IslandFolder, number: int) -> Iterator[None]:
    """Hold an island for this process, or for the processes that torchrun has started, of which the first holds it."""
    with ExitStack() as stack:
        if is_first_process():
            check_writable([folder.path])
            try:
                stack.enter_context(locked(folder.path, "training"))
            except BusyError as error:
                raise BusyError(
                    f"island {number}",
                    expected="no other process that trains it",
                    got="one that does",
                    remedy="Wait for it, or train another island: each takes its own process or job.",
                ) from error
        yield


@dataclass(frozen=True)
class IslandJob:
    """The training of one island, in one process or in several together; its tensors are passed to the call.

    Attributes:
        expert: what is trained.
        folder: the island's.
    """

    expert: PlannedExpert
    folder: IslandFolder

    def __call__(
        self, tensors: Mapping[str, Images], on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """Train on `images` and, for a conditional expert, `labels`; write the expert and its record."""
        folder, plan, island_id = self.folder, self.expert.plan, self.expert.silo_id
        trained = self.expert.train(tensors, folder.expert, folder.checkpoints, on_progress, should_stop)
        if trained is None:  # another process has it
            return
        record = TrainedIsland(
            plan_id=plan.plan_id,
            num_images=len(tensors["images"]),
            steps=trained.steps,
            training=ExpertTraining(loss=trained.loss, seconds=trained.seconds, flops=trained.flops),
            expert=File.of(expert_path(island_id, island_id), folder.expert),
        )
        write_atomic(folder.record, record.encode())


def _train(
    islands: Islands,
    number: int,
    engine: Engine,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    plan, folder = islands.plan, islands.island(number)
    tensors = {"images": map_array(folder.images)}
    if not isinstance(plan.condition, NoCondition):
        tensors["labels"] = map_array(folder.labels)
    job = IslandJob(PlannedExpert(plan, plan.silos[number], number, islands.bundle, engine), folder)
    num = num_processes(engine)
    if num == 1 or "RANK" in os.environ:  # torchrun has started the others
        job(tensors, on_progress, should_stop)
    else:
        do_together(job, tensors, num, folder=folder.path, on_progress=on_progress, should_stop=should_stop)
