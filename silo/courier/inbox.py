"""Bounds a site's inbox: the courier keeps what the root's keys signed, and little else.

    inbox/<plan>/bundle/            a whole bundle, every file signed
    inbox/<plan>/<digest>.part/     one on its way: only its metadata until they verify, and a few such at a time
    inbox/<plan>/receipts/<n>.json  signed with the receipt key of that plan; <n>.held.json while a person decides

Anything else is removed, and so is a bundle that no longer verifies: one that somebody put there, or an older plan. The
plan that the worker works on stays, and a folder that it is reading. The attack is to fill the disk: anybody who cannot
sign can fill no more than `MAX_UNVERIFIED` times the metadata of a bundle, whatever they send. A signed plan that is
newer than any other takes the room of older ones.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ddm.errors import DocumentError, FormatError, MissingFileError, PolicyError, TrustError
from ddm.io.files import read_bounded
from ddm.io.locks import lock_if_unread, locked
from ddm.protocol.base import PLAN_ID_PATTERN
from ddm.transport.messages import StatusFile
from ddm.trust.verify import verify_bundle_metadata

MAX_UNVERIFIED = 4
MAX_METADATA_BYTES = 16 * 1024 * 1024
MAX_STATUS_BYTES = 4096
STALE_S = 7 * 24 * 3600.0
PART = ".part"
_PART_NAME = re.compile(r"[0-9a-f]{16}\.part")
_RECEIPT_NAME = re.compile(r"[1-9][0-9]{0,6}(\.held)?\.json")


@dataclass(frozen=True)
class Inbox:
    """A site's inbox, as its courier keeps it in order.

    Attributes:
        site: the site folder.
        max_bytes: most bytes of all files in it.
        max_files: most files and folders.
    """

    site: Path
    max_bytes: int
    max_files: int

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return self.site / "inbox"

    @property
    def versions(self) -> Path:
        """The folder in which the courier remembers versions, to recognise an older plan."""
        return self.site / "courier" / "trust"

    def root(self) -> bytes:
        """Read the courier's copy of the pinned root.

        Raises:
            MissingFileError: there is none.
        """
        return read_bounded(self.site / "courier" / "1.root.json", 1 << 20)

    def clean(self) -> None:
        """Tidy up while no message is being answered.

        Raises:
            BusyError: one is.
            MissingFileError: the courier has no root.
        """
        with locked(self.site / "courier", "inbox"):
            self.tidy()

    def tidy(self) -> None:
        """Remove what does not belong here, what nobody finished, and bundles that no longer verify."""
        # Read before anything is removed: without a root nothing here could be verified.
        current_plan = plan_at_work(self.site)
        root = self.root()
        for entry in sorted(self.folder.iterdir()):
            if not _is_folder(entry) or not re.fullmatch(PLAN_ID_PATTERN, entry.name):
                remove(entry)
                continue
            # What the worker reads now stays; the next message comes soon.
            with suppress(OSError), lock_if_unread(entry) as idle:
                if idle:
                    self._tidy_plan(entry, root, keep=entry.name == current_plan)

    def _tidy_plan(self, plan: Path, root: bytes, *, keep: bool) -> None:
        for entry in sorted(plan.iterdir()):
            if not _is_folder(entry):
                remove(entry)
            elif entry.name == "receipts":
                self._tidy_receipts(entry)
            elif entry.name == "bundle":
                # The plan at work stays when it no longer verifies, since it may expire while its experts are
                # trained.
                if not keep and not self.verifies(plan, root):
                    remove(entry)
            elif not _PART_NAME.fullmatch(entry.name) or _age_s(entry) >= STALE_S:
                remove(entry)
        # Receipts are verified with the plan, and say nothing without it.
        if not keep and not (plan / "bundle").exists():
            remove(plan / "receipts")
        # Raises where the folder is not empty.
        with suppress(OSError):
            plan.rmdir()

    def _tidy_receipts(self, folder: Path) -> None:
        for entry in sorted(folder.iterdir()):
            if not _RECEIPT_NAME.fullmatch(entry.name) or entry.is_symlink() or not entry.is_file():
                remove(entry)

    def verifies(self, plan: Path, root: bytes) -> bool:
        """Whether a bundle's metadata are signed, in force, of this plan and not older than the newest one seen."""
        try:
            metadata = verify_bundle_metadata(plan / "bundle", root, state=self.versions)
        except (TrustError, FormatError, OSError):
            return False
        return metadata.plan_id == plan.name

    def make_room(self, num_bytes: int, num_files: int, own_part: Path, *, signed: bool) -> None:
        """Remove what may be removed until so much more fits.

        Args:
            num_bytes: bytes to come.
            num_files: files and folders to come.
            own_part: the part folder for which room is made; it stays.
            signed: whether its metadata verified: it is then newer than any plan here, and these may be removed unless
                the worker works on them.

        Raises:
            PolicyError: it does not fit, whatever is removed.
        """
        self._remove_oldest_unverified(own_part)
        removable = self._removable(own_part, signed=signed)
        while True:
            used_bytes, used_files = usage(self.folder)
            bytes_fit = used_bytes + num_bytes <= self.max_bytes
            files_fit = used_files + num_files <= self.max_files
            if bytes_fit and files_fit:
                return
            path = next(removable, None)
            if path is None:
                raise PolicyError(
                    "inbox",
                    expected=f"at most {self.max_bytes} bytes in {self.max_files} files and folders",
                    got=f"{used_bytes} bytes in {used_files}, "
                    f"and {num_bytes} bytes in {num_files} to come",
                    remedy="Raise max_inbox_bytes or max_inbox_files in silo.toml, "
                    "then start the courier again.",
                )
            remove(path)

    def _remove_oldest_unverified(self, own_part: Path) -> None:
        """Keep at most `MAX_UNVERIFIED` parts whose metadata have not verified, this one included."""
        other_parts = [part for part in self._parts() if part != own_part]
        unverified = [part for part in other_parts if not has_verified(part)]
        num_too_many = max(len(unverified) - (MAX_UNVERIFIED - 1), 0)
        for part in unverified[:num_too_many]:
            remove(part)

    def _removable(self, own_part: Path, *, signed: bool) -> Iterator[Path]:
        """Yield what may be removed for this part, what is worth least first."""
        parts = [part for part in self._parts() if part != own_part]
        yield from (part for part in parts if not has_verified(part))
        # Somebody who cannot sign must not be able to remove what was signed.
        if not signed:
            return
        yield from (part for part in parts if has_verified(part))
        current_plan = plan_at_work(self.site)
        for plan in sorted(self.folder.iterdir()):
            if plan.name not in (current_plan, own_part.parent.name):
                # The worker copies a plan under the lock for reading: what it reads must not vanish below it.
                with suppress(OSError), lock_if_unread(plan) as idle:
                    if idle:
                        yield plan

    def _parts(self) -> list[Path]:
        """All parts, those longest untouched first."""
        return sorted(self.folder.glob(f"*/*{PART}"), key=_age_s, reverse=True)


