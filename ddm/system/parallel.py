"""Parts of one work, each in a process of this machine.

Each process is tied to this one (`ddm.system.processes.start_tied`) and inherits nothing of it but a pipe, through
which it is sent what to do and reports. They open no socket, and do not talk with each other. One that dies ends the
others.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from ddm.errors import ArchipelagoError, SetupError
from ddm.system.guard import end_with_parent
from ddm.system.logs import follow_logging
from ddm.system.processes import start_tied

_POLL_S = 0.1
# For the cause of an error to be received, where what was received first may be its consequence.
_GRACE_S = 2.0
# Errors that say by themselves what is wrong.
_CLEAR_ERRORS = (ArchipelagoError, OSError)


@dataclass(frozen=True)
class PartDescription:
    """What each process does, in the words of errors.

    Attributes:
        name: the name of one process.
        again: what running the command again does.
        fewer: what to lower where the machine is out of memory.
    """

    name: str
    again: str
    fewer: str

    def name_of(self, rank: int, num: int) -> str:
        """Return the name of one process of several."""
        return f"{self.name} {rank + 1} of {num}"


class Work(Protocol):
    """What every process does. It is pickled, so a function of a module or a frozen dataclass with `__call__`."""

    def __call__(self, rank: int, num: int, report: Callable[[Any], None]) -> None:
        """Do part `rank` of `num`."""
        ...


def run_parts(
    work: Work,
    num: int,
    *,
    threads: int,
    on_report: Callable[[Any], None],
    description: PartDescription,
) -> None:
    """Do one work in several processes, and wait for their end.

    Args:
        work: what each process does a part of.
        num: how many processes.
        threads: the threads that each may compute with.
        on_report: called here with what a process reports; what it raises ends all of them.
        description: what they are called.

    Raises:
        ArchipelagoError: what a process raised; a `SetupError` where one died.
    """
    # The processes are killed at the end, so they cannot remove their own files.
    with tempfile.TemporaryDirectory(prefix="archipelago-", ignore_cleanup_errors=True) as scratch:
        task = _Task(work, num, threads, Path(scratch), description)
        processes = [_PartProcess(task, rank) for rank in range(num)]
        try:
            for process in processes:
                process.start()
            _watch(processes, on_report)
        finally:
            for process in processes:
                process.end()


@dataclass(frozen=True)
class _Task:
    """What a process is sent through its pipe."""

    work: Work
    num: int
    threads: int
    scratch: Path
    description: PartDescription


@dataclass(frozen=True)
class _End:
    """The last message of a process, or that it died without one."""

    error: BaseException | None = None
    has_died: bool = False


class _PartProcess:
    """One of the processes, as this one sees it."""

    def __init__(self, task: _Task, rank: int) -> None:
        self._task = task
        self._rank = rank
        self._name = task.description.name_of(rank, task.num)
        self._process: subprocess.Popen[bytes] | None = None
        self.pipe, self._their_pipe = multiprocessing.Pipe()

    def start(self) -> None:
        """Start it, and send it what to do."""
        descriptor = self._their_pipe.fileno()
        self._process = start_tied(__name__, str(descriptor), pass_fds=[descriptor])
        self._their_pipe.close()
        # That it has died already shows when its answer is read.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((self._rank, self._task))

    def receive(self) -> object:
        """Return its next message; its end, where it died without one."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return _End(self._death(), has_died=True)

    def _death(self) -> SetupError:
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_GRACE_S)
        cause = f"exit code {code}"
        if code is not None and code < 0:
            cause = signal.Signals(-code).name
        description = self._task.description
        return SetupError(
            self._name,
            expected="its answer",
            got=f"its end: {cause}",
            remedy=f"Run the command again: {description.again}. If nobody sent SIGKILL, the "
            "machine ran out of memory: {description.fewer}.",
        )

    def end(self) -> None:
        """End a process that has nothing left to do."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._their_pipe.close()
        self.pipe.close()


def _watch(processes: list[_PartProcess], on_report: Callable[[Any], None]) -> None:
    """Receive messages until all processes have ended, or the cause of one's failure is known."""
    running = {process.pipe: process for process in processes}
    ends: list[_End] = []
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        ready = wait(list(running), timeout=_POLL_S)
        for process in [process for pipe, process in running.items() if pipe in ready]:
            message = process.receive()
            if not isinstance(message, _End):
                # What this raises leaves the loop, and `run_parts` then ends all processes.
                on_report(message)
                continue
            del running[process.pipe]
            ends.append(message)
            if message.error is not None:
                # Other errors may follow from a neighbour's, which is then still on its way.
                grace_s = _GRACE_S
                if message.has_died or isinstance(message.error, _CLEAR_ERRORS):
                    grace_s = 0.0
                deadline = min(deadline, time.monotonic() + grace_s)
    error = _cause(ends)
    if error is not None:
        raise error


def _cause(ends: list[_End]) -> BaseException | None:
    """Return what ended the work: a clear error, else a death, else what came first."""
    errors = [end.error for end in ends if end.error is not None and not end.has_died]
    clear = [error for error in errors if isinstance(error, _CLEAR_ERRORS)]
    deaths = [end.error for end in ends if end.has_died]
    return next(iter([*clear, *deaths, *errors]), None)


def main(descriptor: int) -> None:
    """Run one process: receive the task through a pipe, do a part of it, and report."""
    end_with_parent()
    pipe: Connection = Connection(descriptor)
    rank, task = pipe.recv()
    os.environ["OMP_NUM_THREADS"] = str(task.threads)
    follow_logging()
    tempfile.tempdir = str(task.scratch)
    error: BaseException | None = None
    try:
        import torch

        torch.set_num_threads(task.threads)
        task.work(rank, task.num, pipe.send)
    except (*_CLEAR_ERRORS, KeyboardInterrupt) as caught:
        error = caught
    except BaseException:
        # As text, because not every error can be sent.
        name = task.description.name_of(rank, task.num)
        error = RuntimeError(f"{name}:\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(_End(error))
    # The parent ends this process, once it has read the message.
    threading.Event().wait()


if __name__ == "__main__":
    # The classes above must have the name of this module, under which the parent knows them, not `__main__`.
    from ddm.system.parallel import main as run_part

    run_part(int(sys.argv[1]))
