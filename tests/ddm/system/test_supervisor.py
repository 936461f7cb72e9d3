"""Programs that die, hang or never work, as real processes."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddm.errors import TransportError
from ddm.system.processes import Child, spawn
from ddm.system.supervisor import HeartbeatFile, Program, Supervisor
from tests.support.clocks import ManualClock
from tests.support.errors import has_subject
from tests.support.processes import is_running
from tests.support.waiting import LIMIT_S, wait_until

# Beats while the file `work` is there, and lives on without beating when it is gone.
WORKER = """
import pathlib, time
folder = pathlib.Path({folder!r})
print("up", flush=True)
while True:
    if (folder / "work").exists():
        (folder / "alive").touch()
    time.sleep(0.02)
"""


def starter(folder: Path, code: str, name: str = "worker") -> Callable[[], Child]:
    return lambda: spawn([sys.executable, "-c", code], log_path=folder / f"{name}.log", grace_s=0.2)


def worker(folder: Path, silent_s: float = 1.5) -> Program:
    (folder / "work").touch()
    beat = HeartbeatFile(folder / "alive").beats
    start = starter(folder, WORKER.format(folder=str(folder)))
    return Program("worker", start, works=beat, silent_s=silent_s, check_every_s=0.1)


@contextmanager
def kept(*programs: Program, **settings: object) -> Iterator[Supervisor]:
    running = Supervisor(programs, **settings)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.stop()


def check_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    wait_until(condition, check=supervisor.check)


def test_program_that_was_killed_is_started_again(tmp_path: Path) -> None:
    # on a loaded machine it takes a while to start
    with kept(worker(tmp_path, silent_s=60.0)) as supervisor:
        supervisor.start("worker", timeout_s=LIMIT_S)
        first = supervisor.pids()["worker"]
        os.kill(first, signal.SIGKILL)
        check_until(
            supervisor,
            lambda: supervisor.num_restarts()["worker"] == 1 and supervisor.ready("worker"),
        )
        assert supervisor.pids()["worker"] != first


@pytest.mark.parametrize("how", ["lives on without working", "is stopped"])
def test_program_is_replaced_when_it_hangs(how: str, tmp_path: Path) -> None:
    with kept(worker(tmp_path)) as supervisor:
        supervisor.start("worker", timeout_s=LIMIT_S)
        first = supervisor.pids()["worker"]
        if how == "is stopped":
            os.kill(first, signal.SIGSTOP)
        else:
            (tmp_path / "work").unlink()
        check_until(supervisor, lambda: not is_running(first))
        (tmp_path / "work").touch()
        check_until(supervisor, lambda: supervisor.ready("worker"))
        assert supervisor.num_restarts()["worker"] >= 1


def test_program_is_left_alone_while_it_works(tmp_path: Path) -> None:
    clock = ManualClock()
    with kept(worker(tmp_path, silent_s=60.0), clock=clock) as supervisor:
        supervisor.start("worker", timeout_s=LIMIT_S)
        first = supervisor.pids()
        beat = HeartbeatFile(tmp_path / "alive")
        for _ in range(4):  # twice as long as it may be silent, with a beat every half of that
            beat.beats()
            wait_until(beat.beats, "a heartbeat")
            clock.now += 30.0
            supervisor.check()
        assert supervisor.pids() == first and supervisor.num_restarts() == {"worker": 0}


def test_time_in_which_the_supervisor_stood_still_is_not_held_against_a_program(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    answers = iter([True, False, True])
    program = Program(
        "worker", starter(tmp_path, "import time; time.sleep(60)"), works=lambda: next(answers)
    )
    with kept(program, clock=clock) as supervisor:
        supervisor.start("worker")
        for passed in (10.0, 100_000.0, 10.0):
            clock.now += passed
            supervisor.check()
        assert supervisor.num_restarts() == {"worker": 0}


def test_supervisor_gives_up_on_a_program_that_cannot_run(tmp_path: Path) -> None:
    clock = ManualClock()
    start = starter(tmp_path, "print('no such thing'); raise SystemExit(3)", "broken")
    program = Program("broken", start, max_per_hour=3)
    with kept(program, clock=clock) as supervisor:
        supervisor.start("broken")

        def fail() -> None:
            while True:
                supervisor.check()
                if not supervisor.pids():  # it waits to be started again
                    clock.now += 120.0
                time.sleep(0.01)

        with pytest.raises(TransportError, check=has_subject("broken")):
            fail()
        assert supervisor.num_restarts() == {"broken": 3}


def test_start_is_refused_when_the_program_ends_or_never_works(tmp_path: Path) -> None:
    dying = Program("dying", starter(tmp_path, "print('bad luck')", "dying"), works=lambda: False)
    idle = Program(
        "idle", starter(tmp_path, "import time; time.sleep(60)", "idle"), works=lambda: False
    )
    with kept(dying, idle) as supervisor:
        with pytest.raises(TransportError, check=has_subject("dying")):
            supervisor.start("dying", timeout_s=LIMIT_S)
        with pytest.raises(TransportError, check=has_subject("idle")):
            supervisor.start("idle", timeout_s=0.2)
        pids = supervisor.pids()
    assert not any(map(is_running, pids.values()))


def test_heartbeat_does_not_mind_a_clock_that_jumps(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    heartbeat = HeartbeatFile(path)
    assert not heartbeat.beats(), "no file"
    path.touch()
    assert heartbeat.beats() and not heartbeat.beats()
    for jump in (-172_800, 172_800):
        os.utime(path, (time.time() + jump, time.time() + jump))
        assert heartbeat.beats() and not heartbeat.beats()
