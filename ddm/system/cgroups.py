"""The kernel's control groups, by which a container or a scheduler limits what a process takes."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def enclosing_groups(own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the folder of this process's cgroup, version 2, and of each above it: every limit of theirs counts.

    Args:
        own_cgroup: the file in which the kernel names this process's cgroup.
        cgroups: the folder of all cgroups.
    """
    try:
        own = next(
            line[3:] for line in own_cgroup.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return
    folder = cgroups / own.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(cgroups):
            return
        yield group
