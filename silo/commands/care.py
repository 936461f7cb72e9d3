"""Commands that look after a site: `silo check`, `silo ledger` and `silo log`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import DecisionLogError, MissingFileError, SetupError
from ddm.system.console import say, table
from silo.commands.options import JsonOption, SiteArgument
from silo.config import Site

if TYPE_CHECKING:
    from silo.decisions import DecisionLog
    from silo.privacy.ledger import Ledger


def check(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Look over site and machine: what is wrong or soon will be, and what to do; exit code 3 if anything fails."""
    from ddm.system.findings import tell
    from silo.check.reading import SiteFactsReader
    from silo.check.rules import examine

    if not tell(examine(SiteFactsReader(Site(site).require()).facts()), as_json=as_json):
        raise typer.Exit(SetupError.exit_code)


ledger = typer.Typer(
    no_args_is_help=True, help="Read the privacy ledger, which is never edited by hand."
)


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
        Path,
        typer.Argument(
            metavar="FILE", dir_okay=False, help="On another disk, in a folder that exists."
        ),
    ],
) -> None:
    """Keep the ledger's head in a file on another disk from now on, so that an older ledger draws nothing."""
    from silo.setup import set_anchor

    path = file.resolve()
    set_anchor(Site(site).require(), path)
    say(
        f"The ledger's head is in {path}, and silo.toml names it. Keep it out of the backups of the site."
    )


log = typer.Typer(
    no_args_is_help=True, help="Read the log of decisions, which is never edited by hand."
)


@log.command("show")
def show_log(
    site: SiteArgument,
    as_json: JsonOption = False,
) -> None:
    """Show who decided what about this site, and when."""
    from silo.decisions import in_words

    entries = _decisions(site).entries
    if as_json:
        records = [entry.record.model_dump(mode="json", exclude={"format"}) for entry in entries]
        say(
            json.dumps(
                [
                    {"digest": entry.digest, **each}
                    for entry, each in zip(entries, records, strict=True)
                ]
            )
        )
    else:
        say(table(in_words(entries), ("when", "who", "what")))


@log.command("verify")
def verify_log(
    site: SiteArgument,
    holds: Annotated[
        str | None,
        typer.Option(
            "--holds", metavar="HEAD", help="A head noted earlier, which must still be in it."
        ),
    ] = None,
) -> None:
    """Verify every decision, their chain and its head."""
    log = _decisions(site)
    entries = log.entries
    if holds is not None and holds not in {entry.digest for entry in entries}:
        expected = f"the record {holds[:16]} among its records"
        raise DecisionLogError("decision log", expected=expected, got=f"{len(entries)} others")
    say(f"{len(entries)} decisions, unbroken. Head: {log.head[0]}")


def _decisions(site: Path) -> "DecisionLog":
    from silo.decisions import DecisionLog

    place = Site(site).require()
    remedy = "It is made with the first decision, and when the worker starts: silo run SITE."
    found = DecisionLog(place)
    if not found.folder.is_dir():
        raise MissingFileError(
            str(found.folder),
            expected="this site's log of decisions",
            got="nothing there",
            remedy=remedy,
        )
    return found


def _ledger(site: Path) -> "Ledger":
    from silo.privacy.holder import open_ledger

    place = Site(site).require()
    return open_ledger(place, place.policy())
