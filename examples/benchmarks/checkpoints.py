"""What checkpoints cost: how long one takes to save for a small and a large network, and its share of the time.

    python examples/benchmarks/checkpoints.py --folder FOLDER

The folder lies on the disk that is measured; the large network needs 7 GB there, and 3 GB of memory. Writes
checkpoints.csv beside the figures of other benchmarks.
"""

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import torch

from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.training.checkpoints import Checkpoints
from ddm.training.config import CHECKPOINT_S, Engine
from ddm.training.distributed import training_process
from ddm.training.saving import MIN_TRAINING_PER_SAVE
from ddm.training.state import TrainingState

# The demo's digits, and latents of images of 256 x 256 pixels.
NETWORKS: dict[str, tuple[Dit, tuple[int, int, int]]] = {
    "demo": (Dit(patch=8, hidden=128, depth=4, heads=4), (1, 8, 8)),
    "B/2": (Dit(patch=2, hidden=768, depth=12, heads=12), (4, 32, 32)),
}


def time_saves(
    architecture: Dit, shape: tuple[int, int, int], folder: Path, num: int
) -> list[float]:
    """Return the seconds of so many checkpoints of one network."""
    settings = Training(
        num_steps=1000,
        batch_size=64,
        learning_rate=1e-4,
        weight_decay=0.0,
        ema_width=0.1,
    )
    model = build_expert(architecture, shape)
    state = TrainingState(model, settings, training_process(Engine(device="cpu")), 1)
    for weight in state.weights:
        weight.grad = torch.zeros_like(weight)
    # Makes AdamW's moments.
    state.take_step(torch.zeros(()))
    for weight in state.weights:
        weight.grad = None
    checkpoints = Checkpoints(folder, "0" * 64)
    seconds = []
    for step in range(1, num + 1):
        state.step = step
        began_at = time.perf_counter()
        state.save(checkpoints)
        seconds.append(time.perf_counter() - began_at)
    return seconds


def share_of_time(save_s: float) -> float:
    """Return the share of the time that saves take by the default settings, long after the start."""
    pause_s = max(CHECKPOINT_S, MIN_TRAINING_PER_SAVE * save_s)
    return save_s / (pause_s + save_s)


def main() -> None:
    """Command line: --folder FOLDER --saves N --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: a temporary one"
    )
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, (architecture, shape) in NETWORKS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            seconds = time_saves(architecture, shape, Path(scratch), arguments.saves)
            num_bytes = max(path.stat().st_size for path in Path(scratch).iterdir())
        save_s = statistics.median(seconds)
        rows.append((name, num_bytes, save_s, min(seconds), max(seconds), share_of_time(save_s)))
        print(
            f"{name}: {num_bytes / 1e6:.1f} MB, {save_s:.3f} s a checkpoint "
            f"({min(seconds):.3f} to {max(seconds):.3f}), {share_of_time(save_s):.3%} of the time",
            flush=True,
        )
    with (arguments.out / "checkpoints.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(("network", "bytes", "median_s", "min_s", "max_s", "share_of_time"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
