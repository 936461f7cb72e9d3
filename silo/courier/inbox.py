"""What may lie in a site's inbox, and how much of it: the courier keeps what the root's keys signed, and little else.

    inbox/<plan>/bundle/            a whole bundle, every file signed
    inbox/<plan>/<digest>.part/     one on its way: only its metadata until that verifies, and a few such at a time
    inbox/<plan>/receipts/<n>.json  signed with the receipt key of that plan; <n>.held.json while a person decides

Anything else goes, and so does a bundle that no longer verifies: one that somebody put there, or an older plan. The
plan that the worker is at stays, and a folder that it is reading. Whoever cannot sign can therefore fill no more than
`MAX_UNVERIFIED` times the metadata of a bundle, whatever they send; a signed plan that is newer than any other makes
itself room.
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
    """A site's inbox, as its courier looks after it.

    Attributes:
        site: the site folder.
        max_bytes: most bytes of all that lies in it.
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
    def memory(self) -> Path:
        """Where the courier remembers versions, to know an older plan."""
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
        at_work, root = plan_at_work(self.site), self.root()
        for entry in _listed(self.folder):
            if (
                not entry.is_dir()
                or entry.is_symlink()
                or not re.fullmatch(PLAN_ID_PATTERN, entry.name)
            ):
                remove(entry)
                continue
            with suppress(OSError), lock_if_unread(entry) as idle:
                if idle:
                    self._tidy_plan(entry, root, keep=entry.name == at_work)

    def _tidy_plan(self, plan: Path, root: bytes, *, keep: bool) -> None:
        for entry in _listed(plan):
            is_folder = entry.is_dir() and not entry.is_symlink()
            if is_folder and entry.name == "receipts":
                self._tidy_receipts(entry)
            elif is_folder and entry.name == "bundle":
                if not keep and not self.verifies(plan, root):
                    remove(entry)
            elif not (is_folder and _PART_NAME.fullmatch(entry.name) and _age_s(entry) < STALE_S):
                remove(entry)
        if not keep and not (plan / "bundle").exists():
            remove(plan / "receipts")
        with suppress(OSError):  # not empty
            plan.rmdir()

    def _tidy_receipts(self, folder: Path) -> None:
        for entry in _listed(folder):
            if not _RECEIPT_NAME.fullmatch(entry.name) or entry.is_symlink() or not entry.is_file():
                remove(entry)

    def verifies(self, plan: Path, root: bytes) -> bool:
        """Whether a bundle's metadata are signed, in force, of this plan and not older than the newest one seen."""
        try:
            return (
                verify_bundle_metadata(plan / "bundle", root, state=self.memory).plan_id
                == plan.name
            )
        except (TrustError, FormatError, OSError):
            return False

    def make_room(self, num_bytes: int, num_files: int, own: Path, *, signed: bool) -> None:
        """Remove what may go until so much more fits.

        Args:
            num_bytes: what is to come.
            num_files: files and folders to come.
            own: the part folder for which room is made; it stays.
            signed: whether its metadata verified: it is then newer than any plan here, which may go if nobody is at it.

        Raises:
            PolicyError: it does not fit, whatever goes.
        """
        self._forget_oldest(own)
        victims = self._victims(own, signed=signed)
        while True:
            held_bytes, held_files = usage(self.folder)
            if (
                held_bytes + num_bytes <= self.max_bytes
                and held_files + num_files <= self.max_files
            ):
                return
            victim = next(victims, None)
            if victim is None:
                expected = f"at most {self.max_bytes} bytes in {self.max_files} files and folders"
                got = f"{held_bytes} bytes in {held_files}, and {num_bytes} bytes in {num_files} to come"
                remedy = "Raise max_inbox_bytes or max_inbox_files in silo.toml, then start the courier again."
                raise PolicyError("inbox", expected=expected, got=got, remedy=remedy)
            remove(victim)

    def _forget_oldest(self, own: Path) -> None:
        """Leave one place free among the parts whose metadata have not verified."""
        unsigned = [part for part in self._parts() if part != own and not has_signed(part)]
        for part in unsigned[: max(len(unsigned) - (MAX_UNVERIFIED - 1), 0)]:
            remove(part)

    def _victims(self, own: Path, *, signed: bool) -> Iterator[Path]:
        parts = [part for part in self._parts() if part != own]
        yield from (part for part in parts if not has_signed(part))
        if not signed:
            return
        yield from (part for part in parts if has_signed(part))
        at_work = plan_at_work(self.site)
        for plan in _listed(self.folder):
            if plan.name not in (at_work, own.parent.name):
                with suppress(OSError), lock_if_unread(plan) as idle:
                    if idle:
                        yield plan

    def _parts(self) -> list[Path]:
        """All parts, those longest untouched first."""
        return sorted(self.folder.glob(f"*/*{PART}"), key=_age_s, reverse=True)


def has_signed(part: Path) -> bool:
    """Whether the metadata of a part have verified: nothing else is written before."""
    return (part / "targets").exists()


def plan_at_work(site: Path) -> str | None:
    """Return the plan that the worker accepted last, as it says in the outbox; None when there is none.

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
    return None if status.state in ("waiting", "plan_refused") else status.plan_id


def usage(folder: Path) -> tuple[int, int]:
    """Return the bytes of all files below a folder, and the number of files and folders."""
    num_bytes = num_files = 0
    for root, folders, names in os.walk(folder):
        num_files += len(folders) + len(names)
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += Path(root, name).lstat().st_size
    return num_bytes, num_files


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder and all below it; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
