"""The command `aggregator status`: show the state of a federation, once or as a page to watch."""

from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.protocol.base import now_utc
from ddm.system.console import say

DEFAULT_ADDRESS = "127.0.0.1:8765"
_PAGE = "The page"


def status(
    fed: FederationArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve a page to watch, until Ctrl-C.", rich_help_panel=_PAGE),
    ] = False,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where --serve listens; port 0 for any free one.",
            rich_help_panel=_PAGE,
        ),
    ] = DEFAULT_ADDRESS,
    expose: Annotated[
        bool,
        typer.Option(
            "--expose",
            help="Let --serve listen where others reach it; the page needs no password.",
            rich_help_panel=_PAGE,
        ),
    ] = False,
) -> None:
    """Show silos, submissions, processes and expiries, from the folder alone."""
    federation = Federation(fed).require()
    if serve:
        if as_json:
            remedy = "Leave one out; the page has the same facts at /status.json."
            raise SetupError(
                "--json", expected="--json or --serve", got="--json and --serve", remedy=remedy
            )
        _serve(federation, address, expose)
        return
    from aggregator.monitoring.labels import status_text
    from aggregator.monitoring.status import read_status

    found = read_status(federation, now_utc())
    say(found.model_dump_json(indent=2) if as_json else status_text(found))


def _serve(federation: Federation, address: str, expose: bool) -> None:
    from aggregator.monitoring.live import parse_address
    from aggregator.monitoring.live import serve as serve_page

    host, port = parse_address(address, expose=expose)
    if expose:
        say(
            "WARNING: whoever reaches this port sees the silos' names, states and sizes, why submissions were refused, "
            "releases, process ids and expiries. The page needs no password and is not encrypted.",
            error=True,
        )
    serve_page(federation, host, port, lambda url: say(f"Live page: {url} (Ctrl-C ends it)"))
