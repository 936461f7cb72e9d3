"""Compares all solvers, and grids of times, at the same number of evaluations, for the default of `sample`.

Worlds: two mixtures of Gaussians with exact experts and an exact router, on both paths; and, with --worlds
fashion-mnist --data FOLDER, experts trained on groups of Fashion-MNIST's classes, with a router of counts. Under `lock`
(t_lock = 1) and `full` a trajectory depends on the noise alone, so the error is the root mean square over all values
against Runge-Kutta with 4 x 100 evaluations. Under `sample` a trajectory depends on the draws of experts, whose number
changes with the steps; there the error is that of the law, the sliced Wasserstein-1 distance from the exact mixture,
beside which stands that of as many samples drawn from the mixture itself. Evaluations are those of one velocity; `full`
asks all experts in each. A solver takes as many steps as fit into the evaluations. Writes solvers.csv.
"""

# Shape legend: B batch, S steps, N samples.
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import get_args

import torch
from support.islands import PRIOR, SHAPE, counts_router, trained_experts
from support.measuring import parse, report, say
from support.mixture import Mixture, plane, sliced_distance, wide
from torch import Tensor

from ddm.diffusion.path import CosinePath, Experts, LinearPath, Path
from ddm.diffusion.solver import SolverName, solver_step, uniform_times
from ddm.routers.base import Router, log_prior
from ddm.sampling.mixture import Branch
from ddm.sampling.mixture import Mixture as Sampled
from ddm.sampling.precision import CastExperts
from ddm.sampling.strategies import Full, Lock, Sample, Strategy
from ddm.sampling.trajectories import Trajectories, draw_noise

EVALUATIONS = (10, 25, 50, 100)
COST: dict[SolverName, int] = {
    "euler": 1,
    "midpoint": 2,
    "heun": 2,
    "rk4": 4,
    "dpm": 1,
}
FINE_STEPS = 100
# where grids along log-SNR begin and end; then one step to 0, before one from 1
T_MIN = 0.005
T_MAX = 0.995
RHO = 7.0
COLUMNS = ("world", "path", "strategy", "grid", "solver", "evaluations", "steps", "error", "floor")


@dataclass(frozen=True)
class SolverWorld:
    """Experts, a router, and what one sample looks like."""

    name: str
    experts: Experts
    router: Router
    prior: Sequence[float]
    shape: tuple[int, ...]
    path: Path
    exact: Mixture | None = None


def log_snr_times(steps: int, path: Path) -> tuple[float, ...]:
    """Even in log(alpha / sigma) between T_MAX and T_MIN."""
    return _between(steps, path, lambda share, high, low: low * (high / low) ** share)


def karras_times(steps: int, path: Path) -> tuple[float, ...]:
    """Even in (sigma / alpha)^(1 / 7) between T_MAX and T_MIN (Karras et al. 2022, equation 5)."""
    root = 1 / RHO
    return _between(
        steps, path, lambda share, high, low: (low**root + share * (high**root - low**root)) ** RHO
    )


def shifted_times(steps: int, path: Path) -> tuple[float, ...]:
    """``3 t / (1 + 2 t)`` of even t (Esser et al. 2024, for images of higher resolution): longer near noise."""
    return tuple(3 * t / (1 + 2 * t) for t in uniform_times(steps))


def cosine_times(steps: int, path: Path) -> tuple[float, ...]:
    """``sin^2(pi t / 2)`` of even t: shorter steps at both ends."""
    return tuple(math.sin(math.pi / 2 * t) ** 2 for t in uniform_times(steps))


def _between(
    steps: int, path: Path, ratio: Callable[[float, float, float], float]
) -> tuple[float, ...]:
    """Return 1, times at which sigma / alpha takes values between those at T_MAX and T_MIN, and 0."""
    if steps < 3:
        return uniform_times(steps)
    ends = torch.tensor([T_MAX, T_MIN], dtype=torch.float64)
    high, low = (path.sigma(ends) / path.alpha(ends)).tolist()
    shares = [1 - n / (steps - 2) for n in range(steps - 1)]
    ratios = torch.tensor([ratio(share, high, low) for share in shares], dtype=torch.float64)
    return (1.0, *path.time_of(torch.ones_like(ratios), ratios).tolist(), 0.0)


GRIDS: dict[str, Callable[[int, Path], tuple[float, ...]]] = {
    "uniform": lambda steps, path: uniform_times(steps),
    "cosine": cosine_times,
    "log-snr": log_snr_times,
    "karras": karras_times,
    "shifted": shifted_times,
}


