"""The command `silo scan`: look through images before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from silo.commands.options import ColumnOption, MaybeSiteArgument


def scan(
    site: MaybeSiteArgument = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images: a folder of any depth, a CSV or Parquet table of paths, or one file. No site needed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: counts alone.")] = False,
    column: ColumnOption = None,
    private: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where to remember results; default: in the site, or ~/.local/state."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, max=256, help="That decode; default: one a core.")] = None,
    memory: Annotated[
        int | None, typer.Option(min=512, max=1 << 20, help="Most address space of a decoder, MiB; default: 4096.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=86400, help="Most that a file may take, and one more for each of its MB; default: 60."),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", dir_okay=False, help="Draw accepted images before and after --plan."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="A recipe or a plan with a table transform.")
    ] = None,
) -> None:
    """Look through images before anything is trained: what is there, what cannot be used, what a person must see."""
    from silo.images.command import scan_images

    scan_images(
        site,
        data,
        column or [],
        private,
        processes=processes,
        memory=memory,
        seconds=seconds,
        as_json=as_json,
        preview=preview,
        plan=plan,
    )
