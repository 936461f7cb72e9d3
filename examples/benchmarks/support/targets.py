"""Records figures and their targets: a row each, in a file per benchmark, which `run.py` joins."""

import argparse
import csv
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

COLUMNS = ("figure", "target", "value", "low", "high", "met", "commit", "hardware", "utc")


@dataclass(frozen=True)
class Target:
    """One figure.

    Args:
        figure: what was measured.
        values: one per round.
        bound: the target.
        at_least: whether the bound is a lower one.
    """

    figure: str
    values: Sequence[float]
    bound: float
    at_least: bool = True

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the median reaches the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> tuple[str, ...]:
        """As `COLUMNS`; low and high are the quartiles of the rounds."""
        low, _, high = (
            statistics.quantiles(self.values, n=4) if len(self.values) > 1 else [self.value] * 3
        )
        numbers = (f"{number:.4g}" for number in (self.value, low, high))
        target = f"{'at least' if self.at_least else 'at most'} {self.bound:g}"
        return (
            self.figure,
            target,
            *numbers,
            "yes" if self.met else "no",
            commit(),
            hardware(),
            now(),
        )


def report_targets(name: str, targets: Sequence[Target], arguments: argparse.Namespace) -> None:
    """Print the figures and write ``targets/<name>.csv``."""
    rows = [target.row() for target in targets]
    for row in rows:
        print(
            f"{'met   ' if row[5] == 'yes' else 'MISSED'} {row[0]}: {row[2]} [{row[3]}, {row[4]}], {row[1]}"
        )
    folder: Path = arguments.out / "targets"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / f"{name}.csv", rows)


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write rows under `COLUMNS`."""
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def commit() -> str:
    """Return the measured commit, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    completed = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return completed.stdout.strip() or "unknown"


def hardware() -> str:
    """Processor or accelerator, and how many threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.partition(":")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{(names or [platform.processor()])[0].strip()}, {torch.get_num_threads()} threads"


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
