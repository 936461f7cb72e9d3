"""Commands that look after a site: `silo check` and `silo ledger`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import SetupError
from ddm.system.console import say
from silo.commands.options import JsonOption, SiteArgument
from silo.config import Site

if TYPE_CHECKING:
    from silo.privacy.ledger import Ledger


def check(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Look over site and machine: what is wrong or soon will be, and what to do; exit code 3 if anything fails."""
    from ddm.system.findings import tell
    from silo.check.gathering import Gathering
    from silo.check.rules import examine

    if not tell(examine(Gathering(Site(site).require()).facts()), as_json=as_json):
        raise typer.Exit(SetupError.exit_code)


ledger = typer.Typer(no_args_is_help=True, help="Read the privacy ledger, which is never edited by hand.")


@ledger.command()
def show(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Show what was spent, plan by plan, and what is left of the site's budget."""
    from silo.privacy.account import account

    found = account(_ledger(site))
    say(json.dumps(found.as_json(), indent=2) if as_json else found.text())


@ledger.command()
def verify(site: SiteArgument) -> None:
    """Verify every record, their chain and its head."""
    head, num, _ = _ledger(site).head
    say(f"{num} records, unbroken. Head: {head}")


@ledger.command()
def anchor(
    site: SiteArgument,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", dir_okay=False, help="On another disk, in a folder that exists.")
    ],
) -> None:
    """Keep the ledger's head in a file on another disk from now on, so that an older ledger draws nothing."""
    from silo.setup import set_anchor

    path = file.resolve()
    set_anchor(Site(site).require(), path)
    say(f"The ledger's head is in {path}, and silo.toml names it. Keep it out of the backups of the site.")


def _ledger(site: Path) -> "Ledger":
    from silo.privacy.holder import open_ledger

    place = Site(site).require()
    return open_ledger(place, place.policy())
