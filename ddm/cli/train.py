"""The command `ddm train`: train one island, the seed of all, or all that is not trained yet."""

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import CheckpointSecondsOption, DeviceOption, IslandsArgument
from ddm.errors import BusyError, SetupError
from ddm.system.console import human_seconds, progress, say
from ddm.system.cores import default_threads
from ddm.system.signals import stop_on_first_signal
from ddm.training.config import CHECKPOINT_S, TrainingSettings

if TYPE_CHECKING:
    from ddm.islands.folder import Islands


def train(
    folder: IslandsArgument,
    island: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Train only this island, as in a scheduler's array job."
        ),
    ] = None,
    seed_only: Annotated[
        bool,
        typer.Option("--seed-only", help="Train only the seed that all islands start from."),
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Number of processes that train one island together.")
    ] = 1,
    device: DeviceOption = "auto",
    checkpoint_s: CheckpointSecondsOption = CHECKPOINT_S,
) -> None:
    """Train an island's expert, or the seed and those of all islands; run again to continue where it stopped."""
    import torch

    from ddm.islands.assemble import missing_islands
    from ddm.islands.folder import Islands
    from ddm.islands.train import check_number

    islands = Islands(folder)
    # By themselves, torch's threads heed no cgroup.
    torch.set_num_threads(default_threads())
    settings = TrainingSettings(device=device, processes=processes, checkpoint_s=checkpoint_s)
    if seed_only and island is not None:
        raise SetupError(
            "--seed-only",
            expected="no --island beside it",
            got=f"--island {island}",
            remedy="Train the seed first, then the island: leave one of the options out.",
        )
    if seed_only:
        _train_seed(islands, settings)
        say(f"Next: ddm train {quote(str(folder))}")
        return
    if island is not None:
        check_number(islands, island)
        _train(islands, island, settings, num_left=0)
        busy_islands: set[int] = set()
    else:
        if islands.start_from_seed and not islands.seed.is_trained:
            _train_seed(islands, settings)
        busy_islands = _train_all(islands, missing_islands(islands), settings)

    num_islands = len(islands.split.islands)
    missing = missing_islands(islands)
    if not missing:
        say(
            f"All {num_islands} islands are trained. Next: ddm assemble {quote(str(folder))} --out RELEASE"
        )
    elif island is None:
        num_trained = num_islands - len(missing)
        # An island that another process was training may be trained by now.
        num_busy = len(busy_islands & {*missing})
        say(
            f"{num_trained} of {num_islands} islands are trained; other processes train {num_busy}."
        )


def _train_seed(islands: "Islands", settings: TrainingSettings) -> None:
    """Train the seed that all islands start from, and say how it went."""
    from ddm.islands.train import train_seed

    with progress("seed") as show_progress, stop_on_first_signal() as stop:
        record = train_seed(
            islands,
            settings,
            on_progress=lambda reached: show_progress(reached.step, reached.num_steps),
            should_stop=stop.is_set,
        )
    say(
        f"Seed: {record.steps} steps on the {record.num_images} images of all islands in "
        f"{human_seconds(record.training.seconds)}, loss {record.training.loss:.4f}."
    )


def _train_all(islands: "Islands", numbers: list[int], settings: TrainingSettings) -> set[int]:
    """Train islands one after the other; return those that another process trains meanwhile."""
    busy_islands = set()
    for position, number in enumerate(numbers, start=1):
        label = f"{position} of {len(numbers)}" if len(numbers) > 1 else None
        try:
            _train(islands, number, settings, num_left=len(numbers) - position, label=label)
        # Several processes may share the islands of one folder: each takes those that no other one trains.
        except BusyError as error:
            busy_islands.add(number)
            say(f"note: {error.subject} is being trained by another process.", error=True)
    return busy_islands


def _train(
    islands: "Islands",
    number: int,
    settings: TrainingSettings,
    *,
    num_left: int,
    label: str | None = None,
) -> None:
    """Train one island, and say how it went."""
    from ddm.islands.train import train_island

    progress_label = f"island {number}" if label is None else f"island {number} ({label})"
    with progress(progress_label) as show_progress, stop_on_first_signal() as stop:
        record = train_island(
            islands,
            number,
            settings,
            on_progress=lambda reached: show_progress(reached.step, reached.num_steps),
            should_stop=stop.is_set,
        )
    seconds = record.training.seconds
    line = (
        f"Island {number}: {record.steps} steps in {human_seconds(seconds)}, "
        f"loss {record.training.loss:.4f}."
    )
    if num_left > 0:
        # Every island takes the same number of steps in batches of the same size.
        line += f" About {human_seconds(num_left * seconds)} for the {num_left} left."
    say(line)
