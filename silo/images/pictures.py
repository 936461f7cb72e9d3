"""What scans know of a data set, in the order of its files; and its accepted pictures with their values."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ddm.errors import DataError
from ddm.images.find import Entry, find_files
from ddm.images.jobs import Found, Job
from ddm.images.patients import order_of
from ddm.images.picture import Picture
from ddm.images.reasons import Reason
from ddm.images.workers import decode_in_order
from silo.config import ImagesSettings
from silo.images.decisions import Decisions
from silo.images.memory import Kept, Memory
from silo.images.scan import limits_of, processes_of, recipe, scan_as_set
from silo.images.walk import Scanned, judged

_log = logging.getLogger(__name__)
Told = Literal["patient", "label", "caption"]


class Pictures:
    """A data set that was scanned. All of it is for private memory alone. Use `Pictures.opened`.

    Files are looked up as they are gone through: memory does not grow with their number.
    """

    def __init__(
        self, data: Path, settings: ImagesSettings, memory: Memory, decisions: Decisions, order: bytes = b""
    ) -> None:
        self._data, self._settings, self._order = data, settings, order
        self._memory, self._decisions = memory, decisions
        self._accepted = bytearray()  # for each file, whether it has pictures that are

    @staticmethod
    @contextmanager
    def opened(
        data: Path,
        folder: Path,
        settings: ImagesSettings,
        advance: Callable[[int], None] = lambda done: None,
        *,
        order: bytes = b"",
    ) -> "Iterator[Pictures]":
        """Open what scans know of a data set, after a scan of what changed since the last one.

        A file that the last scan could not read counts as known: a plan's images stay what they are until somebody
        scans again.

        Args:
            data: see `ddm.images.find.find_files`.
            folder: of the scans.
            settings: the site's.
            advance: called with the number of files that are done, while there is a scan.
            order: see `ddm.images.patients.order_key`, where `order` will be asked for.

        Raises:
            MissingFileError, DataError, BusyError, SetupError: see `silo.images.scan.scan`.
        """
        limits = limits_of(settings)
        with Memory.opened(folder, recipe(limits)) as memory:
            known = all(
                entry.reason is not None or ((kept := memory.find(entry)) is not None and kept.unchanged)
                for entry in find_files(data, settings.columns)
            )
        if not known:
            _log.info("scanning the images that changed since the last scan")
            scan_as_set(data, folder, settings, advance)
        with Memory.opened(folder, recipe(limits)) as memory, Decisions.opened(folder) as decisions:
            yield Pictures(data, settings, memory, decisions, order)

    def digest(self, told: Collection[Told]) -> str:
        """Return a digest of all that the accepted pictures depend on; one changed file, cell or decision changes it.

        Args:
            told: what is asked for of each picture.
        """
        found = hashlib.sha256(f"{recipe(limits_of(self._settings))} {self._decisions.digest}".encode())
        for entry, kept in self._files():
            cells = [getattr(entry.row, name, None) for name in sorted(told)]
            content = (kept.digest or entry.stats) if kept else entry.reason
            found.update(repr((content, kept and kept.reason, cells)).encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def __iter__(self) -> Iterator[Scanned]:
        """Yield every picture, and every file that gives none, file by file."""
        self._accepted = bytearray()
        for entry, kept in self._files():
            self._accepted.append(0)
            if kept is None:
                yield Scanned(entry.path, entry.row, reason=entry.reason, detail=entry.detail)
                continue
            for found in self._pictures(entry, kept):
                self._accepted[-1] |= found.reason is None
                yield found
            if kept.reason is not None:
                yield Scanned(entry.path, entry.row, reason=kept.reason, detail=kept.detail)

    def patient(self, found: Scanned) -> str | None:
        """Return the pseudonym of a picture's patient; None of nobody."""
        pseudonyms = found.patient(self._memory.key)
        return pseudonyms[0] if pseudonyms else None

    def order(self, found: Scanned) -> str | None:
        """Return what puts the patient of a picture that was decoded into an order that stays; None of nobody.

        It follows from the identifier: other files, another order of them or new scans change nothing. Where a file
        that names a patient can no longer be read, it follows from these scans' pseudonym.
        """
        told = (order_of(found.row.patient, self._order) if found.row else None) or found.order
        return told or order_of(self.patient(found), self._order)

    def decoded(self) -> Iterator[tuple[Scanned, Picture | None]]:
        """Decode files, and yield their accepted pictures with their values, in the order of the files.

        As many are yielded as a scan accepted: what is missing of a file that fails though a scan could read it comes
        without a picture, with the reason. Files without an accepted picture, as the last pass over all of them found,
        are not opened.

        Raises:
            DataError: files that changed since they were scanned.
        """
        turns = deque[tuple[Entry, Kept]]()
        rest: Iterator[Scanned] | None = None  # of the file whose turn it is

        def jobs() -> Iterator[Job]:
            for number, (entry, kept) in enumerate(self._files()):
                if number >= len(self._accepted):
                    raise _changed()
                if kept is not None and self._accepted[number]:
                    turns.append((entry, kept))
                    yield Job(entry.path, entry.files, entry.num_bytes)

        num, limits = processes_of(self._settings), limits_of(self._settings)
        for found in decode_in_order(jobs(), limits, self._memory.key, num=num, order=self._order):
            entry, kept = turns[0]
            if rest is None:
                rest = self._pictures(entry, kept)
            if isinstance(found, Found):
                if (scanned := next(rest, None)) is not None and scanned.reason is None:
                    yield replace(scanned, order=found.order), found.picture
                continue
            turns.popleft()
            if found.digest and kept.digest and found.digest != kept.digest:
                raise _changed()
            for scanned in rest:
                if scanned.reason is None:
                    yield replace(scanned, reason=found.reason or Reason.NO_PIXELS, detail=found.detail), None
            rest = None

    def _pictures(self, entry: Entry, kept: Kept) -> Iterator[Scanned]:
        """Yield the pictures of a file as the scan found them."""
        for place, seen in enumerate(self._memory.pictures(kept.number)):
            yield judged(entry.path, entry.row, place, seen, self._decisions)

    def _files(self) -> Iterator[tuple[Entry, Kept | None]]:
        """Yield each file with what is known of it; None where it is not read at all."""
        for entry in find_files(self._data, self._settings.columns):
            kept = self._memory.find(entry) if entry.reason is None else None
            if kept is None and entry.reason is None:
                raise _changed()
            yield entry, kept


def _changed() -> DataError:
    got = "files that came or changed meanwhile"
    remedy = "Let whatever writes there end, then run the command again."
    return DataError("data", expected="images that stay as they are while they are read", got=got, remedy=remedy)
