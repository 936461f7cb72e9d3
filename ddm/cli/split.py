"""The command `ddm split`: divide one owner's data set into islands, each a folder that is trained by itself."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import OWN_KEYS, PassphraseOption
from ddm.errors import SetupError
from ddm.system.console import (
    NewPassphraseOption,
    choose_passphrase_file,
    passphrase,
    progress,
    say,
    table,
)

if TYPE_CHECKING:
    from ddm.islands.folder import Split


def split(
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Images: an npz, or an idx file with its labels beside it."
        ),
    ],
    recipe: Annotated[
        Path, typer.Option(metavar="FILE", help="Recipe, a TOML file as for `aggregator plan`.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    islands: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1024,
            help="Number of islands (default: clustering.num_coarse, or the column's values).",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help=(
                "How to split: clusters (of features), random, or the name of a column "
                "(default: clusters, or as in the recipe)."
            ),
        ),
    ] = None,
    seed_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the training for a seed on all images, from which the islands start (default: none).",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    new_passphrase_file: NewPassphraseOption = None,
) -> None:
    """Divide a data set into islands, and sign the plan by which each is trained."""
    from pydantic import ValidationError

    from ddm.io.settings import load_settings, settings_error
    from ddm.islands.data import Dataset
    from ddm.islands.recipe import IslandsRecipe
    from ddm.islands.split import split as divide

    added: dict[str, object] = {}
    if seed_share is not None:
        _check_seed_share(seed_share)
        added["base"] = {"kind": "seed", "share": seed_share}
    islands_recipe = load_settings(IslandsRecipe, recipe, added=added)
    if by is None:
        # A federation's recipe may be used here: its partition `random` is the control for clusters, and means the
        # same.
        by = "random" if islands_recipe.partition.kind == "random" else "clusters"
    dataset = Dataset.read(data, islands_recipe.data, islands_recipe.transform)
    for remark in dataset.remarks():
        say(f"Data: {remark}")
    # Asked for before the minutes that fitting takes.
    passphrase_file = choose_passphrase_file(passphrase_file, new_passphrase_file)
    secret = passphrase(passphrase_file, None, OWN_KEYS, is_new=True)
    num_images = len(dataset.images)
    num_fitted = min(num_images, islands_recipe.owner.fit_images)
    say(
        f"Fitting encoder and clusters on {num_fitted} of {num_images} images, then dividing all of them …"
    )
    try:
        with progress("Encoding images") as show_progress:
            record = divide(dataset, islands_recipe, islands, by, out, secret, show_progress)
    except ValidationError as error:
        # What only shows when the recipe meets the rest of the plan, e.g. a patch that does not divide the image.
        raise settings_error(recipe, error) from error

    say(_islands_table(record))
    if record.column:
        num_joined = dataset.values(record.column).num_joined
        if num_joined:
            say(
                f"Spellings that differ in case or blanks alone are one island: {num_joined} were joined to another."
            )
    if islands_recipe.not_used:
        tables = ", ".join(f"[{name}]" for name in islands_recipe.not_used)
        say(f"Not used, since one owner has all of the data: {tables} of the recipe.")
    if record.training_from_seed is not None:
        num_steps = record.training_from_seed.num_steps
        say(
            f"Training begins with the seed, on all images; each island then makes {num_steps} steps in place of "
            f"{islands_recipe.expert.training.num_steps}."
        )
    say(
        f"The licence of its releases is {islands_recipe.owner.licence} (`licence` in [owner] of the recipe)."
    )
    say(f"Plan {record.plan_id} in {out}. Next: ddm train {quote(str(out))}")


def _check_seed_share(share: float) -> None:
    """Refuse a share that leaves nothing to the seed or to the islands.

    Raises:
        SetupError: not above 0 and below 1.
    """
    # NaN is neither.
    if not 0 < share < 1:
        raise SetupError(
            "--seed-share",
            expected="a number above 0 and below 1",
            got=f"{share:g}",
            remedy="Give a share such as 0.25, or leave --seed-share out.",
        )


def _islands_table(record: "Split") -> str:
    """List the islands, with the column's value of each where a column divides them."""
    if record.column is None:
        sizes = [(island.island_id, island.num_images) for island in record.islands]
        return table(sizes, ("island", "images"))
    rows = [(island.island_id, island.value, island.num_images) for island in record.islands]
    return table(rows, ("island", record.column, "images"))
