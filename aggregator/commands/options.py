"""What the aggregator's commands share: the federation's folder, and how its passphrase is found."""

from pathlib import Path
from typing import Annotated

import typer

from aggregator.config import Federation
from ddm.console import passphrase

FederationArgument = Annotated[Path, typer.Argument(metavar="FED", file_okay=False, help="The federation's folder.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", metavar="FILE", help="First line opens the federation's keys.")
]


def federation_passphrase(federation: Federation, path: Path | None) -> bytes:
    """Read the passphrase of the federation's keys: from `path`, else as federation.toml says, else ask."""
    return passphrase(path, federation.settings().passphrase_file, "Passphrase of the federation's keys")
