"""The command `ddm train`: train one island, or all that are not trained yet."""

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import DeviceOption, IslandsArgument
from ddm.errors import BusyError
from ddm.system.console import human_seconds, progress, say
from ddm.system.signals import stop_on_first_signal

if TYPE_CHECKING:
    from ddm.islands.folder import Islands, TrainedIsland
    from ddm.training.config import TrainingSettings


def train(
    folder: IslandsArgument,
    island: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Only this one, as in a scheduler's array job."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="How many share an island's work.")
    ] = 1,
    device: DeviceOption = "auto",
) -> None:
    """Train an island's expert, or those of all islands; run again to continue where it stopped."""
    from ddm.islands.assemble import missing_islands
    from ddm.islands.folder import Islands
    from ddm.islands.train import check_number, is_first_process
    from ddm.training.config import TrainingSettings

    islands, settings = Islands(folder), TrainingSettings(device=device, processes=processes)
    num = len(islands.split.islands)
    if island is not None:
        check_number(islands, island)
    wanted = missing_islands(islands) if island is None else [island]
    elsewhere: list[int] = []
    for place, number in enumerate(wanted):
        try:
            done = _train(
                islands,
                number,
                settings,
                f"{place + 1} of {len(wanted)}" if len(wanted) > 1 else None,
            )
        except BusyError as error:
            if island is not None:
                raise
            elsewhere.append(number)
            say(f"note: {error.subject} is being trained by another process.", error=True)
            continue
        if done is not None:
            took = human_seconds(done.training.seconds)
            left = len(wanted) - place - 1
            more = (
                f" About {human_seconds(left * done.training.seconds)} for the {left} left."
                if left
                else ""
            )
            say(
                f"Island {number}: {done.steps} steps in {took}, loss {done.training.loss:.4f}.{more}"
            )
    if not is_first_process():
        return
    missing = missing_islands(islands)
    if not missing:
        say(f"All {num} islands are trained. Next: ddm assemble {quote(str(folder))} --out RELEASE")
    elif island is None:
        others = len({*elsewhere} & {*missing})
        say(f"{num - len(missing)} of {num} islands are trained; other processes train {others}.")


def _train(
    islands: "Islands", number: int, settings: "TrainingSettings", place: str | None
) -> "TrainedIsland | None":
    from ddm.islands.train import train_island

    label = f"island {number}" + (f" ({place})" if place else "")
    with progress(label) as tell, stop_on_first_signal() as stop:
        return train_island(
            islands,
            number,
            settings,
            on_progress=lambda reached: tell(reached.step, reached.num_steps),
            should_stop=stop.is_set,
        )
