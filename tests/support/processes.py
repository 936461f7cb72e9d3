"""Which processes there are, and whether they have really ended: a zombie that its parent has not collected yet has."""

import select
from contextlib import suppress
from os import close, pidfd_open
from pathlib import Path

from tests.support.waiting import LIMIT_S


def is_running(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    # its main thread has ended, others go on
    return fields[0] not in ("Z", "X") or int(fields[17]) > 1


def running_children(pid: int) -> list[int]:
    """The processes that a process started and that still run."""
    # Each thread of a process has a list of the children that it started.
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += map(int, path.read_text().split())
    return [child for child in pids if is_running(child)]


def wait_for_end(pid: int, timeout_s: float = LIMIT_S) -> None:
    """Wait until a process that is nobody's child any more has ended."""
    with suppress(ProcessLookupError):
        descriptor = pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], timeout_s)[0], "the process lives on"
        finally:
            close(descriptor)
