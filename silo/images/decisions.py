"""Which pictures a person must see first, and what was decided about them, in the private folder of their scans.

The digest of its pixels identifies a picture. Clearing it holds for exactly the flags that the person saw: with a new
one it waits again. Leaving it out holds whatever its flags, also for a copy of it that has none. Whether slices in
files of their own make a head is known after all of them were decoded: each scan writes that here too.
"""

import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.reasons import Flag
from ddm.images.record import PictureRecord
from ddm.io.modes import private_folder

LEFT_OUT = "left out by a person"
FILE = "decisions.sqlite"
_SCHEMA = """
create table if not exists series (pseudonym text primary key, head integer not null) without rowid;
create table if not exists decisions (
    pixels text not null, flags text not null, decision text not null check (decision in ('clear', 'leave out')),
    primary key (pixels, flags)) without rowid;
"""


class Decision(StrEnum):
    """What a person says about one picture."""

    CLEAR = "clear"
    LEAVE_OUT = "leave out"


class Decisions:
    """The decisions about one data set. Use `Decisions.opened`; several processes may have them open."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database
        self._read_whether_any_is_left_out()

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> "Iterator[Decisions]":
        """Open the decisions in a private folder, or make both.

        Args:
            folder: the folder of the data set's scans.

        Raises:
            SetupError: the file is damaged; each method raises it too.
            OSError: it cannot be read or written; so does each method.
        """
        private_folder(folder)
        path = folder / FILE
        # Made here, because SQLite would make it by the umask.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        os.close(descriptor)
        database = sqlite3.connect(path)
        try:
            with _readable(path):
                database.executescript(_SCHEMA)
            yield Decisions(path, database)
        finally:
            database.close()

    def verdict(self, record: PictureRecord) -> str | None:
        """Return why a picture is not used: its own reason, a flag, or that a person left it out.

        Args:
            record: from the decoder or from the scan's memory.

        Returns:
            None if it may be used.
        """
        # A person clears flags; what the decoder refused, nobody can clear.
        if record.reason is not None:
            return record.verdict
        record = self.flagged(record)
        decision = self._decision(record)
        if decision is Decision.LEAVE_OUT:
            return LEFT_OUT
        if decision is Decision.CLEAR:
            return None
        return record.verdict

    def of(self, record: PictureRecord) -> Decision | None:
        """Return what was decided about a picture; None if it waits for a person, or needs none."""
        return self._decision(self.flagged(record))

    def _decision(self, record: PictureRecord) -> Decision | None:
        # Most pictures have no flag: of a data set where nothing is left out, they need no query.
        if not record.flags and not self._any_left_out:
            return None
        query = "select flags, decision from decisions where pixels = ?"
        with _readable(self._path):
            cursor = self._database.execute(query, (record.pixels,))
            rows = cursor.fetchall()
        decision_by_flags = dict(rows)
        if Decision.LEAVE_OUT in decision_by_flags.values():
            return Decision.LEAVE_OUT
        # Cleared for exactly these flags: a new one was not seen by anybody.
        if _flags_text(record.flags) in decision_by_flags:
            return Decision.CLEAR
        return None

    @property
    def has_any(self) -> bool:
        """Whether anything was decided."""
        with _readable(self._path):
            query = "select exists (select 1 from decisions)"
            (exists,) = self._database.execute(query).fetchone()
        return bool(exists)

    def left_out(self) -> set[str]:
        """Return the fingerprints of the pictures that a person left out."""
        with _readable(self._path):
            query = "select distinct pixels from decisions where decision = 'leave out'"
            return {pixels for (pixels,) in self._database.execute(query)}

    def counts(self) -> dict[str, int]:
        """Return how many pictures, by their pixels, have each decision."""
        with _readable(self._path):
            query = "select decision, count(distinct pixels) from decisions group by decision"
            return dict(self._database.execute(query).fetchall())

    @property
    def digest(self) -> str:
        """Changes with any decision."""
        digest = hashlib.sha256()
        query = "select pixels, flags, decision from decisions order by pixels, flags"
        for row in self._database.execute(query):
            digest.update(repr(row).encode())
        return digest.hexdigest()

    def record(self, pictures: Iterable[PictureRecord], decision: Decision | None) -> None:
        """Keep what was decided about pictures, durably and all of it or nothing.

        Args:
            pictures: each with pixels and flags.
            decision: None takes back what was decided.
        """
        keys = []
        for record in pictures:
            flags = self.flagged(record).flags
            keys.append((record.pixels, _flags_text(flags)))
        # One transaction: a crash must not take back an old decision without writing the new one.
        with _readable(self._path), self._database:
            # Leaving out holds under all flags of a picture, so that a new decision replaces it under any of them.
            delete = (
                "delete from decisions where pixels = ? and (flags = ? or decision = 'leave out')"
            )
            self._database.executemany(delete, keys)
            if decision is not None:
                different_keys = dict.fromkeys(keys)
                rows = [(pixels, flags, decision.value) for pixels, flags in different_keys]
                self._database.executemany("insert into decisions values (?, ?, ?)", rows)
        self._read_whether_any_is_left_out()

    def flagged(self, record: PictureRecord) -> PictureRecord:
        """Return a picture with the flag of a face where it is a slice of a head; of a scan not yet judged, too."""
        if record.slice is None or Flag.FACE.value in record.flags:
            return record
        with _readable(self._path):
            query = "select head from series where pseudonym = ?"
            cursor = self._database.execute(query, (record.slice.series,))
            row = cursor.fetchone()
        # A scan that was not judged yet counts as one of a head.
        if row is not None:
            (is_head,) = row
            if not is_head:
                return record
        flags = sorted((*record.flags, Flag.FACE.value))
        return record.model_copy(update={"flags": tuple(flags)})

    def judge(self, series: Mapping[str, bool]) -> None:
        """Replace what is known of scans in files of their own.

        Args:
            series: for the pseudonym of each, whether its slices together may show a face.
        """
        # One transaction: a review may have the file open, and to it a slice without a row is one of a head.
        with _readable(self._path), self._database:
            self._database.execute("delete from series")
            self._database.executemany("insert into series values (?, ?)", series.items())

    def _read_whether_any_is_left_out(self) -> None:
        with _readable(self._path):
            query = "select exists (select 1 from decisions where decision = 'leave out')"
            (exists,) = self._database.execute(query).fetchone()
        self._any_left_out = bool(exists)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise the errors of this file as those of `opened`."""
    try:
        yield
    # This one first, since it is a DatabaseError too: a full disk or a lock is not damage, for which decisions would
    # have to be made again.
    except sqlite3.OperationalError as error:
        message = f"decisions cannot be read or written ({type(error).__name__})"
        raise OSError(errno.EIO, message, str(path)) from error
    except sqlite3.DatabaseError as error:
        raise SetupError(
            str(path),
            expected="decisions about images",
            got="a damaged file",
            remedy="Restore it from backup. If you delete it, all decisions must be made again.",
        ) from error


def _flags_text(flags: Iterable[str]) -> str:
    return "\n".join(sorted(flags))
