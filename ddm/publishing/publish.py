"""Publishes the next version: under the signing lock, as one change, copied out once it is signed and in force."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddm.io.changes import Change
from ddm.io.files import link_or_copy
from ddm.io.space import check_writable
from ddm.protocol.base import File
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.publishing.export import copy_out, reserve
from ddm.publishing.home import Home
from ddm.publishing.public_log import export_log, public_folder
from ddm.publishing.versions import check_none_lost, newest_version, release_folder
from ddm.trust.paths import PLAN_LOG_NAMES


@contextmanager
def next_version(home: Home, out: Path) -> Iterator[tuple[Change, Path]]:
    """Hold the signing lock while a version is made; afterwards give out the log and the newest version.

    Args:
        home: whose keys sign.
        out: where the newest version is copied to.

    Yields:
        the change that the version is staged in, and the folder beside `out` that the copy will fill.

    Raises:
        BusyError: `out` exists, since releases are immutable; or another process signs.
        SetupError: `out` cannot be made, or the version signed last is gone.
    """
    check_writable([home.path, home.tuf])
    with home.signing_lock(), reserve(out) as reserved:
        check_none_lost(home)
        # A change that waits for holders is applied to the metadata as they are when it is completed.
        change = Change.begin(home.path, beside_waiting=True)
        try:
            yield change, reserved
        finally:
            shutil.rmtree(change.folder, ignore_errors=True)
        export_log(home, public_folder(home))
        copy_out(release_folder(home, newest_version(home)), reserved, out)


def lay_out_plan(plan: Plan, bundle: Path, targets: Path) -> None:
    """Put the plan, its files and its proofs of the log into a version's folder."""
    proofs = (name for name in PLAN_LOG_NAMES if (bundle / name).is_file())
    for name in ("plan.json", *(file.path for file in plan.files), *proofs):
        link_or_copy(bundle / name, targets / name)


def with_pages(draft: Manifest, names: Iterable[str], targets: Path) -> Manifest:
    """Return the manifest with the pages, which were made from it, among its files."""
    files = [*draft.files, *(File.of(name, targets / name) for name in names)]
    return draft.model_copy(update={"files": tuple(sorted(files, key=lambda file: file.path))})
