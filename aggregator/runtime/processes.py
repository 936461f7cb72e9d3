"""Which of a federation's processes are alive, read from the lock of `aggregator run` and from `info.json`."""

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aggregator.config import Federation
from ddm.errors import ArchipelagoError
from ddm.io.files import read_bounded
from ddm.io.locks import is_locked
from ddm.protocol.base import LocalText, Model, NaturalInt, PositiveInt, Time, check_json
from ddm.system.process_table import start_ticks

_MAX_INFO_BYTES = 65536
_PID = "_pid"


class Process(Model):
    """One program of the aggregator's, whether it is alive, and how often it was started again."""

    name: LocalText
    pid: PositiveInt | None
    alive: bool
    num_restarts: NaturalInt = 0


class Processes(Model):
    """What `aggregator run` started.

    Attributes:
        running: whether an `aggregator run` works on the folder now.
        started_at: since when it does.
        programs: those that it listed last; those of an earlier one when none runs.
        num_restarts: how often programs were started again, all together.
        num_runs: how often Flower's run was submitted.
    """

    running: bool
    started_at: Time | None = None
    programs: tuple[Process, ...] = ()
    num_restarts: NaturalInt = 0
    num_runs: NaturalInt = 0


def read_processes(federation: Federation) -> Processes:
    """Read which programs were started, and check whether they are alive."""
    folder = federation.path / "flower"
    running = is_locked(folder, "runtime")
    # Written once, at the start.
    started_at = changed_at(folder / "run.json") if running else None
    try:
        info = check_json(
            read_bounded(folder / "info.json", _MAX_INFO_BYTES),
            subject="info.json",
            limit=_MAX_INFO_BYTES,
        )
        return _processes(running, started_at, info)
    # `aggregator run` may be of another version, or killed before it wrote its first list.
    except (ArchipelagoError, ValidationError, AttributeError, KeyError, TypeError):
        return Processes(running=running, started_at=started_at)


def _processes(running: bool, started_at: datetime | None, info: Any) -> Processes:
    restarts = info.get("restarts", {})
    pids = {"aggregator run": info["pid"]}
    # A program that waits to be started again has no process now.
    for name in restarts:
        pids[name] = None
    for name, pid in info.items():
        if name.endswith(_PID) and pid:
            pids[name.removesuffix(_PID)] = pid
    programs = []
    for name, pid in pids.items():
        program = Process(
            name=name,
            pid=pid,
            alive=bool(pid and is_alive(pid)),
            num_restarts=restarts.get(name, 0),
        )
        programs.append(program)
    return Processes(
        running=running,
        started_at=started_at,
        programs=tuple(programs),
        num_restarts=info.get("num_restarts", 0),
        num_runs=info.get("num_runs", 0),
    )


def changed_at(path: Path) -> datetime | None:
    """Return when a file was written last; None where there is none."""
    with suppress(OSError):
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC).replace(microsecond=0)
    return None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    if Path("/proc/self").exists():
        return start_ticks(pid) > 0
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
