"""Keeps the results of earlier scans in a private folder: a file whose content is the same is not decoded again.

A file counts as unchanged by path, size and times; if one of these differs, by the digest of its content. Results of
other versions of the decoders, or of other limits, are forgotten.
"""

import errno
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import SetupError
from ddm.images.find import ImageFile
from ddm.images.reasons import Reason
from ddm.images.record import PictureRecord
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.io.modes import private_folder
from silo.images.decisions import Decisions

DATABASE = "memory.sqlite"
KEY_BYTES = 32
KEY_FILE = "key"
_FORMAT = 1  # changes with the schema, and with `PictureRecord`
# Any recipe of this format; an empty recipe is that of a file which is not finished.
_ANY_RECIPE = f"{_FORMAT} %"
# A change so soon before the file was examined may have the same time as a change after it.
_RACE_NS = 50_000_000
# Each commit waits for the disk; what a crash costs is decoded again.
_COMMIT_S = 2.0
_MAX_PENDING_PICTURES = 256  # of one file, before they are written
# Failures that may be the machine's, as long as the content of the file is not known.
_MACHINE_FAILURES = (Reason.FORBIDDEN, Reason.MISSING, Reason.MEMORY, Reason.TIME)
# Paths are bytes, because names in a file system need not be UTF-8.
_SCHEMA = """
create table if not exists files (
    number integer primary key, path blob not null unique, stats text not null, digest text not null,
    recipe text not null, scan integer not null, reason text, detail text not null);
create table if not exists pictures (
    file integer not null references files (number) on delete cascade, place integer not null, record text not null,
    primary key (file, place)) without rowid;
"""


@dataclass(frozen=True)
class RememberedFile:
    """What is known of a file.

    Attributes:
        number: its key in the database.
        digest: the digest of its content when it was decoded; empty if the content could not be read.
        unchanged: whether size and times are the same as then.
        reason: why it gave no picture, or no more pictures.
        detail: more about the reason.
    """

    number: int
    digest: str
    unchanged: bool
    reason: Reason | None
    detail: str

    @property
    def may_pass(self) -> bool:
        """Whether the failure may have been the machine's, so that it may be gone though the file is unchanged."""
        return self.reason in _MACHINE_FAILURES and not self.digest