def has_verified(part: Path) -> bool:
    """Whether the metadata of a part have verified: nothing else is written before."""
    return (part / "targets").exists()


def plan_at_work(site: Path) -> str | None:
    """Return the plan that the worker accepted last, by its status in the outbox; None when there is none.

    Raises:
        DocumentError: the file is not as it must be.
    """
    try:
        data = read_bounded(site / "outbox" / "status.json", MAX_STATUS_BYTES)
        status = StatusFile.model_validate_json(data)
    except MissingFileError:
        return None
    except ValidationError:
        raise DocumentError(
            "status.json", expected="a valid status", got="fields that do not fit"
        ) from None
    # In these states the worker needs none of the plans here.
    if status.state in ("waiting", "plan_refused"):
        return None
    return status.plan_id


def usage(folder: Path) -> tuple[int, int]:
    """Return the bytes of all files below a folder, and the number of files and folders."""
    num_bytes = 0
    num_files = 0
    for root, folders, names in os.walk(folder):
        num_files += len(folders) + len(names)
        for name in names:
            # The worker may remove a file meanwhile.
            with suppress(FileNotFoundError):
                num_bytes += Path(root, name).lstat().st_size
    return num_bytes, num_files


def _is_folder(path: Path) -> bool:
    """Whether this is a folder itself: a link could lead the courier out of the inbox."""
    return path.is_dir() and not path.is_symlink()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder and all below it; nothing where there is none."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
