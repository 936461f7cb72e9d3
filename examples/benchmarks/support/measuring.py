"""Measures peak memory of every process, prints progress and tables, and stops on machines that are too small."""

import argparse
import csv
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ddm.system.process_table import descendants

# Part of a command line -> what the process is called; the first that fits.
_ROLES = (
    ("ddm.transport.superexec", "superexec"),
    ("bin/flwr-serverapp", "ServerApp"),
    ("bin/flwr-clientapp", "courier"),
    ("courier/node.py", "SuperNode"),
    ("runtime/superlink.py", "SuperLink"),
    ("nginx", "proxy"),
    ("intake", "intake"),
    ("ddm.images.worker", "decoder"),
    ("--stages", "worker"),
)


class Processes(threading.Thread):
    """Peak resident memory (VmHWM) and processor time of the child processes, by role.

    Sampled ten times a second; of a short process the last tenth may be missed.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes: dict[str, int] = {}
        self._cpu_s: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Processes":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Sample until the end."""
        while not self._over.wait(0.1):
            for pid in [os.getpid(), *descendants(os.getpid())]:
                self._sample(pid)

    def _sample(self, pid: int) -> None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            peak = next(
                line
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if "VmHWM" in line
            )
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        except (OSError, StopIteration):  # it has ended
            return
        role = (
            "this process"
            if pid == os.getpid()
            else next((r for part, r in _ROLES if part in command), "other")
        )
        self.peak_bytes[role] = max(self.peak_bytes.get(role, 0), int(peak.split()[1]) * 1024)
        self._cpu_s[pid] = (role, sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))

    def cpu_s(self) -> dict[str, float]:
        """Seconds of processor time so far, by role, ended processes included."""
        seconds_by_role: dict[str, float] = {}
        for role, seconds in list(self._cpu_s.values()):
            seconds_by_role[role] = seconds_by_role.get(role, 0.0) + seconds
        return seconds_by_role

    def rows(
        self, what: str, since: dict[str, float] | None = None
    ) -> list[tuple[str, str, int, float]]:
        """One row a role: what was measured, the role, its peak in MiB, its processor time since `since`."""
        spent = self.cpu_s()
        return [
            (what, role, round(peak / 2**20), round(spent[role] - (since or {}).get(role, 0.0), 1))
            for role, peak in sorted(self.peak_bytes.items())
        ]


PROCESS_COLUMNS = ("run", "process", "peak_mib", "cpu_s")


def parse(description: str | None, **defaults: float | str) -> argparse.Namespace:
    """Read --quick, --json, --out, --work and an option for each default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small size, for a quick trial")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--work", type=Path, default=Path("build/bench/work"), help="folder for temporary files"
    )
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    arguments.work = arguments.work.absolute()
    return arguments


def say(text: str) -> None:
    """Print a progress message."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def require_space(folder: Path, num_bytes: int) -> None:
    """Exit unless the disk has that much free space and five GiB more."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    needed = num_bytes + 5 * 2**30
    if free < needed:
        sys.exit(
            f"{folder}: expected {needed / 2**30:.0f} GiB free, got {free / 2**30:.0f}; choose another --work"
        )


def require_memory(num_bytes: int) -> None:
    """Exit unless the machine has that much memory available."""
    line = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    if (free := int(line.split()[1]) * 1024) < num_bytes:
        sys.exit(
            f"memory: expected {num_bytes / 2**30:.0f} GiB available, got {free / 2**30:.0f}; try --quick"
        )


def report(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    arguments: argparse.Namespace,
) -> None:
    """Print the rows and write `<name>.csv`."""
    if arguments.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))
    else:
        cells = [
            tuple(header),
            *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows),
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for row in cells:
            print(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / f"{name}.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(header)
        writer.writerows(rows)
