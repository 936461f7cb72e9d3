"""Commands that look after a site: `silo check` and `silo ledger`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ddm.errors import SetupError
from ddm.io.files import require_file
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


def _ledger(site: Path) -> "Ledger":
    from silo.worker.stages import open_ledger

    place = Site(site).require()
    require_file(place.ledger_path, "this site's ledger", "It is made when the first plan is paid for: silo run SITE.")
    return open_ledger(place, place.policy())
