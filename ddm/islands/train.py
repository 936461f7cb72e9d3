"""Trains islands, and the seed that they may start from, each alone and resumable to the byte.

No two processes ever train the same one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from ddm.errors import BusyError, SetupError
from ddm.images.rows import Images
from ddm.io.files import write_atomic
from ddm.io.locks import locked
from ddm.io.space import check_writable, require_free_space
from ddm.islands.arrays import map_array, write_rows
from ddm.islands.folder import Islands, TrainedIsland
from ddm.protocol.architecture import NoCondition
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.learning import BASE_PATH
from ddm.protocol.submission import ExpertTraining, expert_path
from ddm.training.config import TrainingSettings
from ddm.training.job import discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.planned import PlannedExpert, public_base
from ddm.training.progress import Progress

_BLOCK_ROWS = 4096
_SEED_NAME = "seed"


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
        SetupError: no such island, no trained seed where it starts from one, or see `ddm.training.loop.train`.
        BusyError: another process trains it.
        DataError: its images are not there.
        KeyboardInterrupt: `should_stop` returned true; a checkpoint was written.
    """
    check_number(islands, number)
    folder = islands.island(number)
    with _lock_training(folder.path, f"island {number}"):
        # The record is written last, so that an interrupted training continues from its checkpoint.
        if not folder.is_trained:
            _train(islands, number, settings, on_progress, should_stop)
        discard_job(folder.job)
        return islands.trained(number)


def train_seed(
    islands: Islands,
    settings: TrainingSettings,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> TrainedIsland:
    """Train the seed that all islands start from, and put its weights among the plan's files; return its record.

    Arguments and errors are those of `train_island`.
    """
    if not islands.start_from_seed:
        raise SetupError(
            "--seed-only",
            expected="islands that start from a seed",
            got="islands that were split without one",
            remedy="Leave --seed-only out. To have a seed, split the data set again with --seed-share.",
        )
    folder = islands.seed
    with _lock_training(folder.path, "the seed"):
        # The record is written last, as that of an island.
        if not folder.is_trained:
            _train_seed(islands, settings, on_progress, should_stop)
        discard_job(folder.job)
        for path in (folder.images, folder.labels):
            path.unlink(missing_ok=True)
        return islands.trained_seed()


def _train_seed(
    islands: Islands,
    settings: TrainingSettings,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train the seed, write its weights, and last the record that says that they are there."""
    plan = islands.seed_plan
    folder = islands.seed
    members = [islands.island(number) for number in range(len(plan.silos))]
    parts = {folder.images: [member.images for member in members]}
    files = {"images": folder.images}
    if not isinstance(plan.condition, NoCondition):
        parts[folder.labels] = [member.labels for member in members]
        files["labels"] = folder.labels
    _join_islands(folder.path, parts)
    inputs: dict[str, Images] = {name: map_array(path) for name, path in files.items()}
    row_digests = [sha256_file(member.rows) for member in members]
    # A number that no island has, so that its random numbers are its own.
    expert = PlannedExpert(plan, _SEED_NAME, len(members), None, settings.engine)
    task = TrainingTask(expert, inputs, sha256_hex("".join(row_digests).encode()), files)
    result = train_job(
        task,
        folder.job,
        settings,
        folder.weights,
        on_progress=on_progress,
        should_stop=should_stop,
        metrics=folder.metrics,
    )
    record = TrainedIsland(
        plan_id=plan.plan_id,
        num_images=len(inputs["images"]),
        steps=result.steps,
        training=ExpertTraining(loss=result.loss, seconds=result.seconds, flops=result.flops),
        expert=File.of(BASE_PATH, folder.weights),
    )
    write_atomic(folder.record, record.encode())


def _join_islands(folder: Path, parts: dict[Path, list[Path]]) -> None:
    """Write the arrays of all islands one after the other, where that was not done yet.

    Args:
        folder: the seed's.
        parts: the arrays of the islands, by the path of the joined one.

    Raises:
        DataError: an island's array is not there.
        DiskError: too little free space.
    """
    missing = {joined: paths for joined, paths in parts.items() if not joined.is_file()}
    num_bytes = 0
    for paths in missing.values():
        num_bytes += sum(map_array(path).nbytes for path in paths)
    require_free_space({folder: num_bytes}, "the images of all islands in one file")
    for joined, paths in missing.items():
        arrays = [map_array(path) for path in paths]
        num_rows = sum(len(array) for array in arrays)
        blocks = (block.numpy() for array in arrays for block in torch.split(array, _BLOCK_ROWS))
        dtype = np.dtype(arrays[0].numpy().dtype).type
        write_rows(joined, (num_rows, *arrays[0].shape[1:]), blocks, dtype)


@contextmanager
def _lock_training(folder: Path, subject: str) -> Iterator[None]:
    """Lock the folder of an island, or of the seed, for this process."""
    check_writable([folder])
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, "training"))
        except BusyError as error:
            raise BusyError(
                subject,
                expected="no other process that trains it",
                got="one that does",
                remedy=(
                    "Wait for it. Meanwhile, other islands can be trained, each in a process or "
                    "job of its own; if they start from a seed, it must be trained first."
                ),
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
        metrics=folder.metrics,
    )
    record = TrainedIsland(
        plan_id=plan.plan_id,
        num_images=len(inputs["images"]),
        steps=result.steps,
        training=ExpertTraining(loss=result.loss, seconds=result.seconds, flops=result.flops),
        expert=File.of(expert_path(island_id, island_id), folder.expert),
        base=None if base is None else base.file.digest,
    )
    write_atomic(folder.record, record.encode())
