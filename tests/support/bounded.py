"""How much time and memory does a parser take at worst? A fork of this process tries, is measured, and is limited."""

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked import ended, forked

MIB = 1024 * 1024


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        error: the name of the exception's class, None when there was none.
        message: its text.
        cpu_s: processor time.
        mib: memory that it took at its peak, beyond what there was before, MiB.
    """

    error: str | None
    message: str
    cpu_s: float
    mib: float


def attempt(attack: Callable[[], object], *, mib: int, cpu_s: int) -> Outcome:
    """Run `attack` in a process of its own that is ended when it takes four times what it may; measure it."""
    reader, writer = os.pipe()

    def tell() -> None:
        os.close(reader)
        os.write(writer, json.dumps(_measured(attack, mib, cpu_s)).encode())

    child = forked(tell)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    ended(child)
    if not answer:
        return Outcome("Killed", f"took more than {4 * cpu_s} s", float("inf"), float("inf"))
    return Outcome(**json.loads(answer))


def _measured(attack: Callable[[], object], mib: int, cpu_s: int) -> dict[str, object]:
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 4 * cpu_s + 1, int(used) + 4 * cpu_s + 1))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    most = (_status("VmSize") + 4 * mib * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    started, error, message = time.process_time(), None, ""
    try:
        attack()
    except BaseException as raised:
        error, message = type(raised).__name__, str(raised)[:1000]
    spent = time.process_time() - started
    return {"error": error, "message": message, "cpu_s": spent, "mib": (_status("VmHWM") - before) / 1024}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)
