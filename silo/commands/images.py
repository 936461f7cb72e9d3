"""The command `silo scan`: examine images before anything is trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.system.console import say
from silo.commands.options import ColumnOption, MaybeSiteArgument, OutsideOption
from silo.config import Policy, Site

if TYPE_CHECKING:
    from silo.images.source import ImageSource


def scan(
    site: MaybeSiteArgument = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images: a folder of any depth, a CSV or Parquet table of paths, or one file."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only counts, as JSON.")] = False,
    column: ColumnOption = None,
    outside: OutsideOption = False,
    private: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for results (default: in the site, or ~/.local/state)."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Number of decoder processes (default: one per core)."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            min=512, max=1 << 20, help="Memory limit of each decoder in MiB (default: 4096)."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1, max=86400, help="Time limit for each file, plus one second per MB (default: 60)."
        ),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            dir_okay=False,
            help="Picture to write: accepted images before and after the transform of --plan.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="A recipe or a plan with a table transform."
        ),
    ] = None,
) -> None:
    """Examine images before training: what is there, what cannot be used, what a person must see."""
    from silo.images.command import image_source, read_columns, review_command_of, scan_images

    scan_settings = {
        # None leaves what silo.toml says in force.
        "columns": read_columns(column) if column else None,
        "outside": outside or None,
        "memory_mib": memory,
        "seconds": seconds,
        "processes": processes,
    }
    source = image_source(site, data, private, scan_settings)
    # With --data the site lends its settings alone: these are not the images that its policy declares.
    of_site = site is not None and data is None
    review_command = review_command_of(site, data, private)
    scan_images(
        source,
        of_site=of_site,
        as_json=as_json,
        review_command=review_command,
        preview=preview,
        plan=plan,
    )
    if site is not None and of_site:
        _compare_with_policy(source, Site(site).policy(), quiet=as_json)


def _compare_with_policy(source: "ImageSource", policy: Policy, *, quiet: bool) -> None:
    """Check a site's data, which were scanned, against what policy.toml declares; or say what it could declare."""
    from silo.data.declared import check_values, facts_of

    if policy.data.kind is None:
        if not quiet:
            facts = facts_of(source).model_dump(
                mode="json", exclude_none=True, exclude_defaults=True
            )
            words = ", ".join(f"{name} = {value!r}" for name, value in facts.items())
            say(
                "\nThe table [data] of policy.toml does not declare these data. Plans are compared with it."
            )
            say(f"For these data it could contain: {words}")
        return
    # Raises where a declaration is wrong: plans are accepted by the declaration, before any image is read.
    num = check_values(source, policy)
    if not quiet:
        say(
            f"\nThe data match the table [data] of policy.toml: {num} images, at least {policy.min_images}."
        )
