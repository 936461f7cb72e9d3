"""The command `aggregator base`: train the base of a recipe on public images."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.system.console import human_bytes, human_seconds, progress, say
from ddm.system.cores import default_threads
from ddm.system.devices import DeviceName
from ddm.system.signals import stop_on_first_signal
from ddm.training.config import CHECKPOINT_S, TrainingSettings


def base(
    fed: FederationArgument,
    recipe: Annotated[
        Path,
        typer.Option(help="The recipe of the plan; its table base says how to train the base."),
    ],
    public: Annotated[
        Path, typer.Option(help="Public images in the form of the silos' images, as for the plan.")
    ],
    device: Annotated[
        DeviceName, typer.Option(help="Device to train on; auto: a GPU if there is one.")
    ] = "auto",
    processes: Annotated[
        int, typer.Option(min=1, max=4096, help="Number of processes that train together.")
    ] = 1,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command that starts these processes, with {folder} in it (default: this machine).",
        ),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --launcher: folder of the training job that all machines see.",
        ),
    ] = None,
    checkpoint_s: Annotated[
        float,
        typer.Option(
            "--checkpoint-s",
            min=0,
            max=86400,
            help="Maximum number of seconds between two checkpoints of the training.",
        ),
    ] = CHECKPOINT_S,
) -> None:
    """Train the base of a recipe on public images, and write its card; run again to continue where it stopped."""
    import torch
    from pydantic import ValidationError

    from aggregator.planning.base_training import (
        check_base_architecture,
        check_base_folder,
        read_base_images,
        train_base,
        trained_base_of,
    )
    from aggregator.planning.recipe import Recipe
    from ddm.images.samples import open_image_set
    from ddm.io.settings import first_message, load_settings
    from ddm.planning.bases import check_base_licence
    from ddm.planning.networks import open_networks

    federation = Federation(fed).require_owner()
    chosen = load_settings(Recipe, recipe)
    base_recipe = trained_base_of(chosen)
    check_base_architecture(chosen)
    check_base_folder(chosen)
    # `aggregator plan` would refuse the base after it was trained for hours.
    check_base_licence(base_recipe.licence, federation.settings().licence)
    # By themselves, torch's threads heed no cgroup.
    torch.set_num_threads(default_threads())
    try:
        settings = TrainingSettings.model_validate(
            {
                "device": device,
                "processes": processes,
                "launcher": launcher or "local",
                "jobs": jobs,
                "checkpoint_s": checkpoint_s,
            }
        )
    except ValidationError as error:
        raise SetupError(
            "--launcher, --jobs and --processes",
            expected="settings like those of [training] in a silo's silo.toml",
            got=first_message(error),
        ) from error
    # The base itself is what is missing yet.
    networks = open_networks(chosen.model_copy(update={"base": None}))
    image_set = open_image_set(public, chosen.data, chosen.transform, subject="public images")
    with progress("Encoding public images") as on_encoding:
        images = read_base_images(image_set, chosen, networks, on_encoding)
    with progress("base") as show_progress, stop_on_first_signal() as stop:
        card = train_base(
            chosen,
            images,
            federation.root_digest,
            settings,
            on_progress=lambda reached: show_progress(reached.step, reached.num_steps),
            should_stop=stop.is_set,
        )
    say(
        f"Base in {base_recipe.folder}: {card.steps} steps on {card.num_images} images in "
        f"{human_seconds(card.seconds)}, loss {card.loss:.4f}, {human_bytes(card.file.bytes)}, licence {card.licence}."
    )
    say(
        f"Next: aggregator plan {quote(str(fed))} --recipe {quote(str(recipe))} --public {quote(str(public))}"
    )
