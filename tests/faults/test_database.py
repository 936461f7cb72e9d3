"""A SuperLink whose database is damaged while it carries a plan: a new one is made, and the submission comes."""

import logging
import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_transport import PLAN, contents, intake, one_silo, submit
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def truncate(database: Path) -> None:
    """Without its journal, from which SQLite would repair it."""
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    os.truncate(database, database.stat().st_size // 2 + 100)


def overwrite_header(database: Path) -> None:
    with database.open("r+b") as stream:
        stream.write(b"\xff" * 100)


@pytest.mark.parametrize("damage", [truncate, overwrite_header])
def test_plan_completes_when_the_superlink_dies_and_leaves_a_damaged_database(
    damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with one_silo(tmp_path) as (fed, site, runtime, check):
        pid = int(runtime.info()["superlink_pid"])
        os.kill(pid, signal.SIGKILL)
        damage(fed / "flower" / "superlink.db")
        submit(site, "north")
        incoming = fed / "incoming" / PLAN / "north" / "1"
        wait_until(incoming.exists, check=check, limit_s=400.0)
        intake(fed, "north")
        wait_until(lambda: runtime.finished, check=check)
        assert runtime.num_restarts()["superlink"] == 1
    assert contents(incoming) == contents(site / "outbox" / PLAN / "1")
    assert len(list((fed / "flower").glob("superlink.db.damaged-*"))) >= 1
    assert "silos connect again" in caplog.text
