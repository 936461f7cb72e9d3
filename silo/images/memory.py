"""What earlier scans found, in a private folder: a file whose content is the same is not decoded again.

A file counts as unchanged by path, size and times; where one of these differs, by the digest of its content. Results of
other versions of the decoders, or of other limits, are forgotten. What this machine may be to blame for holds until the
next scan, which tries it again.
"""

import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.find import Entry
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.io.modes import private_folder
from silo.images.decisions import Decisions

DATABASE = "memory.sqlite"
KEY_BYTES = 32
_FORMAT = 2  # changes with the schema, and with `PictureRecord`
_RACE_NS = 50_000_000  # a change so soon before a look may bear the same time as one after it
_COMMIT_S = 2.0
_PASSING = (Reason.FORBIDDEN, Reason.MISSING, Reason.MEMORY, Reason.TIME)  # where no content is known
_SCHEMA = """
create table if not exists files (
    number integer primary key, path blob not null unique, stats text not null, digest text not null,
    recipe text not null, scan integer not null, reason text, detail text not null);
create table if not exists pictures (
    file integer not null references files (number) on delete cascade, place integer not null, seen text not null,
    primary key (file, place)) without rowid;
"""


@dataclass(frozen=True)
class Kept:
    """What is known of a file.

    Attributes:
        number: under which it is kept.
        digest: of its content when it was decoded; empty where that is not known.
        unchanged: by size and times.
        reason: why it gave no picture, or no more of them.
        detail: more of that.
    """

    number: int
    digest: str
    unchanged: bool
    reason: Reason | None
    detail: str

    @property
    def passing(self) -> bool:
        """Whether the machine may be to blame for the reason, which may be gone though the file is unchanged."""
        return self.reason in _PASSING and not self.digest


