"""The command `silo scan`: look through images before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from ddm.system.console import say
from silo.commands.options import ColumnOption, MaybeSiteArgument
from silo.config import ImagesSettings, Site


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

    settings = scan_images(
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
    if site is not None and data is None:
        _hold(Site(site), private, settings, quiet=as_json)


def _hold(site: Site, private: Path | None, settings: ImagesSettings, *, quiet: bool) -> None:
    """Hold a site's data, scanned with these settings, against what policy.toml declares, or say what it could."""
    from silo.data.declared import check_values, facts_of
    from silo.images.scan import FOLDER

    path, policy = Path(site.settings().data), site.policy()
    if policy.data.kind is None and quiet:
        return
    if policy.data.kind is None:
        facts = facts_of(path).model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        words = ", ".join(f"{name} = {value!r}" for name, value in facts.items())
        say(f"\npolicy.toml declares nothing of these data under [data], by which plans are judged. It could: {words}")
        return
    num = check_values(path, policy, private or site.private / FOLDER, settings, lambda done: None)
    if not quiet:
        say(f"\nThe data are what policy.toml declares under [data]: {num} images, at least {policy.least_images}.")
