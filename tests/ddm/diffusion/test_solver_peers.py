"""Our multistep solver against that of diffusers, on the same velocities and times."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.diffusion.multistep import SolverMemory, filled
from ddm.diffusion.path import CosinePath, LinearPath, Path, Velocity, x_0_and_eps
from ddm.diffusion.solver import follow, integrate, solver_step, uniform_times
from tests.support.gaussian_mixture import four_silos

# diffusers' schedulers on the cosine path cannot start at alpha = 0
LATE = tuple(0.98 * t for t in uniform_times(12))
UNEVEN = tuple(0.95 * t**1.7 for t in uniform_times(9))


def make_scheduler(path: Path, times: Sequence[float]) -> Any:
    """The scheduler of diffusers with its sigmas set to our times, so that nothing depends on how it spaces them."""
    diffusers = pytest.importorskip("diffusers")
    kind = "flow_prediction" if isinstance(path, LinearPath) else "v_prediction"
    scheduler = diffusers.DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        solver_order=2,
        prediction_type=kind,
        use_flow_sigmas=isinstance(path, LinearPath),
    )
    scheduler.set_timesteps(len(times) - 1)
    t_S = torch.tensor(times, dtype=torch.float64)
    if isinstance(path, LinearPath):
        scheduler.sigmas = t_S
    else:
        scheduler.sigmas = path.sigma(t_S) / path.alpha(t_S)
    scheduler.timesteps = torch.arange(len(times) - 1)
    return scheduler


def follow_with_diffusers(
    path: Path, velocity: Velocity, x_B: Tensor, times: Sequence[float]
) -> Tensor:
    """Follow a velocity with diffusers' solver, in the prediction that it takes."""
    scheduler = make_scheduler(path, times)
    for n, t in enumerate(times[:-1]):
        t_B = filled(x_B, t)
        prediction = velocity(x_B, t_B)
        if not isinstance(path, LinearPath):
            x_0, eps = x_0_and_eps(path, x_B, prediction, t_B)
            prediction = path.alpha(t_B)[:, None] * eps - path.sigma(t_B)[:, None] * x_0
        x_B = scheduler.step(prediction, scheduler.timesteps[n], x_B, return_dict=False)[0]
    return x_B


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dpm_follows_that_of_diffusers() -> None:
    """To the rounding of its own coefficients, which are float32 in places; midpoint ends 1e-3 and more elsewhere."""
    for path, grids in (
        (LinearPath(), (LATE, UNEVEN, uniform_times(12))),
        (CosinePath(), (LATE, UNEVEN)),
    ):
        mixture = four_silos(path)
        x_1 = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for times in grids:
            ours = integrate(mixture.velocity, x_1, times, "dpm", path)
            peer = follow_with_diffusers(path, mixture.velocity, x_1, times)
            torch.testing.assert_close(ours, peer, atol=5e-5, rtol=0)
            other = integrate(mixture.velocity, x_1, times, "midpoint", path)
            assert (other - peer).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sample_that_changed_its_expert_goes_on_like_a_fresh_scheduler_of_diffusers() -> None:
    first = four_silos().expert(0)
    second = four_silos().expert(1)
    x_1 = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = solver_step("dpm", LinearPath())
    halfway, memory = follow(first, x_1, LATE[:6], step, SolverMemory.empty(x_1))
    all_changed = torch.ones(20, dtype=torch.bool)
    ours, _ = follow(second, halfway, LATE[5:], step, memory.forget(all_changed))
    peer = follow_with_diffusers(LinearPath(), second, halfway, LATE[5:])
    torch.testing.assert_close(ours, peer, atol=5e-5, rtol=0)
