"""Several processes of this machine that do parts of one work: each is started here, and never outlives us.

A process is a fresh interpreter: it inherits nothing of this one but a pipe, through which it is told what to do and
reports. They open no socket, and do not talk with each other. No signal reaches them. A process that dies ends the
others, and when this one dies, however it does, so do they.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from ddm.errors import ArchipelagoError, SetupError
from ddm.system.guard import end_with_parent
from ddm.system.logs import follow_logging
from ddm.system.signals import blocked

_POLL_S = 0.1
_GRACE_S = (
    2.0  # for the cause of an error to be heard, where what was heard first may be its consequence
)
_OURS = (ArchipelagoError, OSError)  # which say by themselves what is wrong


@dataclass(frozen=True)
class PartDescription:
    """What processes do, in the words of errors.

    Attributes:
        name: of one of them.
        again: what running the command again does.
        fewer: what to lower where the machine is out of memory.
    """

    name: str
    again: str
    fewer: str


class Work(Protocol):
    """What every process does. It is pickled, so a function of a module or a frozen dataclass with `__call__`."""

    def __call__(self, rank: int, num: int, report: Callable[[Any], None]) -> None:
        """Do part `rank` of `num`."""
        ...


def run_parts(
    work: Work, num: int, *, threads: int, on_report: Callable[[Any], None], kind: PartDescription
) -> None:
    """Do one work in several processes, and wait for their end.

    Args:
        work: what each does a part of.
        num: how many.
        threads: that each may compute with.
        on_report: called here with what a process reports; what it raises ends all of them.
        kind: what they are called.

    Raises:
        ArchipelagoError: what a process raised; a `SetupError` where one died.
    """
    # They are killed at their end, and clear nothing away by themselves.
    with tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True) as scratch:
        task = _Task(work, threads, Path(scratch), kind)
        children = [_Child(task, rank, num) for rank in range(num)]
        try:
            for child in children:
                child.start()
            _watch(children, on_report)
        finally:
            for child in children:
                child.end()


@dataclass(frozen=True)
class _Task:
    """What a process is sent through its pipe."""

    work: Work
    threads: int
    scratch: Path
    kind: PartDescription


@dataclass(frozen=True)
class _Ended:
    """A process's last word, or that it had none."""

    error: BaseException | None = None
    died: bool = False


class _Child:
    """One of the processes, seen from here."""

    def __init__(self, task: _Task, rank: int, num: int) -> None:
        self.name = _name(task.kind, rank, num)
        self._task = task
        self.pipe, self._theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_main, args=(self._theirs, rank, num), name=self.name
        )

    def start(self) -> None:
        """Start it, and send it what to do."""
        resource_tracker.ensure_running()  # else it starts with the process, and lets signals in again
        with blocked():
            self._process.start()
        self._theirs.close()
        # that it has died shows when it is listened to
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(self._task)

    def receive(self) -> object:
        """Return what it says; its end, where it died without a word."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_S)
            return _Ended(_death(self.name, self._process.exitcode, self._task.kind), died=True)

    def end(self) -> None:
        """End a process that has nothing left to do, before it could hear that nobody listens any more."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._theirs.close()
        self.pipe.close()


def _watch(children: list[_Child], on_report: Callable[[Any], None]) -> None:
    """Listen until all have ended, or the cause of one's failure is known."""
    running, ends = {child.pipe: child for child in children}, list[_Ended]()
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        ready = wait(list(running), timeout=_POLL_S)
        for child in [child for pipe, child in running.items() if pipe in ready]:
            message = child.receive()
            if not isinstance(message, _Ended):
                on_report(message)
                continue
            del running[child.pipe]
            ends.append(message)
            if message.error is not None:
                plain = message.died or isinstance(message.error, _OURS)
                deadline = min(deadline, time.monotonic() + (0.0 if plain else _GRACE_S))
    if error := _cause(ends):
        raise error


def _cause(ends: list[_Ended]) -> BaseException | None:
    """Return what ended the work: an error of ours, else a death, else what came first."""
    errors = [end.error for end in ends if end.error is not None and not end.died]
    ours = [error for error in errors if isinstance(error, _OURS)]
    died = [end.error for end in ends if end.died]
    return next(iter([*ours, *died, *errors]), None)


def _name(kind: PartDescription, rank: int, num: int) -> str:
    return f"{kind.name} {rank + 1} of {num}"


def _death(name: str, exitcode: int | None, kind: PartDescription) -> SetupError:
    how = (
        signal.Signals(-exitcode).name
        if exitcode is not None and exitcode < 0
        else f"exit code {exitcode}"
    )
    return SetupError(
        name,
        expected="its answer",
        got=f"its end: {how}",
        remedy=f"Run the command again: {kind.again}. SIGKILL without anybody's doing is a machine out of memory: "
        f"{kind.fewer}.",
    )


def _main(pipe: Connection, rank: int, num: int) -> None:
    """What a started process runs."""
    if parent := multiprocessing.parent_process():
        # The pipe tells of the parent's death too, but only a process that can listen, and a moment later.
        end_with_parent(parent.pid or 0)
    task: _Task = pipe.recv()
    threading.Thread(target=_listen, args=(pipe,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    follow_logging()
    tempfile.tempdir = str(task.scratch)
    error: BaseException | None = None
    try:
        import torch

        torch.set_num_threads(task.threads)
        task.work(rank, num, pipe.send)
    except (*_OURS, KeyboardInterrupt) as caught:
        error = caught
    except BaseException:  # as text, because not every error can be sent
        error = RuntimeError(f"{_name(task.kind, rank, num)}:\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(_Ended(error))
    threading.Event().wait()  # for the parent, who ends this process


def _listen(pipe: Connection) -> None:
    """Hear the parent's end."""
    with closing(pipe), suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)
