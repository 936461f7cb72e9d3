"""Finds out whether the federation's keys have signed another plan in the place of the one in progress.

A federation serves one plan at a time: the newest `targets`, signed by those whom the root names, delegates exactly
that plan's files. So the signed metadata of a newer plan announce that the earlier one is over, and they are in the
inbox before the rest of the bundle has arrived. They are verified here against the pinned root and against the newest
versions that this site has seen: what nobody signed, or an older plan sent again, announces nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ddm.errors import ArchipelagoError
from ddm.protocol.base import PLAN_ID_PATTERN
from ddm.trust.verify import verify_bundle_metadata
from silo.config import Site

_MAX_FOLDERS = 64  # that are inspected; the courier keeps fewer
Mark = tuple[int, int]
"""What changes when something else takes a folder's place: its time of change and its inode."""
InspectedBundles = dict[Path, Mark]
"""Folders that were inspected before and announced nothing, by their marks."""


def find_successor(
    site: Site, plan_id: str, inspected: InspectedBundles | None = None
) -> str | None:
    """Return the plan that was signed in the place of `plan_id`; None while there is none.

    Args:
        site: the silo's folder.
        plan_id: the plan in progress.
        inspected: kept by a caller that calls again and again; changed in place.
    """
    if inspected is None:
        inspected = {}
    try:
        root = site.root_path.read_bytes()
        for count, (folder, mark) in enumerate(_candidates(site, plan_id)):
            if count >= _MAX_FOLDERS:
                break
            # Signatures take time to verify, and this is called again and again while a training runs.
            if inspected.get(folder) == mark:
                continue
            announced_plan = _announced_plan(site, folder, root)
            # A folder of another name may hold the plan in progress, which does not end itself.
            if announced_plan not in (None, plan_id):
                return announced_plan
            inspected[folder] = mark
    except OSError:
        # The courier removes a folder, or a disk fails: the next call decides.
        return None
    return None


def _candidates(site: Site, plan_id: str) -> Iterator[tuple[Path, Mark]]:
    """Yield the bundles of other plans in the inbox, and the parts of bundles whose metadata are whole."""
    for plan_inbox in sorted(site.inbox.iterdir()):
        # The courier writes here, and a link could lead anywhere, into `private/` for instance.
        if plan_inbox.name == plan_id or plan_inbox.is_symlink():
            continue
        if not re.fullmatch(PLAN_ID_PATTERN, plan_inbox.name):
            continue
        for folder in (plan_inbox / "bundle", *sorted(plan_inbox.glob("*.part"))):
            # The courier writes metadata before targets.
            if (folder / "targets").is_dir():
                info = (folder / "metadata").lstat()
                yield folder, (info.st_mtime_ns, info.st_ino)


def _announced_plan(site: Site, folder: Path, root: bytes) -> str | None:
    """Return the plan that the metadata in a folder announce; None where they do not verify."""
    try:
        # Compared with the versions that this site has seen, and not remembered: only an accepted plan moves them on.
        return verify_bundle_metadata(folder, root, state=site.private / "trust").plan_id
    except ArchipelagoError:
        return None