def draw(
    world: SolverWorld, strategy: Strategy, solver: SolverName, times: Sequence[float], num: int
) -> Tensor:
    """Draw samples 0 to num - 1; under lock each has the same expert for every solver and number of steps."""
    branch = Branch(log_prior(world.prior, len(world.experts)), world.router)
    mixture = Sampled(CastExperts(world.experts), (branch,), 4096)
    noise, uniform_NS = draw_noise(range(num), world.shape, 0, len(times) - 1)
    noise = noise.double() if world.exact else noise
    steps = solver_step(solver, world.path)
    with torch.inference_mode():
        return (
            Trajectories(mixture, strategy, times, steps, 1, lambda _: None)
            .integrate(noise, uniform_NS)
            .x_B
        )


def measure(
    world: SolverWorld, grids: Sequence[str], num: int, num_law: int, quick: bool
) -> Iterator[tuple[object, ...]]:
    """Yield a row for every strategy, grid, solver and number of evaluations."""
    fine = uniform_times(20 if quick else FINE_STEPS)
    truths = {
        name: draw(world, kind, "rk4", fine, num)
        for name, kind in (("lock", Lock()), ("full", Full()))
    }
    law = world.exact.quantiles(num_law) if world.exact else ()
    floor = sliced_distance(world.exact.draw(num_law, 1), *law) if world.exact else 0.0
    for name, strategy in (("lock", Lock()), ("full", Full()), ("sample", Sample())):
        if name == "sample" and world.exact is None:
            continue
        for grid, times_of in GRIDS.items():
            if grid not in (grids if name == "lock" else grids[:1]):
                continue
            for solver, cost in COST.items():
                for evaluations in EVALUATIONS[: 2 if quick else None]:
                    times = times_of(evaluations // cost, world.path)
                    if name == "sample" and world.exact:
                        error = sliced_distance(draw(world, strategy, solver, times, num_law), *law)
                    else:
                        off = draw(world, strategy, solver, times, num) - truths[name]
                        error = float(off.double().square().mean().sqrt())
                    at = (world.name, type(world.path).__name__, name, grid, solver)
                    yield (
                        *at,
                        evaluations,
                        len(times) - 1,
                        error,
                        floor if name == "sample" else 0.0,
                    )
        say(f"{world.name}, {type(world.path).__name__}, {name}")


def worlds(
    names: Sequence[str], data: FilePath, work: FilePath, train_steps: int
) -> Iterator[SolverWorld]:
    """Yield the mixtures on both paths, and the trained experts."""
    for made in (make_world for make_world in (plane, wide) if make_world.__name__ in names):
        for path in (LinearPath(), CosinePath()):
            exact = made(path)
            experts = [exact.velocity_of(k) for k in range(exact.num_experts)]
            shape = (exact.mean_CD.shape[1],)
            yield SolverWorld(
                made.__name__, experts, exact, exact.prior_K.tolist(), shape, path, exact
            )
    if "fashion-mnist" in names:
        yield SolverWorld(
            "fashion-mnist",
            trained_experts(data, work, train_steps),
            counts_router(data),
            PRIOR,
            SHAPE,
            LinearPath(),
        )


def main() -> None:
    """Command line: --worlds NAME,... --grids NAME,... --data FOLDER --num N --law N --train N --quick --out FOLDER."""
    arguments = parse(
        __doc__,
        grids=",".join(GRIDS),
        worlds="plane,wide",
        data="fashion-mnist",
        num=16,
        law=4000,
        train=300,
    )
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    num, num_law, train_steps = (
        (4, 500, 5) if arguments.quick else (arguments.num, arguments.law, arguments.train)
    )
    assert set(COST) == set(get_args(SolverName))  # noqa: S101
    rows: list[tuple[object, ...]] = []
    grids = arguments.grids.split(",")
    for world in worlds(
        arguments.worlds.split(","), FilePath(arguments.data), arguments.work, train_steps
    ):
        for row in measure(
            world, grids, num if world.exact is None else 8 * num, num_law, arguments.quick
        ):
            rows.append(row)
            # of a run of hours, should it end early
            with (arguments.work / "solvers.partial.csv").open("a") as handle:
                handle.write(",".join(map(str, row)) + "\n")
    report("solvers", COLUMNS, rows, arguments)


if __name__ == "__main__":
    main()
