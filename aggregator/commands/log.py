"""The command `aggregator log`: signs what waits in the federation's log, and writes its public form."""

from pathlib import Path
from typing import Annotated

import typer

from aggregator.commands.options import FederationArgument, PassphraseOption, federation_passphrase
from aggregator.config import Federation
from ddm.system.console import say


def log(
    fed: FederationArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another public copy to bring up to date, for a web server.")
    ] = None,
    cosigned: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The last checkpoint as witnesses cosigned it; keeps theirs.")
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Sign what waits in the transparency log, and write its public form."""
    from ddm.publishing.keys import load_key
    from ddm.publishing.public_log import add_cosignatures, export_log, public_folder, sign_waiting

    federation = Federation(fed).require()
    if cosigned is not None:
        say(f"Added {add_cosignatures(federation, cosigned)} signatures to the checkpoint.")
    else:
        sign_waiting(federation, load_key(federation, "log", federation_passphrase(federation, passphrase_file)))
    folder = public_folder(federation)
    if out is not None:
        export_log(federation, out)
        folder = out
    say(f"The public log is in {folder}; serve it as static files.")
    say(f"Anybody: ddm log {folder} --root {federation.tuf / '1.root.json'}")
