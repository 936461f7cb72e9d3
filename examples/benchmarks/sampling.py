"""Compares the images a second of eight experts and their router with those of one dense model of the same size.

Rounds alternate between the two, so that a noisy machine slows both; a figure is the median of the rounds' ratios. All
is done in one thread, and its processor time is counted, which other programs disturb less than the clock's. The
experts are untrained, which costs the same, and equally likely. The dense model gets the same batch size as an
expert. The router is one of counts, 128 groups on a sketch of 32 dimensions. Target: 0.95 of the dense model's
images a second, for lock and for sample. Writes build/bench/sampling.csv.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from support.measuring import parse, report, say
from support.targets import Target, report_targets
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.diffusion.solver import integrate, uniform_times
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.routers.counts import CountsRouter
from ddm.routers.sketch import Sketch

EULER = SamplingOptions(solver="euler")
NUM_EXPERTS = 8
SHAPE = (1, 16, 16)
ARCHITECTURE = Dit(patch=2, hidden=192, depth=6, heads=6)
RANK = 32
NUM_GROUPS = 128
TARGET = 0.95


def make_router(generator: torch.Generator) -> CountsRouter:
    """Experts with random shares of the groups of random public images."""
    images = torch.randn(8 * NUM_GROUPS, *SHAPE, generator=generator)
    group_N = torch.arange(len(images)) % NUM_GROUPS
    sketch = Sketch.fit(images, group_N, RANK, NUM_GROUPS)
    mass_KG = torch.rand(NUM_EXPERTS, NUM_GROUPS, generator=generator, dtype=torch.float64)
    return CountsRouter(sketch, (mass_KG / mass_KG.sum(1, keepdim=True)).log(), LinearPath())


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of some work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def dense(model: torch.nn.Module, num: int, steps: int, together: int) -> Tensor:
    """Draw with the one model alone."""
    with torch.inference_mode():
        parts = torch.randn(num, *SHAPE).split(together)  # type: ignore[no-untyped-call]
        return torch.cat([integrate(model, part, uniform_times(steps), "euler") for part in parts])


def main() -> None:
    """Command line: --rounds N --num N --steps N --quick --json --out FOLDER."""
    arguments = parse(__doc__, rounds=5, num=256, steps=8)
    num, steps = (64, 2) if arguments.quick else (arguments.num, arguments.steps)
    torch.set_num_threads(1)
    experts = [
        build_expert(ARCHITECTURE, SHAPE, seed=k).eval().requires_grad_(False)
        for k in range(NUM_EXPERTS)
    ]
    router = make_router(torch.Generator().manual_seed(0))
    ensemble = Ensemble(experts, router, [1.0] * NUM_EXPERTS, SHAPE)
    rows = []
    for number in range(arguments.rounds + 1):
        alone = seconds(lambda: dense(experts[0], num, steps, ensemble.chunk_size))
        for strategy in ("lock", "sample"):
            sample = partial(ensemble.sample, num, strategy=strategy, steps=steps, options=EULER)
            own = seconds(sample)
            say(f"dense {num / alone:.1f} images/s, {strategy} {num / own:.1f}")
            if number:  # the first round warms up
                rows.append((number, strategy, num / alone, num / own, alone / own))
    report(
        "sampling", ("round", "strategy", "dense_images_s", "images_s", "of_dense"), rows, arguments
    )
    targets = [
        Target(
            f"{name}, images/s against one dense model",
            [row[4] for row in rows if row[1] == name],
            TARGET,
        )
        for name in ("lock", "sample")
    ]
    report_targets("sampling", targets, arguments)


if __name__ == "__main__":
    main()
