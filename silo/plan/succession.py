"""Finds out whether the federation's keys have signed another plan in the place of the one in work.

A federation serves one plan at a time: the newest `targets`, signed by those whom the root names, delegates exactly
that plan's files. So the signed metadata of a newer plan are the announcement that the earlier one is over, and they
lie in the inbox before the rest of the bundle has arrived. They are verified here against the pinned root and against
the newest versions that this site has seen: what nobody signed, or an older plan sent again, announces nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.protocol.base import PLAN_ID_PATTERN
from ddm.trust.verify import verify_bundle_metadata
from silo.config import Site

_MOST = 64  # folders looked at; the courier keeps fewer
Looked = dict[Path, tuple[int, int]]
"""What was looked at before and announced nothing, by its mark, which changes when something else takes its place."""


def successor(site: Site, plan_id: str, looked: Looked | None = None) -> str | None:
    """Return the plan that was signed in the place of `plan_id`; None while there is none.

    Args:
        site: the silo's folder.
        plan_id: the plan in work.
        looked: kept by a caller that asks again and again; changed in place.
    """
    looked = {} if looked is None else looked
    try:
        root = site.root_path.read_bytes()
        for count, (folder, mark) in enumerate(_candidates(site, plan_id)):
            if count >= _MOST:
                break
            if looked.get(folder) == mark:
                continue
            if (found := _announced(site, folder, root)) not in (None, plan_id):
                return found
            looked[folder] = mark
    except OSError:  # the courier tidies, or a disk fails: the next look decides
        return None
    return None


def _candidates(site: Site, plan_id: str) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Yield the bundles of other plans in the inbox, and the parts of bundles whose metadata are whole, with a mark."""
    for home in sorted(site.inbox.iterdir()):
        if (
            home.name == plan_id
            or not re.fullmatch(PLAN_ID_PATTERN, home.name)
            or home.is_symlink()
        ):
            continue
        for folder in (home / "bundle", *sorted(home.glob("*.part"))):
            if (folder / "targets").is_dir():
                info = (folder / "metadata").lstat()
                yield folder, (info.st_mtime_ns, info.st_ino)


def _announced(site: Site, folder: Path, root: bytes) -> str | None:
    """Return the plan that the metadata in a folder announce; None where they do not verify."""
    try:
        return verify_bundle_metadata(folder, root, state=site.private / "trust").plan_id
    except ArchipelagoError:
        return None
