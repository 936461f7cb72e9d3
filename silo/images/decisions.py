"""Which pictures a person must see first, and what was decided about them, in the private folder of their scans.

A picture is told by the digest of its pixels. Clearing it holds for exactly the flags that the person saw: with a new
one it waits again. Leaving it out holds whatever its flags, also for a copy of it that has none. Whether slices in
files of their own make a head is known after all of them were seen: each scan writes that here too.
"""

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
_FILE = "decisions.sqlite"
_SCHEMA = """
create table if not exists series (pseudonym text primary key, head integer not null) without rowid;
create table if not exists decisions (
    pixels text not null, flags text not null, decision text not null check (decision in ('clear', 'leave out')),
    primary key (pixels, flags)) without rowid;
"""


class Decision(StrEnum):
    """What a person says of one picture."""

    CLEAR = "clear"
    LEAVE_OUT = "leave out"


class Decisions:
    """The decisions about one data set. Use `Decisions.opened`; several processes may have them open."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path, self._database = path, database
        self._look()

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> "Iterator[Decisions]":
        """Open the decisions in a private folder, or make both.

        Args:
            folder: of the data set's scans.

        Raises:
            SetupError: the file is damaged; each method raises it too.
            OSError: it cannot be read or written; so does each method.
        """
        private_folder(folder)
        path = folder / _FILE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(path)
        try:
            with _readable(path):
                database.executescript(_SCHEMA)
            yield Decisions(path, database)
        finally:
            database.close()

    def verdict(self, seen: PictureRecord) -> str | None:
        """Return why a picture is not used: its own reason, a flag that waits for a person, or that one left it out.

        Args:
            seen: the picture, as its decoder or the scan's memory gives it.

        Returns:
            None where it may be used.
        """
        if seen.reason is not None:
            return seen.verdict
        seen = self.flagged(seen)
        found = self._decided(seen)
        return LEFT_OUT if found is Decision.LEAVE_OUT else None if found is Decision.CLEAR else seen.verdict

    def of(self, seen: PictureRecord) -> Decision | None:
        """Return what was decided about a picture; None where it waits for a person, or needs none."""
        return self._decided(self.flagged(seen))

    def _decided(self, seen: PictureRecord) -> Decision | None:
        if not seen.flags and not self._any_left_out:
            return None
        query = "select flags, decision from decisions where pixels = ?"
        with _readable(self._path):
            found = dict(self._database.execute(query, (seen.pixels,)).fetchall())
        if Decision.LEAVE_OUT in found.values():
            return Decision.LEAVE_OUT
        return Decision.CLEAR if _text(seen.flags) in found else None

    @property
    def any(self) -> bool:
        """Whether anything was decided."""
        with _readable(self._path):
            return bool(self._database.execute("select exists (select 1 from decisions)").fetchone()[0])

    @property
    def digest(self) -> str:
        """Changes with any decision."""
        found = hashlib.sha256()
        for row in self._database.execute("select pixels, flags, decision from decisions order by pixels, flags"):
            found.update(repr(row).encode())
        return found.hexdigest()

    def record(self, pictures: Iterable[PictureRecord], decision: Decision | None) -> None:
        """Keep what was decided about pictures, durably and all of it or nothing.

        Args:
            pictures: each with pixels and flags.
            decision: None takes back what was decided.
        """
        keys = [(seen.pixels, _text(self.flagged(seen).flags)) for seen in pictures]
        with _readable(self._path), self._database:
            forget = "delete from decisions where pixels = ? and (flags = ? or decision = 'leave out')"
            self._database.executemany(forget, keys)
            if decision is not None:
                rows = ((*key, decision.value) for key in dict.fromkeys(keys))
                self._database.executemany("insert into decisions values (?, ?, ?)", rows)
        self._look()

    def flagged(self, seen: PictureRecord) -> PictureRecord:
        """Return a picture with the flag of a face where it is a slice of a head; of a scan not yet judged, too."""
        if seen.slice is None or Flag.FACE.value in seen.flags:
            return seen
        with _readable(self._path):
            query = "select head from series where pseudonym = ?"
            judged = self._database.execute(query, (seen.slice.series,)).fetchone()
        if judged is not None and not judged[0]:
            return seen
        return seen.model_copy(update={"flags": tuple(sorted((*seen.flags, Flag.FACE.value)))})

    def judge(self, series: Mapping[str, bool]) -> None:
        """Replace what is known of scans in files of their own.

        Args:
            series: for the pseudonym of each, whether its slices together may show a face.
        """
        with _readable(self._path), self._database:
            self._database.execute("delete from series")
            self._database.executemany("insert into series values (?, ?)", series.items())

    def _look(self) -> None:
        with _readable(self._path):
            query = "select exists (select 1 from decisions where decision = 'leave out')"
            self._any_left_out = bool(self._database.execute(query).fetchone()[0])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise the errors of this file as those of `opened`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise OSError(5, f"decisions cannot be read or written ({type(error).__name__})", str(path)) from error
    except sqlite3.DatabaseError as error:
        remedy = "Restore it from backup, or delete it: whoever decided then decides again."
        expected, got = "decisions about images", "a damaged file"
        raise SetupError(str(path), expected=expected, got=got, remedy=remedy) from error


def _text(flags: Iterable[str]) -> str:
    return "\n".join(sorted(flags))
