"""Programs kept alive: a description of each, and one loop that starts again what died or hangs.

Every few seconds a running program is checked: a server has to answer, one without a port leaves a heartbeat. One that
has not worked for a while is killed and counts as dead. What died is started again, more slowly each time, and only so
often an hour: a federation runs for weeks, so a fault now and then must not add up to an end, and a program that cannot
run must not hide it for ever.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import TransportError
from ddm.system.backoff import Backoff
from ddm.system.processes import Child, terminate_all

MAX_PER_HOUR = 12
# How often a program is checked until it first works.
_STARTING_CHECK_S = 1.0
_POLL_S = 0.05
_MAX_LOG_CHARACTERS = 300


@dataclass(frozen=True)
class Program:
    """One program to keep alive.

    Attributes:
        name: how messages call it.
        start: starts it under guard, and does not wait for it.
        works: whether it does its work now; called only while it runs, and returns within a few seconds.
        silent_s: after how long without work it is killed; it must be able to start in this time.
        check_every_s: how often `works` is called.
        max_per_hour: how often in any hour it may be started again.
        longest_delay_s: longest wait before it is started again.
    """

    name: str
    start: Callable[[], Child]
    works: Callable[[], bool] = lambda: True
    silent_s: float = 120.0
    check_every_s: float = 10.0
    max_per_hour: float = MAX_PER_HOUR
    longest_delay_s: float = math.inf


class HeartbeatFile:
    """A file that a program touches while it works.

    Whether its time changed since the last call decides, so that the clock of the wall does not matter.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = -1

    def beats(self) -> bool:
        """Whether the file was touched since the last call."""
        before = self._touched_at
        with suppress(OSError):
            self._touched_at = self._path.stat().st_mtime_ns
        return self._touched_at != before


@dataclass
class _ProgramState:
    """A program and what became of it so far.

    Attributes:
        program: the description.
        restarts: how often it was started again.
        child: while it runs.
        latest_child: also after its end.
        is_ready: whether it has worked since its last start.
        silent_s: for how long it has not worked.
        checked_at: when `works` was called last.
        start_at: when it is due to be started again.
    """

    program: Program
    restarts: Backoff
    child: Child | None = None
    latest_child: Child | None = None
    is_ready: bool = False
    silent_s: float = 0.0
    checked_at: float = 0.0
    start_at: float = math.inf


class Supervisor:
    """Keeps programs alive while `check` is called every second.

    Args:
        programs: those to keep.
        clock: seconds that only go forward.
    """

    def __init__(
        self, programs: Iterable[Program], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._states: dict[str, _ProgramState] = {}
        for program in programs:
            restarts = Backoff(program.max_per_hour, longest_s=program.longest_delay_s, clock=clock)
            self._states[program.name] = _ProgramState(program, restarts)

    def start(self, name: str, *, timeout_s: float = 0.0) -> None:
        """Start a program for the first time.

        Args:
            name: the program's.
            timeout_s: how long to wait until it works; 0 does not wait.

        Raises:
            TransportError: it ended or did not work in time.
        """
        state = self._states[name]
        self._start(state)
        deadline = self._clock() + timeout_s
        while timeout_s and not state.is_ready:
            if state.child is None or not state.child.running() or self._clock() > deadline:
                raise self._failure(state, f"a program that works within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
            self._check_work(state)

    def check(self) -> None:
        """Start again what died or hangs.

        Raises:
            TransportError: a program died too often.
        """
        for state in self._states.values():
            self._check(state)

    def ready(self, name: str) -> bool:
        """Whether a program runs and has worked since its last start."""
        state = self._states[name]
        return state.is_ready and state.child is not None and state.child.running()

    def kill(self, name: str) -> None:
        """Kill a program and all it started; it is started again as if it had died."""
        child = self._states[name].child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End all programs; safe to call twice."""
        children = []
        for state in self._states.values():
            if state.child is not None:
                children.append(state.child)
            state.child = None
            state.start_at = math.inf
        terminate_all(children)

    def child(self, name: str) -> Child | None:
        """The program while it runs; None before its first start, and from its end to the next."""
        return self._states[name].child

    def log_tail(self, name: str) -> str:
        """The end of what the program wrote, whether it runs or has ended."""
        child = self._states[name].latest_child
        return child.log_tail() if child else ""

    def pids(self) -> dict[str, int]:
        """The process id of every program that runs."""
        return {
            name: state.child.pid for name, state in self._states.items() if state.child is not None
        }

    def num_restarts(self) -> dict[str, int]:
        """How often every program was started again."""
        return {name: state.restarts.num for name, state in self._states.items()}

    def _start(self, state: _ProgramState) -> None:
        state.child = state.latest_child = state.program.start()
        state.is_ready = False
        state.silent_s = 0.0
        state.checked_at = self._clock()

    def _check(self, state: _ProgramState) -> None:
        # Two steps: what died is noted with the time of its next start, and started when that has come.
        if state.child is not None:
            if self._is_well(state, state.child):
                return
            # Raised here and not at the next start, so that the message quotes the log of the failure that was one too
            # many.
            if not state.restarts.allowed():
                expected = f"at most {state.program.max_per_hour} restarts an hour"
                raise self._failure(state, expected)
            state.child = None
            state.is_ready = False
            state.start_at = self._clock() + state.restarts.delay_s()
        if self._clock() >= state.start_at:
            state.restarts.count()
            self._start(state)

    def _is_well(self, state: _ProgramState, child: Child) -> bool:
        """Whether a program runs and has worked lately; one that only runs is killed."""
        if not child.running():
            return False
        every_s = state.program.check_every_s
        if not state.is_ready:
            # A program that starts is looked at more often, since others wait for it.
            every_s = min(_STARTING_CHECK_S, every_s)
        if self._clock() - state.checked_at >= every_s:
            self._check_work(state)
        if state.silent_s < state.program.silent_s:
            return True
        child.kill()
        return False

    def _check_work(self, state: _ProgramState) -> None:
        # While this process itself was stopped, nothing was checked: that time counts as one interval at most.
        passed_s = min(self._clock() - state.checked_at, state.program.check_every_s)
        if state.program.works():
            state.is_ready = True
            state.silent_s = 0.0
        else:
            state.silent_s += passed_s
        state.checked_at = self._clock()

    def _failure(self, state: _ProgramState, expected: str) -> TransportError:
        name = state.program.name
        # The last line of a log, as of a stack trace, is the one that names the error.
        lines = [line.strip() for line in self.log_tail(name).splitlines() if line.strip()]
        remedy = None
        if state.latest_child is not None:
            log_path = state.latest_child.log_path
            remedy = f"Nothing is lost. Read {log_path}, then run the command again."
        return TransportError(
            name,
            expected=expected,
            got=lines[-1][:_MAX_LOG_CHARACTERS] if lines else "an empty log",
            remedy=remedy,
        )
