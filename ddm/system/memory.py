"""How much memory this process may take: what was asked for, or a share of what is left here."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import MemoryLimitError
from ddm.system.cgroups import CGROUPS, OWN_CGROUP, enclosing_groups

# What is left serves the interpreter, the system's file cache and other programs.
SHARE = 0.75


@dataclass(frozen=True)
class MemoryLimit:
    """The most memory that a command may take.

    Attributes:
        bytes: the limit.
        origin: what set it, in words.
    """

    bytes: int
    origin: str

    def part(self, num: int) -> "MemoryLimit":
        """Return what each of this many processes may take."""
        if num == 1:
            return self
        return MemoryLimit(self.bytes // num, f"a process's part of {num}, {self.origin}")

    def check(self, subject: str, needed: int, remedy: str | None = None) -> None:
        """Refuse what needs more.

        Raises:
            MemoryLimitError: names what is needed, what is allowed, and what to change.
        """
        if needed > self.bytes:
            raise MemoryLimitError(
                subject,
                expected=f"at most {mebibytes(self.bytes)} of memory, {self.origin}",
                got=f"{mebibytes(needed)} needed",
                remedy=remedy,
            )


def memory_limit(asked: int | None = None) -> MemoryLimit:
    """Return the limit that was asked for, in bytes, or else `SHARE` of the memory that is available now."""
    if asked is not None:
        return MemoryLimit(asked, "as --memory or memory_bytes says")
    return MemoryLimit(int(SHARE * available_bytes()), f"{SHARE:.0%} of what is available here")


def available_bytes(own_cgroup: Path = OWN_CGROUP, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process can still take: the least of machine, cgroups and its own address space.

    Args:
        own_cgroup: the file in which the kernel names this process's cgroup.
        cgroups: the folder of all cgroups.
    """
    # A container sees all of the machine's memory in /proc, and is killed at the limit of its cgroup.
    of_cgroups = _cgroup_bytes(own_cgroup, cgroups)
    return max(0, min((_machine_bytes(), *of_cgroups, *_address_space_bytes())))


def machine_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mebibytes(count: int) -> str:
    """Write a number of bytes as people give it to --memory."""
    if count < 2**60:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**40:.3g} TiB"


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return machine_bytes()


def _cgroup_bytes(own_cgroup: Path, cgroups: Path) -> Iterator[int]:
    """Yield what is left of the limit of each cgroup that this process is in."""
    for group in enclosing_groups(own_cgroup, cgroups):
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # Files that were read count as used, but the kernel drops them where memory is needed.
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            yield int(limit) - used + cached


def _address_space_bytes() -> Iterator[int]:
    # Set by `ulimit -v`, and by some schedulers.
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield soft - pages * os.sysconf("SC_PAGE_SIZE")
