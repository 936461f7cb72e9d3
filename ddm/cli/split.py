"""The command `ddm split`: divide one owner's data set into islands, each a folder that is trained by itself."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from ddm.cli.options import OWN_KEYS, PassphraseOption
from ddm.system.console import passphrase, progress, say, table


def split(
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="npz of images, or idx with its labels beside it.")
    ],
    recipe: Annotated[Path, typer.Option(metavar="FILE", help="TOML, as for `aggregator plan`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    islands: Annotated[
        int | None,
        typer.Option(
            min=2, max=1024, help="How many; default: clustering.num_coarse, or a column's values."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="clusters of features, random, or the name of a column; default: clusters, or as the recipe says.",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Divide a data set into islands, and sign the plan by which each is trained."""
    from pydantic import ValidationError

    from ddm.io.settings import load_settings, settings_error
    from ddm.islands.data import Dataset
    from ddm.islands.recipe import IslandsRecipe
    from ddm.islands.split import split as divide

    chosen = load_settings(IslandsRecipe, recipe)
    way = by or ("random" if chosen.partition.kind == "random" else "clusters")
    dataset = Dataset.read(data, chosen.data, chosen.transform)
    for remark in dataset.remarks():
        say(f"Data: {remark}")
    secret = passphrase(passphrase_file, None, OWN_KEYS, confirm=True)
    num, some = len(dataset.images), min(len(dataset.images), chosen.owner.fit_images)
    say(f"Fitting encoder and clusters on {some} of {num} images, then dividing all of them …")
    try:
        with progress("Encoding images") as tell:
            done = divide(dataset, chosen, islands, way, out, secret, tell)
    except ValidationError as error:
        # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
        raise settings_error(recipe, error) from error
    rows = [
        (island.island_id, *([island.value] if done.column else []), island.num_images)
        for island in done.islands
    ]
    say(table(rows, ("island", *([done.column] if done.column else []), "images")))
    if done.column:
        num_joined = dataset.values(done.column).num_joined
        if num_joined:
            say(
                f"Spellings that differ in case or blanks alone are one island: {num_joined} were joined to another."
            )
    if chosen.not_used:
        say(
            f"Not used, since one owner has all of the data: [{'], ['.join(chosen.not_used)}] of the recipe."
        )
    say(f"Plan {done.plan_id} in {out}. Next: ddm train {quote(str(out))}")
