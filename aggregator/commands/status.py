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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print metrics in the text format of Prometheus.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="List every silo, even if many are in the same state.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve a live web page until Ctrl-C.", rich_help_panel=_PAGE),
    ] = False,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the page; port 0 takes a free one.",
            rich_help_panel=_PAGE,
        ),
    ] = DEFAULT_ADDRESS,
    expose: Annotated[
        bool,
        typer.Option(
            "--expose",
            help="Allow an address that other machines can reach; the page has no password.",
            rich_help_panel=_PAGE,
        ),
    ] = False,
) -> None:
    """Show silos, submissions, processes and expiry dates, from the federation's folder alone."""
    federation = Federation(fed).require()
    outputs = {"--json": as_json, "--metrics": metrics, "--serve": serve}
    chosen = [name for name, is_chosen in outputs.items() if is_chosen]
    if len(chosen) > 1:
        raise SetupError(
            chosen[0],
            expected="one of --json, --metrics and --serve",
            got=" and ".join(chosen),
            remedy="Leave one out; the page has the same facts at /status.json and /metrics.",
        )
    if serve:
        _serve(federation, address, expose)
        return
    from aggregator.monitoring.labels import status_text
    from aggregator.monitoring.status import read_status

    federation_status = read_status(federation, now_utc())
    if as_json:
        say(federation_status.model_dump_json(indent=2))
    elif metrics:
        from aggregator.monitoring.prometheus import prometheus_text

        say(prometheus_text(federation_status).removesuffix("\n"))
    else:
        say(status_text(federation_status, show_all=show_all))


def _serve(federation: Federation, address: str, expose: bool) -> None:
    from aggregator.monitoring.live import parse_address
    from aggregator.monitoring.live import serve as serve_page

    host, port = parse_address(address, expose=expose)
    # Said although the operator asked for it: the page names silos and why they were refused.
    if expose:
        say(
            "WARNING: whoever reaches this port sees the silos' names, states and sizes, why submissions were refused, "
            "releases, process ids and expiries. The page needs no password and is not encrypted.",
            error=True,
        )
    serve_page(federation, host, port, lambda url: say(f"Live page: {url} (Ctrl-C ends it)"))
