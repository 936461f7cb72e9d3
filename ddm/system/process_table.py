"""What the kernel's table of processes (`/proc`, on Linux) says: who started whom, since when, at what cost."""

import contextlib
import os
from pathlib import Path

# Fields of /proc/PID/stat after the name, counted from 0.
_STATE = 0
_PARENT = 1
_USER_TICKS = 11
_SYSTEM_TICKS = 12
_NUM_THREADS = 17
_START_TICKS = 19
# A zombie has ended and waits to be collected; X is one that is just being removed.
_ENDED = ("Z", "X")


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields after the name.

    Raises:
        OSError: no such process, or no such table.
    """
    # The name in parentheses may contain spaces and parentheses, so the last closing one ends it.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """List every living process below one process.

    Args:
        pid: the process at the top; it is not in the list.

    Returns:
        Process ids, parents before children; empty where there is no `/proc`.
    """
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(folder.name)
            # A process whose main thread has ended shows as a zombie while its other threads continue.
            is_alive = fields[_STATE] not in _ENDED or int(fields[_NUM_THREADS]) > 1
            if is_alive:
                children.setdefault(int(fields[_PARENT]), []).append(int(folder.name))
    # The list grows while the loop goes through it, generation by generation.
    tree = [pid]
    for parent in tree:
        tree += children.get(parent, [])
    return tree[1:]


def start_ticks(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 for one that has ended or is not known.

    Process ids are used again; id and start together name one process.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _stat_fields(pid)
        if fields[_STATE] not in _ENDED:
            return int(fields[_START_TICKS])
    return 0


def processor_use(pid: int) -> tuple[bool, float]:
    """Return whether a process would run if it got a processor or its data, and its processor time so far in s.

    False and 0 without the process, or without `/proc`.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _stat_fields(pid)
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        return fields[_STATE] in ("R", "D"), ticks / os.sysconf("SC_CLK_TCK")
    return False, 0.0
