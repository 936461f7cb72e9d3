"""The command `aggregator doctor`: find what is wrong with a federation, or soon will be."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.protocol.base import now_utc
from ddm.system.console import say


def doctor(
    fed: FederationArgument,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the clock with this web server's; nothing else is sent.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Check what commonly goes wrong; exit code 0 if all is well, 3 otherwise."""
    from aggregator.monitoring.doctor import examine
    from aggregator.monitoring.probes import Gathering

    found = examine(Gathering(Federation(fed).require(), now_utc()).facts(against))
    num_findings = sum(map(len, found.values()))
    if as_json:
        say(
            json.dumps(
                {check: [asdict(finding) for finding in findings] for check, findings in found.items()}, indent=2
            )
        )
    else:
        for check, findings in found.items():
            say(f"{'ok ' if not findings else 'NO '} {check}")
            for finding in findings:
                say(f"      {finding.subject}")
                say(f"        expected: {finding.expected}")
                say(f"        found:    {finding.got}")
                say(f"        to do:    {finding.remedy}")
        say(f"{len(found)} checks, {num_findings or 'nothing'} found.")
    if num_findings:
        raise typer.Exit(SetupError.exit_code)
