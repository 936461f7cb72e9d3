"""Measures how much time and memory a call takes at worst, in a fork of this process that is limited.

Time counts in units of a yardstick, measured just before, so that a slow or busy machine does not look like an attack.
"""

import ctypes
import json
import os
import resource
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.forked import fork_process, wait_for_exit

MIB = 1024 * 1024
_YARDSTICK_S = 0.013  # what `slowness` takes on an idle processor of 2023


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        error: the name of the exception's class, None when there was none.
        message: its text.
        cpu_s: processor time, as it would be on a machine that does the yardstick in its usual time.
        mib: memory that it took at its peak, beyond what there was before, MiB: without pages of files that are still
            mapped at the end, since a fork maps its libraries' pages only as it comes to use them, but never less than
            the most private memory that was seen while it ran, looking a thousand times a second.
    """

    error: str | None
    message: str
    cpu_s: float
    mib: float


def attempt(attack: Callable[[], object], *, mib: int, cpu_s: int) -> Outcome:
    """Run `attack` in a process of its own that is ended when it takes four times what it may; measure it.

    Args:
        attack: the call.
        mib: memory that it may take, MiB.
        cpu_s: processor time that it may take, seconds of the yardstick's machine.
    """
    reader, writer = os.pipe()

    def measure_and_report() -> None:
        os.close(reader)
        measured = _measure(attack, mib, cpu_s, lambda: os.write(writer, b" "))
        os.write(writer, json.dumps(measured).encode())

    child = fork_process(measure_and_report)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as answers:
        answers.read(1)  # now the attack begins
        before = _status("RssAnon", child)
        most = before
        # The child's own figure leaves out pages of files that are mapped at its end. Private memory is looked at from
        # here as well, so that the figure is never below it.
        while not select.select([answers], [], [], 0.001)[0]:
            most = max(most, _status("RssAnon", child))
        answer = answers.readall()
    wait_for_exit(child)
    if not answer:
        return Outcome("Killed", f"took more than {4 * cpu_s} s", float("inf"), float("inf"))
    outcome = Outcome(**json.loads(answer))
    return replace(outcome, mib=max(outcome.mib, (most - before) / 1024))


def _measure(
    attack: Callable[[], object], mib: int, cpu_s: int, begin: Callable[[], object]
) -> dict[str, object]:
    slow = slowness()
    used = time.process_time()
    # The limit is on the time of the whole process, of which the yardstick has taken some.
    most_s = int(used + 4 * cpu_s * slow) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    _give_back_free_pages()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    mapped = _status("RssFile")
    most = (_status("VmSize") + 4 * mib * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    begin()
    started = time.process_time()
    error = None
    message = ""
    try:
        attack()
    except BaseException as raised:
        error = type(raised).__name__
        message = str(raised)[:1000]
    spent = (time.process_time() - started) / slow
    taken = _status("VmHWM") - before - max(0, _status("RssFile") - mapped)
    return {"error": error, "message": message, "cpu_s": spent, "mib": taken / 1024}


def _give_back_free_pages() -> None:
    """What the tests before have freed may still be resident: an attack that is given such pages would look small."""
    # glibc's; others give pages back by themselves
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def slowness() -> float:
    """How many times slower this machine is now than where the limits were found; at least 1."""
    started = time.process_time()
    sum(number * number for number in range(200_000))
    return max(1.0, (time.process_time() - started) / _YARDSTICK_S)


def _status(name: str, process: int | str = "self") -> int:
    """Return a process's memory of a kind, KiB; 0 of one that has ended."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
