"""Scans a data set: finds its files, takes from memory what is known, decodes the rest, and counts all of it."""

import csv
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path

from ddm.imaging.decoded import Limits
from ddm.imaging.reasons import Reason
from ddm.io.files import replacing
from silo.images.decoders import Done, Found, Job, decode_all
from silo.images.entries import Entry, find_entries
from silo.images.memory import Memory
from silo.images.patients import pseudonyms
from silo.images.seen import Seen
from silo.images.summary import Summary

QUARANTINE = "quarantine.csv"
_DECODERS = (
    "pydicom",
    "python-gdcm",
    "pylibjpeg-openjpeg",
    "pyjpegls",
    "nibabel",
    "pillow",
    "tifffile",
    "pypng",
    "numpy",
)
_RECIPE = 1  # changes with what decoders and `look` return
_BLOCK = 256  # pictures of one file that are kept at once


@dataclass(frozen=True)
class Scanned:
    """A picture, or a file that gives none; for private memory alone.

    Attributes:
        entry: its file.
        place: of the picture in its file; None of a whole file.
        seen: the picture; None of a file that gives none.
        reason: why it is not accepted.
        detail: more of that.
    """

    entry: Entry
    place: int | None
    seen: Seen | None
    reason: str | None = None
    detail: str = ""


@dataclass
class _Work:
    """A file that is being decoded."""

    entry: Entry
    number: int
    place: int = 0
    pending: list[Seen] = field(default_factory=list)


def default_folder(data: Path) -> Path:
    """Return the private folder of a data set's scans outside a site; its name tells nothing."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    name = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:16]
    return Path(state).expanduser() / "archipelago" / "scans" / name


def recipe(limits: Limits) -> str:
    """Name all that the result of a file depends on besides its content."""
    versions = []
    for name in _DECODERS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    return f"{_RECIPE} {limits} {', '.join(versions)}"


def scan(
    data: Path,
    folder: Path,
    limits: Limits,
    *,
    columns: dict[str, str] | None = None,
    processes: int = 1,
    advance: Callable[[int], None] = lambda done: None,
) -> Summary:
    """Scan a data set, and write the list of what is quarantined into its private folder.

    Args:
        data: see `silo.images.entries.find_entries`.
        folder: private; what it remembers is not decoded again.
        limits: of each file.
        columns: other names of a table's columns.
        processes: that decode.
        advance: called with the number of files that are done.

    Raises:
        MissingFileError, DataError: see `find_entries`.
        BusyError: another scan works in the folder.
        SetupError: the decoders of these images are not installed.
    """
    summary = Summary()
    with Memory.opened(folder, recipe(limits)) as memory:
        with replacing(folder / QUARANTINE, mode=0o600) as handle:
            text = TextIOWrapper(handle, encoding="utf-8", errors="surrogateescape", newline="")
            quarantine = csv.writer(text)
            quarantine.writerow(("path", "image", "reason", "detail"))
            walk = _Walk(memory, limits, processes, summary)
            last, done = None, 0
            for found in walk.scanned(find_entries(data, columns or {})):
                if found.entry is not last:
                    last, done = found.entry, done + 1
                    advance(done)
                if found.reason is not None:
                    summary.quarantine(found.reason)
                    place = "" if found.place is None else found.place
                    quarantine.writerow((found.entry.path, place, found.reason, found.detail))
                elif found.seen is not None:
                    row = found.entry.row
                    named = pseudonyms(row.patient, memory.key) if row else None
                    summary.accept(found.seen, row, named or found.seen.patient)
            text.flush()
            text.detach()
        memory.forget_others()
    return summary


class _Walk:
    """Decides for each file whether it is known, and keeps what decoders find."""

    def __init__(self, memory: Memory, limits: Limits, processes: int, summary: Summary) -> None:
        self._memory, self._limits, self._processes, self._summary = memory, limits, processes, summary
        self._known: deque[tuple[Entry, Iterator[Scanned]]] = deque()
        self._work: dict[str, _Work] = {}

    def scanned(self, entries: Iterator[Entry]) -> Iterator[Scanned]:
        """Yield pictures and files without one; what is known as it is come across, the rest as it is decoded."""
        jobs = self._jobs(entries)
        first = next(jobs, None)  # with nothing to decode, no process starts
        yield from self._from_memory()
        if first is None:
            return
        for found in decode_all(_chained(first, jobs), self._limits, self._memory.key, num=self._processes):
            yield from self._from_memory()
            yield from self._picture(found) if isinstance(found, Found) else self._end(found)
        yield from self._from_memory()

    def _jobs(self, entries: Iterator[Entry]) -> Iterator[Job]:
        for entry in entries:
            if entry.reason is not None:
                self._known.append((entry, iter([Scanned(entry, None, None, entry.reason, entry.detail)])))
                continue
            kept = self._memory.find(entry)
            if kept is not None and kept.unchanged:
                self._memory.confirm(entry, kept)
                self._known.append((entry, self._remembered(entry)))
                continue
            self._summary.read += 1
            self._work[entry.path] = _Work(entry, 0)
            yield Job(entry.path, entry.files, entry.num_bytes, kept.digest if kept else "")

    def _from_memory(self) -> Iterator[Scanned]:
        while self._known:
            yield from self._known.popleft()[1]

    def _remembered(self, entry: Entry) -> Iterator[Scanned]:
        kept = self._memory.find(entry)
        if kept is None:
            return
        for place, seen in enumerate(self._memory.pictures(kept)):
            yield _scanned(entry, place, seen)
        if kept.reason is not None:
            yield Scanned(entry, None, None, kept.reason, kept.detail)

    def _picture(self, found: Found) -> Iterator[Scanned]:
        work = self._work[found.job.path]
        place = work.place + len(work.pending)
        work.pending.append(found.seen)
        if len(work.pending) >= _BLOCK:
            self._keep(work)
        yield _scanned(work.entry, place, found.seen)

    def _keep(self, work: _Work) -> None:
        if not work.number:
            work.number = self._memory.begin(work.entry)
        self._memory.add(work.number, work.place, work.pending)
        work.place += len(work.pending)
        work.pending.clear()

    def _end(self, done: Done) -> Iterator[Scanned]:
        work = self._work.pop(done.job.path)
        if done.same and (kept := self._memory.find(work.entry)) is not None:
            self._memory.confirm(work.entry, kept)
            yield from self._remembered(work.entry)
            return
        self._summary.decoded += 1
        reason, detail = done.reason, done.detail
        self._keep(work)
        if reason is None and not work.place:
            reason = Reason.NO_PIXELS
        self._memory.finish(work.number, work.entry, done.digest, reason, detail)
        if reason is not None:
            yield Scanned(work.entry, None, None, reason, detail)


def _scanned(entry: Entry, place: int, seen: Seen) -> Scanned:
    detail = seen.detail or ", ".join(seen.flags[1:] and seen.flags)
    return Scanned(entry, place, seen, seen.verdict, detail)


def _chained(first: Job, jobs: Iterator[Job]) -> Iterator[Job]:
    yield first
    yield from jobs
