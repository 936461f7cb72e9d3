"""Our training loop against a bare PyTorch loop on the same model, side by side in one run.

The bound is the model's matrix products; the loop may add little to them. Rounds alternate, so that a noisy machine
slows both; the figure is the median of the rounds' ratios. Writes training_loop.csv beside the figure.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
from support.targets import Target, report_targets
from support.training import train_expert
from torch import Tensor, nn

from ddm.models import build_expert, training_flops
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training

ARCHITECTURE = Dit(patch=2, hidden=96, depth=4, heads=4)
SHAPE = (1, 8, 8)
BATCH = 64


def ours(images: Tensor, num_steps: int) -> float:
    """Seconds of `ddm.training.loop.train`: seeded batches, warm-up, clipping, EMA, finite guard, one checkpoint."""
    settings = Training(
        num_steps=num_steps,
        batch_size=BATCH,
        learning_rate=2e-3,
        weight_decay=0.01,
        ema_decay=0.995,
    )
    return train_expert(ARCHITECTURE, images, settings)[1]


def bare(images: Tensor, num_steps: int) -> float:
    """Seconds of the shortest loop that trains the same model on the same objective."""
    model: nn.Module = build_expert(ARCHITECTURE, SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    started = time.perf_counter()
    for _ in range(num_steps):
        x_0 = images[torch.randint(len(images), (BATCH,))]
        eps = torch.randn_like(x_0)
        t = torch.rand(BATCH)
        x_t = torch.lerp(x_0, eps, t[:, None, None, None])
        loss = (model(x_t, t) - (eps - x_0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - started


def matmul_rate(seconds: float = 1.0) -> float:
    """FLOP/s of the model's commonest product, measured here and now."""
    a = torch.randn(BATCH * 16, 96)
    b = torch.randn(96, 384)
    count = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        a @ b
        count += 1
    return count * 2 * a.shape[0] * a.shape[1] * b.shape[1] / (time.perf_counter() - started)


def main() -> None:
    """Command line: --rounds N --steps N --quick --out FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of five steps, for a quick trial"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    arguments = parser.parse_args()
    rounds, steps = (2, 5) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    images = torch.rand(512, *SHAPE) * 2 - 1
    ours(images, 2), bare(images, 2)  # whoever comes first also pays for what torch sets up once
    rows = []
    for index in range(rounds):
        loop = ours(images, steps)
        plain = bare(images, steps)
        rate = matmul_rate()
        flops = training_flops(ARCHITECTURE, SHAPE, BATCH * steps)
        rows.append((index, loop, plain, loop / plain, flops / plain / rate, flops / loop / rate))
        print(
            f"round {index}: ours {loop:.2f} s, bare {plain:.2f} s, ratio {loop / plain:.3f}",
            flush=True,
        )
    share = statistics.median(row[5] for row in rows)
    print(f"median: {share:.0%} of the measured matmul rate (one thread)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "training_loop.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            ("round", "ours_s", "bare_s", "ratio", "bare_share_of_matmul", "ours_share_of_matmul")
        )
        writer.writerows(rows)
    ratio = Target(
        "training loop, time over a bare loop's", [row[3] for row in rows], 1.02, at_least=False
    )
    report_targets("training_loop", [ratio], arguments)


if __name__ == "__main__":
    main()