class ScanMemory:
    """The folder of one data set's scans. Use `ScanMemory.opened`.

    Attributes:
        folder: readable by this user alone.
        key: secret of pseudonyms and fingerprints, made with the folder.
    """

    def __init__(
        self,
        folder: Path,
        key: bytes,
        database: sqlite3.Connection,
        recipe: str,
    ) -> None:
        self.folder = folder
        self.key = key
        self._database = database
        self._recipe = recipe
        self._last_commit_s = time.monotonic()
        (last_scan,) = self._database.execute("select coalesce(max(scan), 0) from files").fetchone()
        self._scan = int(last_scan) + 1

    @staticmethod
    @contextmanager
    def opened(folder: Path, recipe: str) -> "Iterator[ScanMemory]":
        """Open the folder, or make it; one process at a time.

        Args:
            folder: private.
            recipe: names all that results depend on besides the files.

        Raises:
            BusyError: another scan is at work there.
            SetupError: its database is damaged; or its key is lost, and decisions about pictures are not.
        """
        private_folder(folder)
        with locked(folder, "scan"):
            key = _key(folder)
            path = folder / DATABASE
            # Made here, because SQLite would make it by the umask.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.close(descriptor)
            with _readable(path):
                database = sqlite3.connect(path)
                try:
                    # Off by default: without it the pictures of a forgotten file would stay.
                    database.execute("pragma foreign_keys = on")
                    # What a power failure may cost here, the next scan decodes again. Decisions, which nothing gives
                    # again, are in a file of their own with SQLite's default.
                    database.execute("pragma synchronous = normal")
                    database.executescript(_SCHEMA)
                    memory = ScanMemory(folder, key, database, f"{_FORMAT} {recipe}")
                    try:
                        yield memory
                    finally:
                        database.commit()
                finally:
                    database.close()

    def find(self, file: ImageFile) -> RememberedFile | None:
        """Return what is known of a file by its path."""
        query = (
            "select number, digest, stats, reason, detail from files where path = ? and recipe = ?"
        )
        values = (os.fsencode(file.path), self._recipe)
        row = self._database.execute(query, values).fetchone()
        if row is None:
            return None
        number, digest, stats, reason, detail = row
        return RememberedFile(
            number=number,
            digest=digest,
            unchanged=stats == repr(file.stats),
            reason=Reason(reason) if reason else None,
            detail=detail,
        )

    def pictures(self, number: int) -> Iterator[PictureRecord]:
        """Yield the pictures of a file, in its order."""
        rows = self._database.execute(
            "select record from pictures where file = ? order by place", (number,)
        )
        for (text,) in rows:
            yield PictureRecord.model_validate_json(text)

    def slices(self) -> Iterator[PictureRecord]:
        """Yield the pictures that are slices of a scan in files of their own."""
        query = "select record from pictures where json_extract(record, '$.slice') is not null"
        for (text,) in self._database.execute(query):
            yield PictureRecord.model_validate_json(text)

    def flagged(self) -> Iterator[tuple[str, int, PictureRecord]]:
        """Yield path, place and record of each picture that a person must or may have to see first."""
        query = """
        select path, place, record from pictures join files on number = file where recipe like ? and
        (json_extract(record, '$.flags[0]') is not null or json_extract(record, '$.slice') is not null)
        order by path, place
        """
        for path, place, text in self._database.execute(query, (_ANY_RECIPE,)):
            yield os.fsdecode(path), place, PictureRecord.model_validate_json(text)

    def paths(self) -> Iterator[str]:
        """Yield the paths of all files, in their order."""
        query = "select path from files where recipe like ? order by path"
        for (path,) in self._database.execute(query, (_ANY_RECIPE,)):
            yield os.fsdecode(path)

    def pictures_of(self, path: str) -> Iterator[tuple[int, PictureRecord]]:
        """Yield place and record of each picture of a file."""
        query = """
        select place, record from pictures join files on number = file where path = ? and recipe like ? order by place
        """
        values = (os.fsencode(path), _ANY_RECIPE)
        for place, text in self._database.execute(query, values):
            yield place, PictureRecord.model_validate_json(text)

    def picture(self, path: str, place: int) -> PictureRecord | None:
        """Return one picture of a file; None where it is not known."""
        query = "select record from pictures join files on number = file where path = ? and place = ? and recipe like ?"
        values = (os.fsencode(path), place, _ANY_RECIPE)
        row = self._database.execute(query, values).fetchone()
        if row is None:
            return None
        (text,) = row
        return PictureRecord.model_validate_json(text)

    def with_pixels(self, pixels: Collection[str]) -> Iterator[tuple[str, int, PictureRecord]]:
        """Yield path, place and record of each picture with one of these fingerprints, in the order of the files."""
        if not pixels:
            return
        query = """
        select path, place, record from pictures join files on number = file
        where recipe like ? and json_extract(record, '$.pixels') in (select value from json_each(?))
        order by path, place
        """
        # As one JSON array: SQLite bounds the number of values in a query.
        fingerprints = json.dumps(sorted(pixels))
        for path, place, text in self._database.execute(query, (_ANY_RECIPE, fingerprints)):
            yield os.fsdecode(path), place, PictureRecord.model_validate_json(text)

    def confirm(self, file: ImageFile, remembered: RememberedFile) -> None:
        """Note that a file still has the content that is known."""
        values = (self._stats(file), self._scan, remembered.number)
        self._database.execute("update files set stats = ?, scan = ? where number = ?", values)
        self._commit_now_and_then()

    def begin(self, file: ImageFile) -> int:
        """Forget what was known of a file; return the number of its new pictures, which count once it is finished."""
        path = os.fsencode(file.path)
        self._database.execute("delete from files where path = ?", (path,))
        # An empty recipe is that of no scan: what a crash leaves of the file is not found again.
        query = "insert into files (path, stats, digest, recipe, scan, detail) values (?, '', '', '', ?, '')"
        cursor = self._database.execute(query, (path, self._scan))
        return int(cursor.lastrowid or 0)

    def add(
        self,
        number: int,
        place: int,
        records: Iterable[PictureRecord],
    ) -> None:
        """Write pictures of a file, the first of them at this place."""
        rows = []
        for record_place, record in enumerate(records, place):
            rows.append((number, record_place, record.model_dump_json()))
        self._database.executemany("insert into pictures values (?, ?, ?)", rows)

    def finish(
        self,
        number: int,
        file: ImageFile,
        digest: str,
        reason: Reason | None,
        detail: str,
    ) -> None:
        """Note that all pictures of a file are written."""
        values = (self._stats(file), digest, self._recipe, reason, detail, number)
        query = "update files set stats = ?, digest = ?, recipe = ?, reason = ?, detail = ? where number = ?"
        self._database.execute(query, values)
        self._commit_now_and_then()

    def forget_others(self) -> None:
        """Forget files that this scan did not find."""
        self._database.execute("delete from files where scan != ?", (self._scan,))
        self._database.commit()

    def _stats(self, file: ImageFile) -> str:
        """Return size and times by which a file is recognised; empty if it changed so lately that they may deceive."""
        newest_ns = 0
        for _, modified_ns, changed_ns in file.stats:
            newest_ns = max(newest_ns, modified_ns, changed_ns)
        if newest_ns > file.stated_ns - _RACE_NS:
            return ""
        return repr(file.stats)

    def _commit_now_and_then(self) -> None:
        if time.monotonic() - self._last_commit_s > _COMMIT_S:
            self._database.commit()
            self._last_commit_s = time.monotonic()


