"""What is kept: every measured row as one JSON, with all that a reader needs to know about how it came about."""

import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, fsum, log, sqrt
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError

from ddm.evaluation.intervals import Estimate
from ddm.io.files import write_atomic
from ddm.protocol.base import Model, now_utc, sha256_hex

Document = TypeVar("Document", bound=Model)
RATIOS = {
    "fid",
    "fid_pca",
    "alone_fid",
    "own_fid",
    "joint_own_fid",
    "smallest_own_fid",
    "smallest_joint_own_fid",
}  # which differ by factors from seed to seed
# which lie between 0 and 1
_SHARES = {
    "precision",
    "recall",
    "agreement",
    "share_error",
    "share_error_images",
    "router_share_error",
    "smallest_drawn",
    "smallest_recall",
}


class Figure(Model):
    """A figure of one seed with its 95% interval over samples and reference images; none for counts and rates."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, estimate: Estimate) -> "Figure":
        """Return an estimate as a figure."""
        return cls(value=estimate.value, low=estimate.low, high=estimate.high)


class Cost(Model):
    """What a model took.

    Attributes:
        steps: of the monolith, or of each expert.
        batch_size: images in a step.
        learning_rate: the highest.
        flops: of all matrix products in training, router included.
        router_flops: the router's part of them.
        seconds: of training, one expert after the other, router included.
        commit: of the code that trained it.
    """

    steps: int
    batch_size: int
    learning_rate: float
    flops: float
    router_flops: float
    seconds: float
    commit: str


class Cell(Model):
    """One row, measured with one seed.

    Attributes:
        seed: of weights, batches, partition and samples.
        cost: of the model; None where there is none.
        router: its family and temperature; nothing of a model without one.
        num_samples: drawn.
        sampling_seconds: of drawing them.
        figures: by name.
        commit: of the code.
        hardware: in words.
        utc: when it was measured.
    """

    seed: int
    cost: Cost | None
    router: str
    num_samples: int
    sampling_seconds: float
    figures: dict[str, Figure]
    commit: str
    hardware: str
    utc: str


class RateChoice(Model):
    """How a learning rate was chosen.

    Attributes:
        rate: the best.
        tried: the FID on validation images by rate, None where training diverged; nothing where there was no choice.
        steps: of each run.
        judge: digest of the classifier in whose features that FID is.
    """

    rate: float
    tried: dict[str, float | None]
    steps: int
    judge: str = ""

    @property
    def trains(self) -> bool:
        """Whether training at the rate does not diverge, as far as it was tried."""
        return not self.tried or any(fid is not None for fid in self.tried.values())

    @property
    def in_words(self) -> str:
        """What was tried: the FID of each rate."""
        return ", ".join(
            f"{rate}: {'diverged' if fid is None else f'{fid:.1f}'}"
            for rate, fid in self.tried.items()
        )


@dataclass(frozen=True)
class Kept:
    """The folder of what was measured."""

    path: Path

    def file(self, key: object) -> Path:
        """Return where a document with this key lies."""
        return self.path / f"{sha256_hex(repr(key).encode())[:16]}.json"

    def read(self, key: object, kind: type[Document]) -> Document | None:
        """Read what was kept under a key; None where nothing was, or something else."""
        return _read(self.file(key), kind)

    def all(self, kind: type[Document]) -> list[Document]:
        """Read everything that was kept; something else, as other versions of this program write it, is left out."""
        documents = (_read(path, kind) for path in self.path.glob("*.json"))
        return [document for document in documents if document is not None]

    def write(self, key: object, document: Model) -> None:
        """Keep a document, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.file(key), document.model_dump_json(indent=1).encode() + b"\n")


def _read(path: Path, kind: type[Document]) -> Document | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def spread(
    values: Sequence[float], *, as_ratios: bool = False
) -> tuple[float, float | None, float | None]:
    """Return the mean over seeds with its 95% interval by Student's t; without an interval for one seed.

    Args:
        values: one of each seed.
        as_ratios: whether they are positive and differ by factors: then mean and interval are those of logarithms.
    """
    from scipy.stats import t as student

    if as_ratios and min(values) > 0:
        mean, low, high = spread([log(value) for value in values])
        return exp(mean), None if low is None else exp(low), None if high is None else exp(high)
    num = len(values)
    mean = fsum(values) / len(values)
    if num == 1:
        return mean, None, None
    half = float(student.ppf(0.975, num - 1)) * sqrt(
        fsum((value - mean) ** 2 for value in values) / (num - 1) / num
    )
    return mean, mean - half, mean + half


def over_seeds(
    cells: Mapping[int, Cell], name: str
) -> tuple[float, float | None, float | None] | None:
    """Return a figure's mean over seeds with its interval; of one seed, with that of its images. None without one.

    FID has a geometric mean and an interval by logarithms, also a mean of FIDs that has no interval of its own. The
    interval of a share ends at 0 and 1. Counts and rates have no interval of their own, and get none over seeds.
    """
    figures = [cell.figures[name] for cell in cells.values() if name in cell.figures]
    if not figures:
        return None
    if name not in RATIOS and all(figure.low is None for figure in figures):
        return fsum(figure.value for figure in figures) / len(figures), None, None
    if len(figures) == 1:
        return figures[0].value, figures[0].low, figures[0].high
    mean, low, high = spread([figure.value for figure in figures], as_ratios=name in RATIOS)
    if name in _SHARES and low is not None and high is not None:
        low = max(low, 0.0)
        high = min(high, 1.0)
    return mean, low, high


def hardware(device: torch.device) -> str:
    """Name the machine's processor and threads, or its GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine())
    num = torch.get_num_threads()
    load = f"load {os.getloadavg()[0]:.0f}"
    return f"{name}, {num} thread{'s' if num != 1 else ''} on {os.cpu_count()} cores, {load}"


@cache
def commit() -> str:
    """Return the commit that was there at the first call, with a mark where files differ from it."""
    words = ["git", "describe", "--always", "--dirty"]
    answer = subprocess.run(
        words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


def command_of(module: str, words: Sequence[str], *, left_out: str = "") -> str:
    """Return the command that was typed, without where files lie on this machine, and without one option."""
    named = {"--data": "DATA", "--out": "DIR", "--published": "PUBLISHED", "--base": "BASE"}
    apart = [
        part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    pairs = zip(["", *apart], apart, strict=False)
    shown = [
        named.get(before, word)
        for before, word in pairs
        if left_out not in (before, word) or not left_out
    ]
    return shlex.join(["python", "-m", module, *shown])


def utc() -> str:
    """Return the time."""
    return now_utc().isoformat()
