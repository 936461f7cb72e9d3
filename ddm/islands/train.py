"""Trains islands, each alone and resumable to the byte; no two processes ever train the same one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ddm.errors import BusyError, SetupError
from ddm.images.rows import Images
from ddm.io.files import write_atomic
from ddm.io.locks import locked
from ddm.io.space import check_writable
from ddm.islands.arrays import map_array
from ddm.islands.folder import IslandFolder, Islands, TrainedIsland
from ddm.protocol.architecture import NoCondition
from ddm.protocol.base import File, sha256_file
from ddm.protocol.submission import ExpertTraining, expert_path
from ddm.training.config import TrainingSettings
from ddm.training.job import discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.loop import Progress
from ddm.training.planned import PlannedExpert, public_base


def check_number(islands: Islands, number: int) -> None:
    """Refuse the number of an island that does not exist.

    Raises:
        SetupError: there is none.
    """
    last = len(islands.split.islands) - 1
    if not 0 <= number <= last:
        remedy = f"For a scheduler's array job, give the range 0-{last}."
        raise SetupError("--island", expected=f"0 to {last}", got=str(number), remedy=remedy)


def train_island(
    islands: Islands,
    number: int,
    settings: TrainingSettings,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainedIsland:
    """Train one island from its last checkpoint on, and write its expert; return its record, also if it was there.

    Args:
        islands: the folder.
        number: the island's.
        settings: how this machine trains.
        on_progress: called every few steps.
        should_stop: called before every step.

    Raises:
        SetupError: no such island, or see `ddm.training.loop.train`.
        BusyError: another process trains it.
        DataError: its images are not there.
        KeyboardInterrupt: `should_stop` returned true; a checkpoint was written.
    """
    check_number(islands, number)
    folder = islands.island(number)
    with _lock_island(folder, number):
        # The record is written last, so that an interrupted training goes on from its checkpoint.
        if not folder.is_trained:
            _train(islands, number, settings, on_progress, should_stop)
        discard_job(folder.job)
        return islands.trained(number)


@contextmanager
def _lock_island(folder: IslandFolder, number: int) -> Iterator[None]:
    """Lock an island for this process."""
    check_writable([folder.path])
    with ExitStack() as stack:
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


def _train(
    islands: Islands,
    number: int,
    settings: TrainingSettings,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train an island's expert, write it, and last the record that says that it is there."""
    plan = islands.plan
    folder = islands.island(number)
    files = {"images": folder.images}
    if not isinstance(plan.condition, NoCondition):
        files["labels"] = folder.labels
    inputs: dict[str, Images] = {name: map_array(path) for name, path in files.items()}
    island_id = plan.silos[number]
    base = public_base(plan, islands.bundle)
    expert = PlannedExpert(plan, island_id, number, base, settings.engine)
    # The digest of the row numbers names the data, so that no checkpoint of other images is continued.
    task = TrainingTask(expert, inputs, sha256_file(folder.rows), files)
    result = train_job(
        task,
        folder.job,
        settings,
        folder.expert,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    record = TrainedIsland(
        plan_id=plan.plan_id,
        num_images=len(inputs["images"]),
        steps=result.steps,
        training=ExpertTraining(loss=result.loss, seconds=result.seconds, flops=result.flops),
        expert=File.of(expert_path(island_id, island_id), folder.expert),
    )
    write_atomic(folder.record, record.encode())
