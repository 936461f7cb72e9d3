"""The command `aggregator service`: writes the files by which a federation runs as a service."""

from pathlib import Path
from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument
from aggregator.config import Federation
from ddm.system.console import say


def service(
    fed: FederationArgument,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write the files into.")],
    user: Annotated[
        str, typer.Option(metavar="NAME", help="User who will own the federation's folder.")
    ] = ("archipelago"),
) -> None:
    """Write the files that run `aggregator run` as a systemd service of its own user; nothing else is changed."""
    from aggregator.services.units import service_files
    from ddm.services.units import write_services

    # Written for a person to read and install as root: this command has no such rights, and needs none (docs/adr/0046).
    files = service_files(Federation(fed).require(), user)
    write_services(out, files)
    say(f"Written to {out}: {', '.join(sorted(files))}.")
    say(
        f"As root, after reading them: sh {out / 'prepare.sh'}; cp {out}/*.service /etc/systemd/system/; "
        "systemctl daemon-reload; systemctl enable --now of the unit."
    )