class PendingFile:
    """The new pictures of one file, written in blocks while they come.

    Attributes:
        num_pictures: so far.
    """

    def __init__(self, memory: ScanMemory, file: ImageFile) -> None:
        self.num_pictures = 0
        self._memory = memory
        self._file = file
        self._number: int | None = None
        self._records: list[PictureRecord] = []

    def add(self, record: PictureRecord) -> None:
        """Take the next picture."""
        self._records.append(record)
        self.num_pictures += 1
        if len(self._records) >= _MAX_PENDING_PICTURES:
            self._write()

    def finish(
        self,
        digest: str,
        reason: Reason | None,
        detail: str,
    ) -> None:
        """Write the rest; from now on they are what is known of the file."""
        number = self._write()
        self._memory.finish(number, self._file, digest, reason, detail)

    def _write(self) -> int:
        if self._number is None:
            self._number = self._memory.begin(self._file)
        first_place = self.num_pictures - len(self._records)
        self._memory.add(self._number, first_place, self._records)
        self._records.clear()
        return self._number


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    # This one first, since it is a DatabaseError too: a full disk or a lock is not damage, whose remedy is to delete
    # the file.
    except sqlite3.OperationalError as error:
        message = f"the scan's memory cannot be read or written ({type(error).__name__})"
        raise OSError(errno.EIO, message) from error
    except sqlite3.DatabaseError as error:
        raise SetupError(
            str(path),
            expected="the memory of scans",
            got="a damaged one",
            remedy="Delete this file: the next scan reads all images again.",
        ) from error


def _key(folder: Path) -> bytes:
    """Return the key; if there is none, make it, and forget what was stored under a lost one: its pseudonyms differ.

    Raises:
        SetupError: a person decided about pictures under the lost key, which a new one could not find again.
    """
    path = folder / KEY_FILE
    if not path.exists():
        with Decisions.opened(folder) as decisions:
            if decisions.has_any:
                raise SetupError(
                    str(path),
                    expected="the key of decisions.sqlite beside it",
                    got="decisions without their key",
                    remedy="Restore it from backup. Or delete decisions.sqlite, scan, and make the decisions again.",
                )
        # Before the new key: after a crash between the two, old pseudonyms would be read under the new key.
        for name in (DATABASE, f"{DATABASE}-journal"):
            (folder / name).unlink(missing_ok=True)
        write_atomic(path, secrets.token_bytes(KEY_BYTES), mode=0o600)
    return read_bounded(path, KEY_BYTES)
