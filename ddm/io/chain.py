"""A log that only grows: each line names the digest of the line before it, and a file beside it holds the head.

The head, written after the line, is the number of records and the digest of the last. A log shorter than its head was
cut; one that is a single record longer was interrupted between the two writes. Half a line after the last record is an
unfinished write, and is removed. Anything else is refused. If both files are restored together to an older state, they
look genuine here: only somebody who knows a later head notices.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pydantic import ValidationError

from ddm.errors import ArchipelagoError, DocumentError
from ddm.io.files import DISK_FULL_ERRNOS, sync_folder, write_atomic
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


class ChainRecord(Document):
    """What every record of a chain has; a subclass adds its own fields."""

    number: PositiveInt
    previous: Digest
    at: Time


class ChainHead(Document):
    """The head of a chain; a subclass adds its format."""

    num_entries: NaturalInt
    head_digest: Digest


RecordT = TypeVar("RecordT", bound=ChainRecord)


@dataclass(frozen=True)
class ChainEntry(Generic[RecordT]):
    """One line: the sha256 of its bytes, and its record."""

    digest: str
    record: RecordT


@dataclass(frozen=True)
class ChainFormat(Generic[RecordT]):
    """The kind of a chain: its records, its bounds and its errors.

    Attributes:
        name: its name in errors.
        parse_record: parses one line; raises pydantic's `ValidationError`.
        head_model: the model of its head's document.
        genesis: what the first record names as the one before it.
        max_records: how many records it may have.
        error: raised where it is damaged.
        disk_full_remedy: what to do where the disk was full; None passes the `OSError` on.
    """

    name: str
    parse_record: Callable[[bytes], RecordT]
    head_model: type[ChainHead]
    genesis: Digest
    max_records: int
    error: type[ArchipelagoError]
    disk_full_remedy: str | None = None


class ChainGuard(Protocol):
    """A check of a chain against something outside it."""

    def check(self, digests: Sequence[str]) -> None:
        """Refuse a chain by the digests of its records, oldest first; called before anything in it is repaired."""

    def record(self, num_entries: int, head_digest: str) -> None:
        """Note the head; called once a record is durable. An `OSError` is the failure of that write."""


class Chain(Generic[RecordT]):
    """One chain of records on disk.

    Args:
        path: the log; its head and lock are beside it.
        chain_format: its kind.
        created_mark: a folder, made last of all: while it exists, a missing file is damage.
        guard: checks it against something outside.
    """

    def __init__(
        self,
        path: Path,
        chain_format: ChainFormat[RecordT],
        created_mark: Path,
        guard: ChainGuard | None = None,
    ) -> None:
        self.path = path
        self.format = chain_format
        self._created_mark = created_mark
        self._guard = guard
        self._head_path = path.with_suffix(".head")

    @contextmanager
    def locked_entries(self) -> Iterator[tuple[ChainEntry[RecordT], ...]]:
        """Lock the chain for one process at a time; yield every record, verified, and repaired where that is safe.

        Raises:
            ArchipelagoError: the format's error: a line was edited, removed or added, or the head was replaced.
        """
        with self._lock():
            yield self._read()

    def last_digest(self, entries: tuple[ChainEntry[RecordT], ...]) -> Digest:
        """Return what the next record names as the one before it."""
        if not entries:
            return self.format.genesis
        return entries[-1].digest

    def append(self, record: RecordT) -> ChainEntry[RecordT]:
        """Write a line, then the head; both are durable when this returns. Call it while the chain is locked.

        A failed write is left in place: the next reading removes half a line, and keeps a whole one.

        Raises:
            ArchipelagoError: the format's error: the chain is full, or the write failed.
            OSError: the disk is full, and the format has no remedy for that.
        """
        name = self.format.name
        if record.number > self.format.max_records:
            expected = f"at most {self.format.max_records} records"
            raise self.format.error(name, expected=expected, got=f"record {record.number}")
        line = record.encode()
        entry = ChainEntry(sha256_hex(line), record)
        try:
            # The line before the head: a crash between the two leaves one record more than the head counts, which
            # `_read` accepts. The other order would leave a head without its record, which is how a cut log looks.
            self._append_line(line)
            self._write_head(record.number, entry.digest)
            if self._guard is not None:
                self._guard.record(record.number, entry.digest)
        except OSError as error:
            is_disk_full = error.errno in DISK_FULL_ERRNOS
            if is_disk_full and self.format.disk_full_remedy is None:
                error.filename = error.filename or str(self.path)
                raise
            remedy = self.format.disk_full_remedy if is_disk_full else None
            got = f"a write to {self.path} that failed: {error.strerror or error}"
            raise self.format.error(
                name, expected="a durable record", got=got, remedy=remedy
            ) from error
        return entry

    def create(self) -> None:
        """Make a new chain where nothing remains of an old one.

        A crash after any step, or another process that does the same, causes no harm.

        Raises:
            ArchipelagoError: the format's error: part of one is there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if self._created_mark.is_dir():
                return
            if not self._head_path.exists():
                # The head comes first below, so that a log without one is what remains of a damaged chain.
                if self.path.exists():
                    raise self.format.error(
                        f"{self.format.name} head",
                        expected=f"the file beside the {self.format.name}",
                        got="no file",
                    )
                self._write_head(0, self.format.genesis)
            if not self.path.exists() and self._read_head().num_entries == 0:
                write_atomic(self.path, b"", mode=0o600)
            self._created_mark.mkdir(mode=0o700)
            sync_folder(self.path.parent)

    def _lock(self) -> AbstractContextManager[None]:
        return lock_file(self.path.with_suffix(".lock"))

    def _append_line(self, line: bytes) -> None:
        # No O_CREAT: a log that is gone must not begin again.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with os.fdopen(descriptor, "wb", buffering=0) as handle:
            if handle.write(line + b"\n") != len(line) + 1:
                raise OSError("short write")
            os.fsync(handle.fileno())
        sync_folder(self.path.parent)

    def _read(self) -> tuple[ChainEntry[RecordT], ...]:
        head = self._read_head()
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise self.format.error(
                self.format.name,
                expected=f"{head.num_entries} records",
                got="no readable file",
            ) from error
        # Every record ends with a newline: what follows the last one is nothing, or half a record.
        *lines, unfinished_line = data.split(b"\n")
        entries = self._parse(lines)
        self._check_length(len(entries), head.num_entries, bool(unfinished_line))

        last_digest = self.last_digest(entries[: head.num_entries])
        if last_digest != head.head_digest:
            raise self.format.error(
                f"{self.format.name} head",
                expected=f"the digest of the {self.format.name}'s last record, {last_digest}",
                got=head.head_digest,
            )
        # Before the repairs below, so that a chain which the guard refuses stays as it was found.
        if self._guard is not None:
            self._guard.check([entry.digest for entry in entries])
        if unfinished_line:
            self._truncate(len(data) - len(unfinished_line))
        if len(entries) > head.num_entries:
            self._write_head(len(entries), self.last_digest(entries))
        return entries

    def _check_length(self, num_records: int, num_in_head: int, is_unfinished: bool) -> None:
        """Allow a single record, or part of one, more than the head counts: what an interrupted write leaves."""
        num_more = num_records - num_in_head
        if num_more == 0 or (num_more == 1 and not is_unfinished):
            return
        got = f"{num_records}"
        if num_more > 0:
            got += " records"
            if is_unfinished:
                got += " and part of another"
        expected = f"{num_in_head} records, as its head says"
        raise self.format.error(self.format.name, expected=expected, got=got)

    def _parse(self, lines: list[bytes]) -> tuple[ChainEntry[RecordT], ...]:
        """Check each line by itself and against the one before."""
        entries: list[ChainEntry[RecordT]] = []
        previous = self.format.genesis
        for number, line in enumerate(lines, start=1):
            subject = f"{self.format.name} record {number}"
            try:
                check_json(line, subject=subject, limit=MAX_LINE_BYTES)
                record = self.format.parse_record(line)
            except (DocumentError, ValidationError) as error:
                raise self.format.error(
                    subject,
                    expected="a record as it was written",
                    got="a line that is not a record",
                ) from error
            # Of several JSON texts with the same values only one is genuine, or the digest would be open to choice.
            is_canonical = record.encode() == line
            if not is_canonical or record.number != number or record.previous != previous:
                got = f"number {record.number} after {record.previous[:16]}"
                if not is_canonical:
                    got += ", in another form"
                expected = f"number {number} in canonical form, after {previous[:16]}"
                raise self.format.error(subject, expected=expected, got=got)
            previous = sha256_hex(line)
            entries.append(ChainEntry(previous, record))
        return tuple(entries)

    def _truncate(self, size: int) -> None:
        with self.path.open("rb+") as handle:
            handle.truncate(size)
            os.fsync(handle.fileno())

    def _write_head(self, num_entries: int, digest: str) -> None:
        head = self.format.head_model(num_entries=num_entries, head_digest=digest)
        write_atomic(self._head_path, head.encode(), mode=0o600)

    def _read_head(self) -> ChainHead:
        subject = f"{self.format.name} head"
        try:
            data = self._head_path.read_bytes()
            return self.format.head_model.parse(data, subject=subject, limit=MAX_LINE_BYTES)
        except (OSError, DocumentError) as error:
            raise self.format.error(
                subject,
                expected=f"the file beside the {self.format.name}",
                got=f"a file that is missing or damaged ({type(error).__name__})",
            ) from error
