"""Programs kept alive: a description of each, and one loop that starts again what died or hangs.

A program that runs is asked every few seconds whether it works: a server is asked for an answer, one without a port
leaves a heartbeat. One that has not worked for a while is killed and counts as dead. What died is started again, ever
more slowly, and only so often an hour: a federation runs for weeks, so a fault now and then must not add up to an end,
and a program that cannot run must not hide it for ever.
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
# How often a program is asked until it first works.
_STARTING_TICK_S = 1.0
_TICK_S = 0.05


@dataclass(frozen=True)
class Program:
    """One program to keep alive.

    Attributes:
        name: how messages call it.
        start: starts it under guard, and does not wait for it.
        works: whether it does its work now; asked only while it runs, and answers within a few seconds.
        silent_s: after how long without work it is killed; it must be able to start in this time.
        ask_every_s: how often it is asked.
        max_per_hour: how often in any hour it may be started again.
        longest_delay_s: how long it is left alone at most before it is started again.
    """

    name: str
    start: Callable[[], Child]
    works: Callable[[], bool] = lambda: True
    silent_s: float = 120.0
    ask_every_s: float = 10.0
    max_per_hour: float = MAX_PER_HOUR
    longest_delay_s: float = math.inf


class HeartbeatFile:
    """A file that a program touches while it works.

    Judged by whether its time changed since it was asked last, so the clock of the wall does not matter.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, -1

    def beats(self) -> bool:
        """Whether the file was touched since the last question."""
        last = self._last
        with suppress(OSError):
            self._last = self._path.stat().st_mtime_ns
        return self._last != last


@dataclass
class _Kept:
    """A program at work."""

    program: Program
    restarts: Backoff
    child: Child | None = None
    last: Child | None = None
    ready: bool = False
    silent_s: float = 0.0
    asked_at: float = 0.0
    start_at: float = float("inf")


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
        self._kept = {
            program.name: _Kept(
                program,
                Backoff(program.max_per_hour, longest_s=program.longest_delay_s, clock=clock),
            )
            for program in programs
        }

    def start(self, name: str, *, timeout_s: float = 0.0) -> None:
        """Start a program for the first time.

        Args:
            name: the program's.
            timeout_s: how long to wait until it works; 0 does not wait.

        Raises:
            TransportError: it ended or did not work in time.
        """
        kept = self._kept[name]
        self._start(kept)
        deadline = self._clock() + timeout_s
        while timeout_s and not kept.ready:
            if kept.child is None or not kept.child.running() or self._clock() > deadline:
                raise self._failure(kept, f"a program that works within {timeout_s:.0f} s")
            time.sleep(_TICK_S)
            self._ask(kept)

    def check(self) -> None:
        """Start again what died or hangs.

        Raises:
            TransportError: a program died too often.
        """
        for kept in self._kept.values():
            self._check(kept)

    def ready(self, name: str) -> bool:
        """Whether a program runs and has worked since its last start."""
        kept = self._kept[name]
        return kept.ready and kept.child is not None and kept.child.running()

    def kill(self, name: str) -> None:
        """Kill a program and all it started; it is started again as if it had died."""
        child = self._kept[name].child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End all programs; safe to call twice."""
        children = [kept.child for kept in self._kept.values() if kept.child is not None]
        for kept in self._kept.values():
            kept.child, kept.start_at = None, float("inf")
        terminate_all(children)

    def child(self, name: str) -> Child | None:
        """The program while it runs; None before its first start, and from its end to the next."""
        return self._kept[name].child

    def log_tail(self, name: str) -> str:
        """The end of what the program wrote, whether it runs or has ended."""
        last = self._kept[name].last
        return last.log_tail() if last else ""

    def pids(self) -> dict[str, int]:
        """The process id of every program that runs."""
        return {name: kept.child.pid for name, kept in self._kept.items() if kept.child is not None}

    def num_restarts(self) -> dict[str, int]:
        """How often every program was started again."""
        return {name: kept.restarts.num for name, kept in self._kept.items()}

    def _start(self, kept: _Kept) -> None:
        kept.child = kept.last = kept.program.start()
        kept.ready, kept.silent_s, kept.asked_at = False, 0.0, self._clock()

    def _check(self, kept: _Kept) -> None:
        if kept.child is not None:
            if self._lives(kept, kept.child):
                return
            if not kept.restarts.allowed():
                raise self._failure(kept, f"at most {kept.program.max_per_hour} restarts an hour")
            kept.child, kept.ready, kept.start_at = (
                None,
                False,
                self._clock() + kept.restarts.delay_s(),
            )
        if self._clock() >= kept.start_at:
            kept.restarts.count()
            self._start(kept)

    def _lives(self, kept: _Kept, child: Child) -> bool:
        """Whether a program runs and has worked lately; one that only runs is killed."""
        if not child.running():
            return False
        every_s = (
            kept.program.ask_every_s
            if kept.ready
            else min(_STARTING_TICK_S, kept.program.ask_every_s)
        )
        if self._clock() - kept.asked_at >= every_s:
            self._ask(kept)
        if kept.silent_s < kept.program.silent_s:
            return True
        child.kill()
        return False

    def _ask(self, kept: _Kept) -> None:
        # While this process itself stood still, nobody was asked: that time counts as one question at most.
        passed_s = min(self._clock() - kept.asked_at, kept.program.ask_every_s)
        works = kept.program.works()
        kept.ready = kept.ready or works
        kept.silent_s = 0.0 if works else kept.silent_s + passed_s
        kept.asked_at = self._clock()

    def _failure(self, kept: _Kept, expected: str) -> TransportError:
        child = kept.last
        lines = [
            line.strip() for line in self.log_tail(kept.program.name).splitlines() if line.strip()
        ]
        where = (
            f"Nothing is lost. Read {child.log_path}, then run the command again."
            if child
            else None
        )
        return TransportError(
            kept.program.name,
            expected=expected,
            got=lines[-1][:300] if lines else "no word in its log",
            remedy=where,
        )
