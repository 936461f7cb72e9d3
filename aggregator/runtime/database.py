"""Recognises a SuperLink's database that cannot be read any more, and moves it aside: Flower makes a new one.

All progress is in the federation's folders. The database remembers the nodes, which are registered again, and the run,
which is submitted again; transfers that were interrupted are requested again.
"""

import logging
import sqlite3
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
# Journals: without their database, or beside another one, they would be played back into it.
_COMPANIONS = ("-journal", "-wal", "-shm")
_BUSY = ("locked", "busy")
# Damaged databases that stay for an operator to look at.
_MAX_DAMAGED = 3
_log = logging.getLogger(__name__)


def fault_of(database: Path) -> str | None:
    """Return in a few words why a database cannot be used; None where it can, or where there is none yet.

    One that another process holds is not at fault. Opening the database plays back a journal that a dead process left.
    """
    try:
        size = database.stat().st_size if database.exists() else 0
        if not size:
            return None
        with database.open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        return "its first bytes are not those of a database"
    try:
        # Opened for writing, so that a journal is played back; a database that is gone is not made again.
        uri = f"{database.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        if any(word in str(error) for word in _BUSY):
            return None
        return str(error)
    if verdict == "ok":
        return None
    return f"{verdict} ({size} bytes)".replace("\n", " ")[:200]


def move_aside_if_damaged(database: Path) -> Path | None:
    """Move a damaged database and its journals aside, with a warning; return where to, None where nothing is wrong.

    Call it while no program has the database open.
    """
    fault = fault_of(database)
    if fault is None:
        return None
    aside = database.with_name(f"{database.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    for suffix in ("", *_COMPANIONS):
        with suppress(FileNotFoundError):
            database.with_name(database.name + suffix).replace(aside.with_name(aside.name + suffix))
    _log.warning(
        "%s is damaged (%s): moved to %s; a new one is made, and silos connect again",
        database,
        fault,
        aside,
    )
    for old in sorted(database.parent.glob(f"{database.name}.damaged-*[0-9]"))[:-_MAX_DAMAGED]:
        for suffix in ("", *_COMPANIONS):
            old.with_name(old.name + suffix).unlink(missing_ok=True)
    return aside
