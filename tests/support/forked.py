"""A process of a test's own, forked from it with all that was made ready there, so that it may be killed."""

import os
import traceback
from collections.abc import Callable

import torch


def fork_process(act: Callable[[], object]) -> int:
    """Act in a forked process that ends with 0, or with 1 after printing what `act` raised.

    Returns:
        Its process id, for `ended`.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # makes torch's pool anew while there is one thread; first touched by two, it fails
        torch.set_num_threads(1)
        act()
        code = 0
    except BaseException:
        traceback.print_exc()  # nothing else tells why this process failed
    finally:
        os._exit(code)


def wait_for_exit(pid: int) -> int:
    """Wait for a process to end; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
