"""Stages the next version under the signing lock, as one change, and copies it out once it is in force."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddm.errors import BusyError, SetupError
from ddm.io.changes import Change
from ddm.io.copying import copy_tree_bounded
from ddm.io.files import DISK_FULL_ERRNOS, link_or_copy, move_into_place, staging_folder
from ddm.io.modes import open_to_everyone, readable_folder
from ddm.io.space import check_writable, require_free_space
from ddm.io.untrusted import MAX_FILES, list_files
from ddm.protocol.base import now_utc
from ddm.publishing.folder import PublisherFolder
from ddm.publishing.public_log import export_log, public_folder
from ddm.publishing.versions import (
    NewestVersion,
    newest_version,
    read_newest,
    release_folder,
)

_PAGES_BYTES = 64 * 1024**2  # report, card and metadata of a version


@dataclass(frozen=True)
class StagedVersion:
    """A version that is being made; nothing of it is in force before the change is committed.

    Attributes:
        publisher: the publisher whose keys sign.
        previous: the version before it; None for the first.
        created_at: the one reading of the clock that manifest and signatures use.
        change: puts the version and its signatures into force together.
        copy_folder: where the copy for readers is made.
    """

    publisher: PublisherFolder
    previous: NewestVersion | None
    created_at: datetime
    change: Change
    copy_folder: Path

    @property
    def number(self) -> int:
        """The version's number: consecutive, and never used twice."""
        if self.previous is None:
            return 1
        return self.previous.number + 1

    @property
    def folder(self) -> Path:
        """The version's folder, inside the change."""
        return self.change.put(f"releases/{self.number}")

    def targets(self, plan_id: str) -> Path:
        """The folder of the version's files."""
        return self.folder / "targets" / plan_id

    def link_files(self, sources: Mapping[str, Path]) -> None:
        """Put files in place, linked where that is possible: versions share the bytes of what did not change.

        Args:
            sources: where each file is now, by its name as signed, which begins with the id of a plan.
        """
        for name, source in sources.items():
            link_or_copy(source, self.folder / "targets" / name)

    def require_space(self, later_bytes: int = 0) -> None:
        """Refuse a version for whose copy or pages there is too little space.

        Args:
            later_bytes: of the files that are copied out as well, and are not in the version's folder yet.

        Raises:
            DiskError: too little space.
        """
        # Files of carried silos are beside the folder of this plan.
        paths = (self.folder / "targets").rglob("*")
        linked_bytes = sum(path.stat().st_size for path in paths if path.is_file())
        needed = {
            self.copy_folder.parent: linked_bytes + later_bytes + _PAGES_BYTES,
            self.publisher.path: _PAGES_BYTES,
        }
        require_free_space(needed, "a release")


@contextmanager
def stage_version(publisher: PublisherFolder, out: Path) -> Iterator[StagedVersion]:
    """Hold the signing lock while a version is made; afterwards export the log and copy the newest version out.

    The newest version is the one that was made meanwhile, or the one before where nothing was committed.

    Args:
        publisher: the publisher whose keys sign.
        out: where the newest version is copied to.

    Raises:
        BusyError: `out` exists, since releases are immutable; or another process signs.
        SetupError: `out` cannot be made, or the version signed last is lost.
    """
    # A folder that cannot be written is refused before anything is computed.
    check_writable([publisher.path, publisher.tuf])
    with publisher.signing_lock(), reserve(out) as copy_folder:
        previous = read_newest(publisher)
        # A change that waits for holders is applied to the metadata as they are when it is completed.
        change = Change.begin(publisher.path, beside_waiting=True)
        try:
            yield StagedVersion(publisher, previous, now_utc(), change, copy_folder)
        finally:
            # After a commit nothing is left there; without one, what was staged never takes effect.
            shutil.rmtree(change.folder, ignore_errors=True)
        export_log(publisher, public_folder(publisher))
        copy_out(release_folder(publisher, newest_version(publisher)), copy_folder, out)


@contextmanager
def reserve(out: Path) -> Iterator[Path]:
    """Make the folder that is renamed to `out` at the end, so that an unusable `out` fails before anything is signed.

    Raises:
        BusyError: something exists at `out`; releases are immutable.
        SetupError: no folder can be made there.
        OSError: the disk is full.
    """
    # A link comes first: `exists` follows it, and is false for a link to nowhere.
    if out.is_symlink():
        raise _taken(out, "a link")
    if out.is_dir():
        raise _taken(out, "a folder")
    if out.exists():
        raise _taken(out, "a file")
    with ExitStack() as stack:
        try:
            # A web server of another user passes through the folders that are made above the release.
            readable_folder(out.parent)
            reserved = stack.enter_context(staging_folder(out))
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise
            raise SetupError(
                f"--out {out}",
                expected="a path where a folder can be made",
                got=str(error.strerror),
            ) from error
        yield reserved


def _taken(out: Path, got: str) -> BusyError:
    return BusyError(
        str(out),
        expected="a path where nothing exists",
        got=got,
        remedy="Choose another folder; a release is never overwritten.",
    )


def copy_out(release: Path, reserved: Path, out: Path) -> None:
    """Copy durably, without links: changes to the published folder must not reach the federation's own files."""
    num_bytes = sum(entry.bytes for entry in list_files(release).values())
    # Bounded by what was listed: a file that grows meanwhile is an error.
    copy_tree_bounded(release, reserved, max_bytes=num_bytes, max_entries=MAX_FILES)
    # The publisher's own folder is private, and readers of a release are other users.
    open_to_everyone(reserved)
    move_into_place(reserved, out)
