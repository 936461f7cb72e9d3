"""Our multistep solvers against those of diffusers, on the same velocities and times."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.diffusion.multistep import Memory, filled
from ddm.diffusion.path import CosinePath, LinearPath, Path, Velocity, x_0_and_eps
from ddm.diffusion.solver import SolverName, follow, integrate, solver_named, uniform_times
from tests.support.gaussian_mixture import four_silos

# diffusers' schedulers on the cosine path cannot start at alpha = 0
LATE = tuple(0.98 * t for t in uniform_times(12))
UNEVEN = tuple(0.95 * t**1.7 for t in uniform_times(9))


def scheduler(solver: SolverName, path: Path, times: Sequence[float]) -> Any:
    """The scheduler of diffusers with its sigmas set to our times, so that nothing depends on how it spaces them."""
    diffusers = pytest.importorskip("diffusers")
    kind = "flow_prediction" if isinstance(path, LinearPath) else "v_prediction"
    common = {
        "solver_order": 2,
        "prediction_type": kind,
        "use_flow_sigmas": isinstance(path, LinearPath),
    }
    if solver == "dpm":
        found = diffusers.DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", solver_type="midpoint", **common
        )
    else:
        found = diffusers.UniPCMultistepScheduler(solver_type="bh2", predict_x0=True, **common)
    found.set_timesteps(len(times) - 1)
    t_S = torch.tensor(times, dtype=torch.float64)
    found.sigmas = t_S if isinstance(path, LinearPath) else path.sigma(t_S) / path.alpha(t_S)
    found.timesteps = torch.arange(len(times) - 1)
    return found


def theirs(
    solver: SolverName, path: Path, velocity: Velocity, x_B: Tensor, times: Sequence[float]
) -> Tensor:
    """Follow a velocity with diffusers' solver, told of it in the form that this takes."""
    found = scheduler(solver, path, times)
    for n, t in enumerate(times[:-1]):
        t_B = filled(x_B, t)
        told = velocity(x_B, t_B)
        if not isinstance(path, LinearPath):
            x_0, eps = x_0_and_eps(path, x_B, told, t_B)
            told = path.alpha(t_B)[:, None] * eps - path.sigma(t_B)[:, None] * x_0
        x_B = found.step(told, found.timesteps[n], x_B, return_dict=False)[0]
    return x_B


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_multistep_solvers_follow_those_of_diffusers() -> None:
    """To the rounding of its own coefficients, which are float32 in places; the two solvers are 1e-3 and more apart."""
    for path, grids in (
        (LinearPath(), (LATE, UNEVEN, uniform_times(12))),
        (CosinePath(), (LATE, UNEVEN)),
    ):
        mixture = four_silos(path)
        x_1 = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for times in grids:
            ends = {}
            for solver in ("dpm", "unipc"):
                ends[solver] = integrate(mixture.velocity, x_1, times, solver, path)
                peer = theirs(solver, path, mixture.velocity, x_1, times)
                torch.testing.assert_close(ends[solver], peer, atol=5e-5, rtol=0)
            assert (ends["dpm"] - ends["unipc"]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sample_that_changed_its_expert_goes_on_like_a_fresh_scheduler_of_diffusers() -> None:
    first, second = (four_silos().expert(k) for k in (0, 1))
    x_1 = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for solver in ("dpm", "unipc"):
        step = solver_named(solver, LinearPath())
        halfway, memory = follow(first, x_1, LATE[:6], step, Memory.none(x_1))
        ours, _ = follow(
            second, halfway, LATE[5:], step, memory.forget(torch.ones(20, dtype=torch.bool))
        )
        torch.testing.assert_close(
            ours, theirs(solver, LinearPath(), second, halfway, LATE[5:]), atol=5e-5, rtol=0
        )
