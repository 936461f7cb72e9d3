"""The command `ddm fetch`: brings a release from a host into a folder, with the signed files and no others."""

from pathlib import Path
from typing import Annotated

import typer

from ddm.cli.options import Verification, fetch_progress, grouped, warn_if_expired
from ddm.errors import SetupError
from ddm.fetching.address import read_address
from ddm.system.console import human_bytes, say

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="https://HOST/PATH, hf://OWNER/NAME@REVISION, or a folder that holds a release among other files.",
    ),
]
OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The release folder to make; it must not exist.")
]


@grouped
def fetch(source: SourceArgument, out: OutArgument, *, verification: Verification) -> None:
    """Fetch a release into a folder: only what is signed, verified while it comes, resumed where it broke off."""
    from ddm.fetching.opening import open_hosted
    from ddm.io.files import link_or_copy, move_into_place, staging_folder
    from ddm.io.untrusted import list_files
    from ddm.loading.release import read_root

    if out.exists() or out.is_symlink():
        raise SetupError(
            str(out),
            expected="the name of a new folder",
            got="a file or folder of this name",
            remedy="Name a folder that does not exist yet.",
        )
    root = read_root(verification.root)
    with fetch_progress(source) as advance:
        hosted = open_hosted(
            read_address(source) or Path(source), root, verification.fetch_options(), advance
        )
        hosted.fetch_experts(on_progress=advance)
    # The experts were compared with what is signed as they came; everything else is verified as ever.
    opened = verification.open_place(hosted, experts_later=True)
    files = list_files(hosted.folder)
    with staging_folder(out.absolute()) as staging:
        for name, file in files.items():
            link_or_copy(file.path, staging / name)
        move_into_place(staging, out.absolute())
    total_bytes = sum(file.bytes for file in files.values())
    manifest = opened.manifest
    say(
        f"Fetched {source} into {out}: ensemble {manifest.plan_id}, version {manifest.version}; "
        f"{len(files)} files, {human_bytes(total_bytes)}, all signed."
    )
    warn_if_expired(opened)