class Memory:
    """The folder of one data set's scans. Use `Memory.opened`.

    Attributes:
        folder: of this user alone.
        key: of the pseudonyms, made with the folder.
    """

    def __init__(self, folder: Path, key: bytes, database: sqlite3.Connection, recipe: str) -> None:
        self.folder, self.key = folder, key
        self._database, self._recipe = database, recipe
        self._committed = time.monotonic()
        self._scan = 1 + int(self._database.execute("select coalesce(max(scan), 0) from files").fetchone()[0])

    @staticmethod
    @contextmanager
    def opened(folder: Path, recipe: str) -> "Iterator[Memory]":
        """Open the folder, or make it; one process at a time.

        Args:
            folder: where.
            recipe: names all that results depend on besides the files.

        Raises:
            BusyError: another scan works there.
            SetupError: its database is damaged; or its key is lost, and decisions about pictures are not.
        """
        private_folder(folder)
        with locked(folder, "scan"):
            key, path = _key(folder), folder / DATABASE
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.close(descriptor)
            try:
                database = sqlite3.connect(path)
                try:
                    database.execute("pragma foreign_keys = on")
                    database.execute("pragma synchronous = normal")
                    database.executescript(_SCHEMA)
                    memory = Memory(folder, key, database, f"{_FORMAT} {recipe}")
                    try:
                        yield memory
                    finally:
                        database.commit()
                finally:
                    database.close()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise OSError(5, f"the scan's memory cannot be read or written ({type(error).__name__})") from error
                remedy = "Delete this file: the next scan reads all images again."
                raise SetupError(
                    str(path), expected="the memory of scans", got="a damaged one", remedy=remedy
                ) from error

    def find(self, entry: Entry) -> Kept | None:
        """Return what is known of a file by its path."""
        query = "select number, digest, stats, reason, detail from files where path = ? and recipe = ?"
        row = self._database.execute(query, (os.fsencode(entry.path), self._recipe)).fetchone()
        if row is None:
            return None
        number, digest, stats, reason, detail = row
        return Kept(number, digest, stats == repr(entry.stats), Reason(reason) if reason else None, detail)

    def path(self, number: int) -> str:
        """Return the path of a file that is kept."""
        (path,) = self._database.execute("select path from files where number = ?", (number,)).fetchone()
        return os.fsdecode(path)

    def pictures(self, number: int) -> Iterator[PictureRecord]:
        """Yield the pictures of a file, in its order."""
        rows = self._database.execute("select seen from pictures where file = ? order by place", (number,))
        for (text,) in rows:
            yield PictureRecord.model_validate_json(text)

    def flagged(self) -> Iterator[tuple[str, int, PictureRecord]]:
        """Yield each picture that a person must see first or may have to: path and place of it, in the files' order."""
        query = """
        select path, place, seen from pictures join files on number = file where recipe like ? and
        (json_extract(seen, '$.flags[0]') is not null or json_extract(seen, '$.slice') is not null) order by path, place
        """
        for path, place, text in self._database.execute(query, (f"{_FORMAT} %",)):
            yield os.fsdecode(path), place, PictureRecord.model_validate_json(text)

    def confirm(self, entry: Entry, kept: Kept) -> None:
        """Note that a file is still there, with the content that is known."""
        values = (self._stats(entry), self._scan, kept.number)
        self._database.execute("update files set stats = ?, scan = ? where number = ?", values)
        self._commit()

    def begin(self, entry: Entry) -> int:
        """Forget what was known of a file, and return the number under which its pictures are to be kept."""
        return self._insert(entry, "", "", "", None, "")  # of no recipe: nothing counts until the file is done

    def keep(self, entry: Entry, seen: Iterable[PictureRecord], digest: str, reason: Reason | None, detail: str) -> int:
        """Keep all of a file at once in place of what was known of it; return its number."""
        number = self._insert(entry, self._stats(entry), digest, self._recipe, reason, detail)
        self.add(number, 0, seen)
        self._commit()
        return number

    def _insert(self, entry: Entry, stats: str, digest: str, recipe: str, reason: Reason | None, detail: str) -> int:
        path = os.fsencode(entry.path)
        self._database.execute("delete from files where path = ?", (path,))
        values = (path, stats, digest, recipe, self._scan, reason, detail)
        query = "insert into files (path, stats, digest, recipe, scan, reason, detail) values (?, ?, ?, ?, ?, ?, ?)"
        return int(self._database.execute(query, values).lastrowid or 0)

    def add(self, number: int, place: int, seen: Iterable[PictureRecord]) -> None:
        """Keep pictures of a file, the first of them at this place."""
        rows = ((number, each, one.model_dump_json()) for each, one in enumerate(seen, place))
        self._database.executemany("insert into pictures values (?, ?, ?)", rows)

    def finish(self, number: int, entry: Entry, digest: str, reason: Reason | None, detail: str) -> None:
        """Note that all of a file is kept."""
        values = (self._stats(entry), digest, self._recipe, reason, detail, number)
        query = "update files set stats = ?, digest = ?, recipe = ?, reason = ?, detail = ? where number = ?"
        self._database.execute(query, values)
        self._commit()

    def forget_others(self) -> None:
        """Forget files that this scan did not come across."""
        self._database.execute("delete from files where scan != ?", (self._scan,))
        self._database.commit()

    def _stats(self, entry: Entry) -> str:
        newest = max((max(changed, entered) for _, changed, entered in entry.stats), default=0)
        return "" if newest > entry.stated_ns - _RACE_NS else repr(entry.stats)

    def _commit(self) -> None:
        if time.monotonic() - self._committed > _COMMIT_S:
            self._database.commit()
            self._committed = time.monotonic()


def _key(folder: Path) -> bytes:
    """Return the key; where there is none, make it, and forget what was kept under a lost one: its pseudonyms differ.

    Raises:
        SetupError: a person decided about pictures under the lost one, which a new one could not find again.
    """
    path = folder / "key"
    if not path.exists():
        with Decisions.opened(folder) as decisions:
            if decisions.any:
                expected, got = "the key of decisions.sqlite beside it", "decisions without their key"
                remedy = "Restore it from backup; or delete decisions.sqlite, scan, and look at the images again."
                raise SetupError(str(path), expected=expected, got=got, remedy=remedy)
        for name in (DATABASE, f"{DATABASE}-journal"):
            (folder / name).unlink(missing_ok=True)
        write_atomic(path, secrets.token_bytes(KEY_BYTES), mode=0o600)
    return read_bounded(path, KEY_BYTES)
