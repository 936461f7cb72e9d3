"""A log that only grows: each line names the digest of the line before it, and a file beside it holds the head.

The head, written after the line, is the number of records and the digest of the last. A log shorter than its head was
cut; one that is a single record longer was interrupted between the two writes. Half a line after the last record is an
unfinished write, and is removed. Anything else is refused. If both files are restored together to an older state, they
look genuine here: only who knows a later head notices.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pydantic import ValidationError

from ddm.errors import ArchipelagoError, DocumentError
from ddm.io.files import FULL, sync_folder, write_atomic
from ddm.io.locks import lock_file
from ddm.protocol.base import (
    Digest,
    Document,
    NaturalInt,
    PositiveInt,
    Time,
    check_json,
    sha256_hex,
)

MAX_LINE_BYTES = 4096


class Link(Document):
    """A record: what one of these says, it adds to this."""

    number: PositiveInt
    previous: Digest
    at: Time


class Head(Document):
    """The head of a chain; a subclass adds its format."""

    num_entries: NaturalInt
    head_digest: Digest


LinkT = TypeVar("LinkT", bound=Link)


@dataclass(frozen=True)
class Entry(Generic[LinkT]):
    """One line: the sha256 of its bytes and what it says."""

    digest: str
    record: LinkT


@dataclass(frozen=True)
class Form(Generic[LinkT]):
    """What tells one kind of chain from another.

    Attributes:
        name: in errors.
        read: parses one line; raises pydantic's `ValidationError`.
        head: of its head's document.
        genesis: what the first record names as the one before it.
        most: records.
        error: raised where it is damaged.
        full: what to do where the disk was full; None leaves that to whoever answers a full disk for all commands.
    """

    name: str
    read: Callable[[bytes], LinkT]
    head: type[Head]
    genesis: Digest
    most: int
    error: type[ArchipelagoError]
    full: str | None = None


class Guard(Protocol):
    """What holds a chain from outside."""

    def check(self, digests: Sequence[str]) -> None:
        """Refuse a chain by the digests of its records, oldest first; called before anything in it is repaired."""

    def record(self, num_entries: int, head_digest: str) -> None:
        """Note the head; called once a record is durable. An `OSError` is the failure of that write."""


class Chain(Generic[LinkT]):
    """One chain of records on disk.

    Args:
        path: the log; its head and lock lie beside it.
        form: its kind.
        begun: a folder, made last of all: while it stands, a missing file is damage.
        guard: holds it from outside.
    """

    def __init__(
        self, path: Path, form: Form[LinkT], begun: Path, guard: Guard | None = None
    ) -> None:
        self.path, self.form, self._guard = path, form, guard
        self._begun, self._head_path = begun, path.with_suffix(".head")

    @contextmanager
    def held(self) -> Iterator[tuple[Entry[LinkT], ...]]:
        """Hold the chain for one process at a time; yield every record, verified, and repaired where that is safe.

        Raises:
            ArchipelagoError: the form's error: a line was edited, removed or added, or the head was replaced.
        """
        with self._locked():
            yield self._read()

    def last(self, entries: tuple[Entry[LinkT], ...]) -> Digest:
        """Return what the next record names as the one before it."""
        return entries[-1].digest if entries else self.form.genesis

    def append(self, record: LinkT) -> Entry[LinkT]:
        """Write a line, then the head; both are durable when this returns. Call it while the chain is held.

        A failed write is left in place: the next reading removes half a line, and keeps a whole one.

        Raises:
            ArchipelagoError: the form's error: the chain is full, or the write failed.
            OSError: the disk is full, and the form says nothing about that.
        """
        form = self.form
        if record.number > form.most:
            raise form.error(
                form.name, expected=f"at most {form.most} records", got=f"record {record.number}"
            )
        line = record.encode()
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb", buffering=0) as handle:
                if handle.write(line + b"\n") != len(line) + 1:
                    raise OSError("short write")
                os.fsync(handle.fileno())
            sync_folder(self.path.parent)
            entry = Entry(sha256_hex(line), record)
            self._write_head(record.number, entry.digest)
            if self._guard:
                self._guard.record(record.number, entry.digest)
        except OSError as error:
            if error.errno in FULL and form.full is None:
                error.filename = error.filename or str(self.path)
                raise
            got = f"a write to {self.path} that failed: {error.strerror or error}"
            remedy = form.full if error.errno in FULL else None
            raise form.error(
                form.name, expected="a durable record", got=got, remedy=remedy
            ) from error
        return entry

    def begin(self) -> None:
        """Make a new chain where nothing remains of an old one; a crash after any step, or others at it, do no harm.

        Raises:
            ArchipelagoError: the form's error: part of one is there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if self._begun.is_dir():
                return
            if not self._head_path.exists():
                if self.path.exists():
                    expected = f"the file beside the {self.form.name}"
                    raise self.form.error(
                        f"{self.form.name} head", expected=expected, got="no file"
                    )
                self._write_head(0, self.form.genesis)
            if not self.path.exists() and self._read_head().num_entries == 0:
                write_atomic(self.path, b"", mode=0o600)
            self._begun.mkdir(mode=0o700)
            sync_folder(self.path.parent)

    def _locked(self) -> AbstractContextManager[None]:
        return lock_file(self.path.with_suffix(".lock"))

    def _read(self) -> tuple[Entry[LinkT], ...]:
        name, error = self.form.name, self.form.error
        head = self._read_head()
        try:
            data = self.path.read_bytes()
        except OSError as cause:
            raise error(
                name, expected=f"{head.num_entries} records", got="no readable file"
            ) from cause
        *lines, torn = data.split(b"\n")
        entries = self._parse(lines)
        if len(entries) < head.num_entries:
            raise error(
                name,
                expected=f"{head.num_entries} records, as its head says",
                got=f"{len(entries)}",
            )
        if len(entries) > head.num_entries + 1 or (len(entries) > head.num_entries and torn):
            got = f"{len(entries)} records" + (" and part of another" if torn else "")
            raise error(name, expected=f"{head.num_entries} records, as its head says", got=got)
        if (last := self.last(entries[: head.num_entries])) != head.head_digest:
            expected = f"the digest of the {name}'s last record, {last}"
            raise error(f"{name} head", expected=expected, got=head.head_digest)
        if self._guard:
            self._guard.check([entry.digest for entry in entries])
        if torn:
            self._cut(len(data) - len(torn))
        if len(entries) > head.num_entries:
            self._write_head(len(entries), self.last(entries))
        return entries

    def _parse(self, lines: list[bytes]) -> tuple[Entry[LinkT], ...]:
        """Check each line by itself and against the one before."""
        entries: list[Entry[LinkT]] = []
        previous = self.form.genesis
        for number, line in enumerate(lines, start=1):
            subject = f"{self.form.name} record {number}"
            try:
                check_json(line, subject=subject, limit=MAX_LINE_BYTES)
                record = self.form.read(line)
            except (DocumentError, ValidationError) as error:
                expected, got = "a record as it was written", "a line that is not one"
                raise self.form.error(subject, expected=expected, got=got) from error
            if record.encode() != line or record.number != number or record.previous != previous:
                expected = f"number {number} in canonical form, after {previous[:16]}"
                other = "" if record.encode() == line else ", in another form"
                got = f"number {record.number} after {record.previous[:16]}{other}"
                raise self.form.error(subject, expected=expected, got=got)
            previous = sha256_hex(line)
            entries.append(Entry(previous, record))
        return tuple(entries)

    def _cut(self, size: int) -> None:
        with self.path.open("rb+") as handle:
            handle.truncate(size)
            os.fsync(handle.fileno())

    def _write_head(self, num_entries: int, digest: str) -> None:
        head = self.form.head(num_entries=num_entries, head_digest=digest)
        write_atomic(self._head_path, head.encode(), mode=0o600)

    def _read_head(self) -> Head:
        subject = f"{self.form.name} head"
        try:
            return self.form.head.parse(
                self._head_path.read_bytes(), subject=subject, limit=MAX_LINE_BYTES
            )
        except (OSError, DocumentError) as error:
            got = f"a file that is missing or damaged ({type(error).__name__})"
            raise self.form.error(
                subject, expected=f"the file beside the {self.form.name}", got=got
            ) from error
