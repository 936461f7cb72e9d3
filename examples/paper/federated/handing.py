"""How a silo's app and its trainer hand weights to each other: files in a folder of the silo's, whole or not there."""

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddm.io.files import write_atomic

ASKED = "asked-"
ANSWERED = "answered-"
_POLL_S = 0.05

Weights = Mapping[str, NDArray[Any]]
Numbers = Mapping[str, float]


def trainer_folder(folder: Path, silo: int) -> Path:
    """Return where a silo's trainer is asked and answers."""
    return folder / f"trainer{silo}"


def hand(path: Path, weights: Weights, numbers: Numbers) -> None:
    """Write weights and numbers as one file."""
    held = io.BytesIO()
    named: dict[str, Any] = {f"weights/{name}": value for name, value in weights.items()}
    named |= {f"numbers/{name}": np.float64(value) for name, value in numbers.items()}
    np.savez(held, **named)
    write_atomic(path, held.getvalue())


def handed(path: Path) -> tuple[Weights, Numbers]:
    """Read what was handed over."""
    with np.load(path, allow_pickle=False) as found:
        weights = {
            name.removeprefix("weights/"): found[name]
            for name in found
            if name.startswith("weights/")
        }
        numbers = {
            name.removeprefix("numbers/"): float(found[name])
            for name in found
            if name.startswith("numbers/")
        }
    return weights, numbers


def ask(
    folder: Path, silo: int, name: str, weights: Weights, numbers: Numbers
) -> tuple[Weights, Numbers]:
    """Hand weights and numbers to a silo's trainer, and wait for its answer; whoever started both ends a wait in vain.

    Args:
        folder: of the run.
        silo: which.
        name: of the question, its own.
        weights: to begin with.
        numbers: for the trainer.
    """
    own = trainer_folder(folder, silo)
    hand(own / f"{ASKED}{name}.npz", weights, numbers)
    answer = own / f"{ANSWERED}{name}.npz"
    while not answer.exists():
        time.sleep(_POLL_S)
    contents = handed(answer)
    answer.unlink()
    return contents
