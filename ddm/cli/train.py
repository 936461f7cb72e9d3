"""The command `ddm train`: train one island, the seed of all, or what is not trained yet; or show how far they are."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import CheckpointSecondsOption, DeviceOption, IslandsArgument
from ddm.errors import BusyError, SetupError
from ddm.system.console import human_seconds, progress, say, table
from ddm.system.cores import default_threads
from ddm.system.progress import ProgressCallback
from ddm.system.signals import stop_on_first_signal
from ddm.training.config import CHECKPOINT_S, TrainingSettings

if TYPE_CHECKING:
    from ddm.islands.folder import Islands, TrainingFolder
    from ddm.training.progress import Progress
    from ddm.training.writers import WriterChoice


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
    log: Annotated[
        str | None,
        typer.Option(
            metavar="WRITER[:TARGET]",
            help="Write learning curves for tensorboard (TARGET: a folder) or wandb (a project) too.",
        ),
    ] = None,
    show_status: Annotated[
        bool,
        typer.Option(
            "--status", help="Show how far each island is, with its learning curve; train nothing."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --status: print JSON, for scripts.")
    ] = False,
) -> None:
    """Train an island's expert, or the seed and those of all islands; run again to continue where it stopped."""
    if show_status:
        _say_status(folder, as_json=as_json)
        return
    if as_json:
        raise SetupError(
            "--json",
            expected="--status beside it",
            got="a training, which prints no JSON",
            remedy="Add --status, or leave --json out.",
        )
    import torch

    from ddm.islands.assemble import missing_islands
    from ddm.islands.folder import Islands
    from ddm.islands.train import check_number
    from ddm.training.writers import parse_writer

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
    writer_choice = None
    if log is not None:
        writer_choice = parse_writer(log, folder)
    if seed_only:
        _train_seed(islands, settings, writer_choice)
        say(f"Next: ddm train {quote(str(folder))}")
        return
    if island is not None:
        check_number(islands, island)
        _train(islands, island, settings, writer_choice, num_left=0)
        busy_islands: set[int] = set()
    else:
        if islands.start_from_seed and not islands.seed.is_trained:
            _train_seed(islands, settings, writer_choice)
        busy_islands = _train_all(islands, missing_islands(islands), settings, writer_choice)

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


def _say_status(folder: Path, *, as_json: bool) -> None:
    """Say how far the seed and each island are; a picture of each curve is for people at a terminal."""
    from ddm.islands.folder import Islands
    from ddm.training.curves import describe_curve
    from ddm.training.metrics import read_metrics

    islands = Islands(folder)
    trainings: list[tuple[str, int, TrainingFolder]] = []
    if islands.start_from_seed:
        num_images = sum(island.num_images for island in islands.split.islands)
        trainings.append(("seed", num_images, islands.seed))
    for number, island in enumerate(islands.split.islands):
        trainings.append((f"{number}", island.num_images, islands.island(number)))
    rows = []
    listed = []
    for name, num_images, training in trainings:
        # The first place has the curve while the training continues, the second one afterwards.
        curve = read_metrics(training.job.metrics) or read_metrics(training.metrics)
        state = "not begun"
        if training.is_trained:
            state = "trained"
        elif curve:
            state = "begun"
        last_line = None
        if curve:
            last_line = curve[-1].model_dump(mode="json")
        listed.append({"island": name, "num_images": num_images, "state": state, "last": last_line})
        words = ""
        if curve:
            words = describe_curve(curve, draws_bars=sys.stdout.isatty())
        rows.append((name, num_images, state, words))
    if as_json:
        say(json.dumps({"islands": listed}))
        return
    say(table(rows, ("island", "images", "state", "learning curve")))


@contextmanager
def _follow_training(
    training: "TrainingFolder",
    name: str,
    writer_choice: "WriterChoice | None",
    show_progress: ProgressCallback,
) -> "Iterator[Callable[[Progress], None]]":
    """Yield a function that shows the progress of a training and passes its learning curve to the writer."""
    if writer_choice is None:
        yield lambda reached: show_progress(reached.step, reached.num_steps)
        return
    from ddm.training.metrics import MetricsForwarder
    from ddm.training.writers import open_writer

    writer = open_writer(writer_choice, name)
    forwarder = MetricsForwarder(writer)

    def show_and_forward(reached: "Progress") -> None:
        show_progress(reached.step, reached.num_steps)
        forwarder.forward(training.job.metrics)

    try:
        yield show_and_forward
        # The file has moved there with the expert, and its last lines may be later than the last report.
        forwarder.forward(training.metrics, from_start=True)
    finally:
        writer.close()


def _train_seed(
    islands: "Islands", settings: TrainingSettings, writer_choice: "WriterChoice | None"
) -> None:
    """Train the seed that all islands start from, and say how it went."""
    from ddm.islands.train import train_seed

    with (
        progress("seed") as show_progress,
        _follow_training(islands.seed, "seed", writer_choice, show_progress) as on_progress,
        stop_on_first_signal() as stop,
    ):
        record = train_seed(
            islands,
            settings,
            on_progress=on_progress,
            should_stop=stop.is_set,
        )
    say(
        f"Seed: {record.steps} steps on the {record.num_images} images of all islands in "
        f"{human_seconds(record.training.seconds)}, loss {record.training.loss:.4f}."
    )


def _train_all(
    islands: "Islands",
    numbers: list[int],
    settings: TrainingSettings,
    writer_choice: "WriterChoice | None",
) -> set[int]:
    """Train islands one after the other; return those that another process trains meanwhile."""
    busy_islands = set()
    for position, number in enumerate(numbers, start=1):
        label = f"{position} of {len(numbers)}" if len(numbers) > 1 else None
        try:
            _train(
                islands,
                number,
                settings,
                writer_choice,
                num_left=len(numbers) - position,
                label=label,
            )
        # Several processes may share the islands of one folder: each takes those that no other one trains.
        except BusyError as error:
            busy_islands.add(number)
            say(f"note: {error.subject} is being trained by another process.", error=True)
    return busy_islands


def _train(
    islands: "Islands",
    number: int,
    settings: TrainingSettings,
    writer_choice: "WriterChoice | None",
    *,
    num_left: int,
    label: str | None = None,
) -> None:
    """Train one island, and say how it went."""
    from ddm.islands.train import train_island

    progress_label = f"island {number}" if label is None else f"island {number} ({label})"
    with (
        progress(progress_label) as show_progress,
        _follow_training(
            islands.island(number), f"island-{number}", writer_choice, show_progress
        ) as on_progress,
        stop_on_first_signal() as stop,
    ):
        record = train_island(
            islands,
            number,
            settings,
            on_progress=on_progress,
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
