"""The options that several commands of `silo` share, and how they are read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.io.files import require_file
from ddm.system.console import passphrase
from silo.config import Site

if TYPE_CHECKING:
    from ddm.trust.keys import SigningKey

SiteArgument = Annotated[
    Path, typer.Argument(metavar="SITE", file_okay=False, help="The site's folder.")
]
MaybeSiteArgument = Annotated[
    Path | None, typer.Argument(metavar="[SITE]", file_okay=False, help="The site's folder.")
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="File whose first line is the passphrase of the silo's key.",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COLUMN", help="A table's column for path, label, patient, split or caption."
    ),
]
OutsideOption = Annotated[
    bool,
    typer.Option(
        "--outside",
        help="Also read files outside of the data folder to which links or a table lead.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def open_key(site: Site, passphrase_file: Path | None) -> "SigningKey":
    """Open the silo's signing key."""
    from ddm.trust.keys import SigningKey

    remedy = "Restore private/silo.key from backup. Without it the silo must be enrolled again, as a new site."
    # A missing key is named before anybody types a passphrase for it.
    require_file(site.key_path, "this site's signing key", remedy)
    return SigningKey.load(site.key_path, site_passphrase(site, passphrase_file))


def site_passphrase(site: Site, passphrase_file: Path | None) -> bytes:
    """Read the passphrase of the silo's key: from a file, else as silo.toml says, else by asking."""
    return passphrase(
        passphrase_file, site.settings().passphrase_file, "Passphrase of the silo's key"
    )
