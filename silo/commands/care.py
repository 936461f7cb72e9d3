"""Commands that look after a site: `silo check`, `silo ledger` and `silo log`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.errors import DecisionLogError, MissingFileError, SetupError
from ddm.system.console import say, table
from silo.commands.options import JsonOption, MaybeSiteArgument, SiteArgument
from silo.config import Site

if TYPE_CHECKING:
    from silo.decisions import DecisionLog
    from silo.privacy.ledger import Ledger


def check(
    site: MaybeSiteArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Check site and machine for present and coming problems, with a remedy for each; exit code 3 if a check fails.

    Without a site the command checks the machine alone.
    """
    from ddm.system.findings import print_findings
    from silo.check.reading import SiteFactsReader, read_machine
    from silo.check.rules import examine, examine_machine

    if site is None:
        findings = examine_machine(read_machine())
    else:
        findings = examine(SiteFactsReader(Site(site).require()).facts())
    # A finding is not an error of this command. It is printed above, and the exit code tells scripts.
    if not print_findings(findings, as_json=as_json):
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

    budget = account(_ledger(site))
    if as_json:
        say(json.dumps(budget.as_json(), indent=2))
    else:
        say(budget.text())


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
            metavar="FILE", dir_okay=False, help="File on another disk, in a folder that exists."
        ),
    ],
) -> None:
    """Keep the ledger's head in a file on another disk, so that a restored older ledger cannot be used."""
    from silo.setup import set_anchor

    # silo.toml keeps the absolute path: the worker may be started in another folder.
    path = file.resolve()
    # A ledger that is put back together with its head looks genuine; only a file elsewhere shows it (docs/adr/0050).
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
    from silo.decisions import describe_decisions

    entries = _decisions(site).entries
    if not as_json:
        say(table(describe_decisions(entries), ("when", "who", "what")))
        return
    rows = []
    for entry in entries:
        record = entry.record.model_dump(mode="json", exclude={"format"})
        rows.append({"digest": entry.digest, **record})
    say(json.dumps(rows))


@log.command("verify")
def verify_log(
    site: SiteArgument,
    holds: Annotated[
        str | None,
        typer.Option(
            "--holds",
            metavar="HEAD",
            help="Head that was noted earlier; the log must still contain it.",
        ),
    ] = None,
) -> None:
    """Verify every decision, their chain and its head."""
    decisions = _decisions(site)
    entries = decisions.entries
    # A chain that verifies may still lack its end: only a head that was noted elsewhere shows that.
    if holds is not None and holds not in {entry.digest for entry in entries}:
        expected = f"the record {holds[:16]} among its records"
        raise DecisionLogError("decision log", expected=expected, got=f"{len(entries)} others")
    say(f"{len(entries)} decisions, unbroken. Head: {decisions.head[0]}")


def _decisions(site: Path) -> "DecisionLog":
    from silo.decisions import DecisionLog

    decisions = DecisionLog(Site(site).require())
    if not decisions.folder.is_dir():
        raise MissingFileError(
            str(decisions.folder),
            expected="this site's log of decisions",
            got="nothing there",
            remedy="It is made with the first decision, and when the worker starts: `silo run SITE`.",
        )
    return decisions


def _ledger(site: Path) -> "Ledger":
    from silo.privacy.holder import open_ledger

    opened_site = Site(site).require()
    return open_ledger(opened_site, opened_site.policy())
