"""Goes through the files of a data set: takes from memory what is known, has the rest decoded, keeps what is found."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ddm.images.find import Entry
from ddm.images.jobs import Done, Found, Job
from ddm.images.patients import pseudonyms
from ddm.images.picture import Limits
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.images.table import Row
from ddm.images.workers import decode_all
from silo.images.decisions import Decisions
from silo.images.memory import Kept, Memory
from silo.images.series import Stacks

_BLOCK = 256  # pictures of one file that are kept at once


@dataclass(frozen=True)
class Scanned:
    """A picture, or a file that gives none; for private memory alone.

    Attributes:
        path: of its file.
        row: what a table says of it.
        place: of the picture in its file; None of a whole file.
        seen: the picture; None of a file that gives none.
        reason: why it is not accepted.
        detail: more of that.
        order: of the patient whom its file names, see `ddm.images.patients.order_of`, where it was asked for.
    """

    path: str
    row: Row | None
    place: int | None = None
    seen: PictureRecord | None = None
    reason: str | None = None
    detail: str = ""
    order: str | None = None

    @property
    def label(self) -> str | None:
        """Its class: what the table says, else what its file says."""
        return self._told("label")

    @property
    def split(self) -> str | None:
        """Its part of the data set, in the same way."""
        return self._told("split")

    @property
    def caption(self) -> str | None:
        """Its text, in the same way."""
        return self._told("caption")

    def patient(self, key: bytes) -> tuple[str, str] | None:
        """Return the pseudonyms of its patient, in the same way; `key` is that of the scans."""
        named = pseudonyms(self.row.patient, key) if self.row else None
        return named or (self.seen.patient if self.seen else None)

    def _told(self, name: str) -> str | None:
        return getattr(self.row, name, None) or getattr(self.seen, name, None) or None


def judged(path: str, row: Row | None, place: int, seen: PictureRecord, decisions: Decisions) -> Scanned:
    """Return a picture with the reason why it is not accepted, if there is one."""
    seen = decisions.flagged(seen)
    reason = decisions.verdict(seen)
    alone = reason == seen.verdict and len(seen.flags) == 1  # then the reason says it already
    return Scanned(path, row, place, seen, reason, seen.detail or ("" if alone else ", ".join(seen.flags)))


@dataclass
class _Work:
    """A file that is being decoded; its slices may be of a head, and are told of at the end."""

    entry: Entry
    number: int = 0
    place: int = 0
    pending: list[PictureRecord] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)


class Walk:
    """One way through a data set.

    Attributes:
        read: files whose content was looked at.
        decoded: of these, files that were decoded.
    """

    def __init__(self, memory: Memory, decisions: Decisions, take: Callable[[Scanned], None]) -> None:
        """Begin.

        Args:
            memory: of the data set's scans.
            decisions: of a person; what is found out about scans in files of their own is written there.
            take: called with each picture, and with each file without one or with an end to its pictures.
        """
        self.read = self.decoded = 0
        self._memory, self._decisions, self._take = memory, decisions, take
        self._work: dict[str, _Work] = {}
        self._stacks = Stacks()
        self._slices: list[tuple[int, tuple[int, ...], Row | None]] = []

    def go(self, entries: Iterable[Entry], limits: Limits, processes: int, advance: Callable[[int], None]) -> None:
        """Go through files: what is known is told as it is come across, the rest as it is decoded, slices at the end.

        Args:
            entries: the files.
            limits: of each.
            processes: that decode.
            advance: called with the number of files that are done.
        """
        self._advance, self._done = advance, 0
        jobs = self._jobs(entries)
        if (first := next(jobs, None)) is not None:  # with nothing to decode, no process starts
            for found in decode_all(_chained(first, jobs), limits, self._memory.key, num=processes):
                self._picture(found) if isinstance(found, Found) else self._end(found)
        self._decisions.judge(self._stacks.judged())
        for number, places, row in self._slices:
            path = self._memory.path(number)
            for place, seen in enumerate(self._memory.pictures(number)):
                if place in places:
                    self._tell(path, row, place, seen)

    def _jobs(self, entries: Iterable[Entry]) -> Iterator[Job]:
        for entry in entries:
            kept = None
            if entry.reason is not None:
                self._take(Scanned(entry.path, entry.row, reason=entry.reason, detail=entry.detail))
                self._count()
            elif (kept := self._memory.find(entry)) is not None and kept.unchanged and not kept.passing:
                self._remember(entry, kept)
            else:
                self.read += 1
                self._work[entry.path] = _Work(entry)
                yield Job(entry.path, entry.files, entry.num_bytes, kept.digest if kept else "")

    def _remember(self, entry: Entry, kept: Kept) -> None:
        self._memory.confirm(entry, kept)
        slices = []
        for place, seen in enumerate(self._memory.pictures(kept.number)):
            if self._is_alone(seen):
                self._tell(entry.path, entry.row, place, seen)
            else:
                slices.append(place)
        self._finish(entry, kept.number, slices, kept.reason, kept.detail)

    def _picture(self, found: Found) -> None:
        work = self._work[found.job.path]
        place = work.place + len(work.pending)
        work.pending.append(found.seen)
        if len(work.pending) >= _BLOCK:
            self._keep(work)
        if self._is_alone(found.seen):
            self._tell(work.entry.path, work.entry.row, place, found.seen)
        else:
            work.slices.append(place)

    def _keep(self, work: _Work) -> None:
        if not work.number:
            work.number = self._memory.begin(work.entry)
        self._memory.add(work.number, work.place, work.pending)
        work.place += len(work.pending)
        work.pending.clear()

    def _end(self, done: Done) -> None:
        work = self._work.pop(done.job.path)
        if done.same and (kept := self._memory.find(work.entry)) is not None:
            self._remember(work.entry, kept)
            return
        self.decoded += 1
        reason = done.reason
        if reason is None and not work.place + len(work.pending):
            reason = Reason.NO_PIXELS
        if work.number:
            self._keep(work)
            self._memory.finish(work.number, work.entry, done.digest, reason, done.detail)
        else:
            work.number = self._memory.keep(work.entry, work.pending, done.digest, reason, done.detail)
        self._finish(work.entry, work.number, work.slices, reason, done.detail)

    def _is_alone(self, seen: PictureRecord) -> bool:
        """Whether it can be told now what becomes of a picture: the others of its scan are nothing to it."""
        self._stacks.add(seen)
        return seen.slice is None

    def _finish(self, entry: Entry, number: int, slices: list[int], reason: Reason | None, detail: str) -> None:
        if slices:
            self._slices.append((number, tuple(slices), entry.row))
        if reason is not None:
            self._take(Scanned(entry.path, entry.row, reason=reason, detail=detail))
        self._count()

    def _tell(self, path: str, row: Row | None, place: int, seen: PictureRecord) -> None:
        self._take(judged(path, row, place, seen, self._decisions))

    def _count(self) -> None:
        self._done += 1
        self._advance(self._done)


def _chained(first: Job, jobs: Iterator[Job]) -> Iterator[Job]:
    yield first
    yield from jobs
