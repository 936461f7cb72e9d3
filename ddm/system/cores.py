"""How many cores this process may use, and in how many threads it computes where nobody says otherwise."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ddm.system.cgroups import CGROUPS, OWN_CGROUP, enclosing_groups

MAX_THREADS = 1024
NumThreads = Annotated[int, Field(ge=1, le=MAX_THREADS)]


def usable_cores(own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> int:
    """Return how many cores this process may use: those that it may run on, or fewer if a cgroup has a smaller quota.

    Args:
        own_cgroup: the file in which the kernel names this process's cgroup.
        cgroups: the folder of all cgroups.
    """
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    for group in enclosing_groups(own_cgroup, cgroups):
        try:
            # Microseconds of processor time in each period, and the period.
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                # Rounded down: a thread that waits for its share lets all others wait at the end of each sum.
                num_cores = min(num_cores, int(quota) // int(period))
        except (OSError, ValueError):
            continue
    return max(1, num_cores)


def default_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return in how many threads to compute: as OMP_NUM_THREADS says, or one for each core that may be used."""
    # OpenMP takes a list as well, one number for each level of nesting.
    stated, _, _ = environment.get("OMP_NUM_THREADS", "").partition(",")
    if stated.strip().isdecimal() and int(stated) > 0:
        return min(int(stated), MAX_THREADS)
    return min(usable_cores(), MAX_THREADS)


@contextmanager
def computing_in(num_threads: int) -> Iterator[None]:
    """Let torch compute in this many threads: their number changes sums by rounding."""
    # Here, so that settings with `NumThreads` are read without it.
    import torch

    num_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(num_before)
