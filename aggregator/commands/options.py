"""The options that several commands of `aggregator` share, and how they are read."""

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

FederationArgument = Annotated[
    Path, typer.Argument(metavar="FED", file_okay=False, help="The federation's folder.")
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="File whose first line is the passphrase of the federation's keys.",
    ),
]


def federation_passphrase(federation: Federation, path: Path | None) -> bytes:
    """Read the passphrase of the federation's keys: from `path`, else as federation.toml says, else by asking."""
    return passphrase(
        path, federation.settings().passphrase_file, "Passphrase of the federation's keys"
    )


def holders_from(paths: Sequence[Path] | None, threshold: int, flag: str) -> "Holders | None":
    """Read the holders whom an operator names by their `.pub` files; None where no file is named.

    Args:
        paths: the files.
        threshold: how many of these holders must sign.
        flag: what errors call the threshold.

    Raises:
        SetupError: a threshold without holders or above their number, or the same key twice.
        DocumentError: a file is not a public key.
    """
    from ddm.trust.drafts import Holders

    if paths:
        public_keys = tuple(PublicKey.load(path) for path in paths)
        return Holders(public_keys, threshold)
    # A threshold without holders would change nothing, and its user would believe that it had.
    if threshold != 1:
        raise SetupError(
            flag,
            expected="the holders' public keys as well",
            got=f"{threshold} without a holder",
        )
    return None
