"""The command `aggregator doctor`: find what is wrong with a federation, or soon will be."""

from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.protocol.base import now_utc
from ddm.system.findings import tell


def doctor(
    fed: FederationArgument,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Compare the clock with this web server's; nothing else is sent."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Check what commonly goes wrong; exit code 0 if all is well, 3 otherwise."""
    from aggregator.monitoring.doctor import examine
    from aggregator.monitoring.probes import FederationFactsReader

    found = examine(FederationFactsReader(Federation(fed).require(), now_utc()).facts(against))
    if not tell(found, as_json=as_json):
        raise typer.Exit(SetupError.exit_code)
