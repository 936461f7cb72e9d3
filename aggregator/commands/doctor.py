"""The command `aggregator doctor`: find what is wrong with a federation, or soon will be."""

from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.protocol.base import now_utc
from ddm.system.findings import print_findings


def doctor(
    fed: FederationArgument,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Compare the clock with that of this web server; nothing else is sent.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Check for common problems; exit code 0 if there is none, 3 otherwise."""
    from aggregator.monitoring.doctor import examine
    from aggregator.monitoring.probes import FederationFactsReader

    reader = FederationFactsReader(Federation(fed).require(), now_utc())
    findings = examine(reader.facts(against))
    # A finding is not an error of this command. It is printed above, and the exit code tells scripts.
    if not print_findings(findings, as_json=as_json):
        raise typer.Exit(SetupError.exit_code)
