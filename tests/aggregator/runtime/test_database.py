"""A SuperLink's database that a crash or a bad disk left: recognised, moved aside, and nothing else is."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aggregator.runtime.database import fault_of, move_aside_if_damaged
from tests.support.forked import fork_process, wait_for_exit

PAGE = 4096


def make(path: Path, num_rows: int = 400) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("CREATE TABLE node (id INTEGER PRIMARY KEY, key BLOB)")
        connection.executemany(
            "INSERT INTO node (key) VALUES (?)", [(os.urandom(200),) for _ in range(num_rows)]
        )
        connection.commit()
    return path


def overwritten(begin: int, size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as stream:
            stream.seek(begin)
            stream.write(b"\xa5" * size)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "header overwritten": overwritten(0, 16),
    "page size overwritten": overwritten(16, 20),
    "second page overwritten": overwritten(PAGE, PAGE),
    "last pages missing": lambda path: os.truncate(path, path.stat().st_size - 5 * PAGE),
    "half a page missing": lambda path: os.truncate(path, 20 * PAGE + 100),
    "a few bytes": lambda path: path.write_bytes(b"SQLite format 3\0"),
    "text": lambda path: path.write_bytes(b"no database\n" * 100) and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_database_is_moved_aside_with_its_journals_and_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = make(tmp_path / "superlink.db")
    DAMAGES[damage](database)
    (tmp_path / "superlink.db-journal").write_bytes(b"of the old one")
    damaged = database.read_bytes()
    aside = move_aside_if_damaged(database)
    assert aside is not None and aside.read_bytes() == damaged
    assert not database.exists() and not (tmp_path / "superlink.db-journal").exists()
    assert "superlink.db is damaged" in caplog.text and str(aside) in caplog.text
    assert move_aside_if_damaged(make(database)) is None


def test_sound_database_stays(tmp_path: Path) -> None:
    assert fault_of(tmp_path / "none.db") is None
    (tmp_path / "empty.db").touch()
    assert fault_of(tmp_path / "empty.db") is None
    database = make(tmp_path / "superlink.db")
    before = database.read_bytes()
    assert move_aside_if_damaged(database) is None and database.read_bytes() == before


def test_database_that_another_process_holds_is_not_at_fault(tmp_path: Path) -> None:
    database = make(tmp_path / "superlink.db")
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert fault_of(database) is None
    assert fault_of(database) is None


def killed_in_a_transaction(database: Path) -> None:
    """A process that dies with its pages half written: the journal beside the database says how they were."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE node SET key = randomblob(200)")
    os._exit(9)


def test_journal_of_a_dead_process_is_played_back(tmp_path: Path) -> None:
    database = make(tmp_path / "superlink.db")
    with closing(sqlite3.connect(database)) as connection:
        before = connection.execute("SELECT key FROM node ORDER BY id").fetchall()
    assert wait_for_exit(fork_process(lambda: killed_in_a_transaction(database))) == 9
    assert (tmp_path / "superlink.db-journal").stat().st_size > 0
    assert move_aside_if_damaged(database) is None
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT key FROM node ORDER BY id").fetchall() == before


def test_truncated_database_is_repaired_from_its_write_ahead_log(tmp_path: Path) -> None:
    """Such a log is what Flower keeps; nothing is lost, so nothing is moved."""
    database = tmp_path / "superlink.db"

    def killed() -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE node (id INTEGER PRIMARY KEY, key BLOB)")
        connection.executemany("INSERT INTO node (key) VALUES (?)", [(bytes(200),)] * 100)
        os._exit(9)

    assert wait_for_exit(fork_process(killed)) == 9
    os.truncate(database, database.stat().st_size // 2 + 100)
    assert move_aside_if_damaged(database) is None
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM node").fetchone() == (100,)


def test_journal_that_cannot_be_played_back_goes_aside_with_its_database(tmp_path: Path) -> None:
    database = make(tmp_path / "superlink.db")
    assert wait_for_exit(fork_process(lambda: killed_in_a_transaction(database))) == 9
    # half the pages are new, and nobody knows how they were
    (tmp_path / "superlink.db-journal").unlink()
    with database.open("r+b") as stream:
        stream.seek(2 * PAGE)
        stream.write(b"\xff" * (4 * PAGE))
    assert move_aside_if_damaged(database) is not None
    assert not database.exists()


def test_few_damaged_databases_are_kept(tmp_path: Path) -> None:
    for _ in range(6):
        (tmp_path / "superlink.db").write_bytes(b"damaged")
        assert move_aside_if_damaged(tmp_path / "superlink.db")
    assert len(list(tmp_path.iterdir())) == 3
