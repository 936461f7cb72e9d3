"""Keeps what a process has in memory, such as keys and private images, out of core dumps and from other processes."""

import ctypes
import resource
import sys

_PR_SET_DUMPABLE = 4
# The kernel writes no core file below the size of a page. It ignores the limit where a program such as systemd-coredump
# takes dumps through a pipe, except for this number, for which it starts no such program (core(5)).
_MAX_CORE_BYTES = 1


def forbid_core_dumps() -> None:
    """Let a crash of this process write no memory to disk, and no other process of its user read its memory.

    The limit holds for the programs that it starts as well.
    """
    limit = _MAX_CORE_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    if hard_limit == 0:
        # A service manager set it, and only root may raise it again.
        limit = 0
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
