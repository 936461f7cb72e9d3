"""Training in bf16 against training in fp32: our loop, the same model and images, in turns.

The bound is the rate at which the processor multiplies in each. Sizes are those of experts of Fashion-MNIST's images
(patches of 4 and of 2). The target holds where `precision = "auto"` is bf16, on AMX and on AMD's avx512_bf16; elsewhere
the figures are printed alone. Writes precision.csv.
"""

import argparse
import csv
import statistics
from pathlib import Path

import torch
from support.targets import Target, report_targets
from support.training import train_expert
from torch import Tensor

from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.system.devices import Precision, computes_in_bf16

SHAPE = (1, 28, 28)
BATCH = 64
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SIZES = {
    "DiT of .7M, 49 tokens": Dit(patch=4, hidden=128, depth=2, heads=4),
    "DiT of .7M, 196 tokens": Dit(patch=2, hidden=128, depth=2, heads=4),
    "DiT of 2.8M, 49 tokens": Dit(patch=4, hidden=192, depth=4, heads=4),
}
"""Experts by name; the first is the one that the target is about."""


def rate(architecture: Dit, images: Tensor, precision: Precision, num_steps: int) -> float:
    """Images a second of `ddm.training.loop.train` in one precision."""
    settings = Training(
        num_steps=num_steps,
        batch_size=BATCH,
        learning_rate=1e-3,
        weight_decay=0.01,
        ema_decay=0.995,
        precision=precision,
    )
    return BATCH * num_steps / train_expert(architecture, images, settings)[1]


def main() -> None:
    """Command line: --rounds N --steps N --quick --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of two steps, for a quick trial"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    rounds, steps = (2, 2) if arguments.quick else (arguments.rounds, arguments.steps)
    images = torch.rand(512, *SHAPE) * 2 - 1
    rows: list[tuple[str, int, int, float, float, float]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, architecture in SIZES.items():
            for index in range(-1, rounds):
                num_steps = steps if index >= 0 else 2  # round -1 pays for what torch sets up once
                full, half = (
                    rate(architecture, images, precision, num_steps) for precision in PRECISIONS
                )
                if index >= 0:
                    rows.append((name, threads, index, full, half, half / full))
            of_size = [row for row in rows if row[:2] == (name, threads)]
            slow, fast, ratio = (
                statistics.median(values)
                for values in zip(*(row[3:] for row in of_size), strict=True)
            )
            print(
                f"{name}, {threads} threads: fp32 {slow:.0f} images/s, bf16 {fast:.0f}, ratio {ratio:.2f}",
                flush=True,
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "precision.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            ("expert", "threads", "round", "fp32_images_per_s", "bf16_images_per_s", "ratio")
        )
        writer.writerows(rows)
    ratios = [row[5] for row in rows if row[:2] == (next(iter(SIZES)), 1)]
    target = Target("training in bf16, images/s against fp32", ratios, 1.6)
    if computes_in_bf16("auto", torch.device("cpu")):
        report_targets("precision", [target], arguments)


if __name__ == "__main__":
    main()
