"""What the aggregator's commands share: the federation's folder, and how its passphrase is found."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aggregator.config import Federation
from ddm.errors import SetupError
from ddm.system.console import passphrase
from ddm.trust.keys import PublicKey

if TYPE_CHECKING:
    from ddm.trust.drafts import Holders

FederationArgument = Annotated[Path, typer.Argument(metavar="FED", file_okay=False, help="The federation's folder.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", metavar="FILE", help="First line opens the federation's keys.")
]


def federation_passphrase(federation: Federation, path: Path | None) -> bytes:
    """Read the passphrase of the federation's keys: from `path`, else as federation.toml says, else ask."""
    return passphrase(path, federation.settings().passphrase_file, "Passphrase of the federation's keys")


def holders_from(paths: Sequence[Path] | None, threshold: int) -> "Holders | None":
    """Read the holders whom an operator names by their `.pub` files; None where none is named.

    Raises:
        SetupError: a threshold without holders, one that cannot be met, or one key twice.
        DocumentError: a file that is no public key.
    """
    from ddm.trust.drafts import Holders

    if paths:
        return Holders(tuple(PublicKey.load(path) for path in paths), threshold)
    if threshold != 1:
        raise SetupError("threshold", expected="the holders' public keys with it", got="none")
    return None
