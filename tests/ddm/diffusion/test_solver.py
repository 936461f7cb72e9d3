"""Solvers against the closed-form flow of one Gaussian, and their order of convergence."""

from collections.abc import Sequence
from itertools import pairwise, product
from math import inf, isfinite, log, log2

import pytest
import torch
from torch import Tensor

from ddm.diffusion.multistep import SolverMemory, filled
from ddm.diffusion.path import (
    CosinePath,
    LinearPath,
    Path,
    Velocity,
    velocity,
    x_0_and_eps,
    x_0_and_eps_of,
)
from ddm.diffusion.solver import SolverName, follow, integrate, solver_step, uniform_times
from ddm.errors import MathError
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, four_silos


def one_gaussian(path: Path) -> GaussianMixture:
    """Its flow is ``x_t = alpha m + sqrt(alpha^2 v + sigma^2) x_1``, so noise x_1 ends at ``m + sqrt(v) x_1``."""
    mean = torch.tensor([[1.5, -0.5]])
    variance = torch.tensor([[0.25, 0.04]])
    return GaussianMixture(
        mean.double(), variance.double(), torch.ones(1).double(), torch.zeros(1).long(), path
    )


def error(path: Path, solver: SolverName, steps: int) -> float:
    gaussian = one_gaussian(path)
    x_1 = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_0 = integrate(gaussian.velocity, x_1, uniform_times(steps), solver)
    return float((x_0 - (gaussian.mean_CD + gaussian.variance_CD.sqrt() * x_1)).abs().max())


def test_solver_converges_to_the_closed_form_with_its_order() -> None:
    for path, (solver, order) in product(
        [LinearPath(), CosinePath()], [("euler", 1), ("heun", 2), ("rk4", 4)]
    ):
        with case(path=path, solver=solver, order=order):
            coarse = error(path, solver, 100)
            fine = error(path, solver, 200)
            assert abs(log2(coarse / fine) - order) < 0.15
            assert fine < 0.02


def four_silos_error(path: Path, solver: SolverName, times: Sequence[float]) -> float:
    """The mean error on four silos' mixture, against the Runge-Kutta solver on steps three times as fine."""
    mixture = four_silos(path)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fine = [t + (t_next - t) * n / 3 for t, t_next in pairwise(times) for n in range(3)] + [
        times[-1]
    ]
    truth = integrate(mixture.velocity, x, fine, "rk4")
    return float((integrate(mixture.velocity, x, times, solver, path) - truth).abs().mean())


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
@pytest.mark.parametrize("solver", ["midpoint", "dpm"])
def test_solver_of_second_order_has_it_on_a_mixture_away_from_the_ends(
    path: Path, solver: SolverName
) -> None:
    """One Gaussian would flatter midpoint, which is of third order on it; at the ends log-SNR is infinite."""

    def at(steps: int) -> float:
        return four_silos_error(path, solver, [0.9 - 0.7 * n / steps for n in range(steps + 1)])

    assert abs(log2(at(50) / at(100)) - 2) < 0.25


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_multistep_solver_is_exact_when_the_data_are_one_point(path: Path, steps: int) -> None:
    """x_0 never changes then, and both ends are reached without a division by alpha or sigma."""
    point = torch.tensor([1.5, -0.5], dtype=torch.float64)
    x_1 = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def towards_point(x: Tensor, t: Tensor) -> Tensor:
        x_0, eps = x_0_and_eps_of(path, "x_0", x, point.expand_as(x), t)
        return velocity(path, x_0, eps, t)

    ends = integrate(towards_point, x_1, uniform_times(steps), "dpm", path)
    assert (ends - point).abs().max() < 1e-12
    if steps > 1 and isinstance(path, CosinePath):
        assert (
            integrate(towards_point, x_1, uniform_times(steps)[:-1], "euler") - point
        ).abs().max() > 1e-3


def test_dpm_solver_follows_its_paper() -> None:
    """Against DPM-Solver++(2M), written out here; the control is a solver of the same order."""
    for path in (LinearPath(), CosinePath()):
        for steps in (20, 40):
            mixture = four_silos(path)
            x_1 = torch.randn(
                100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            times = uniform_times(steps)
            published = dpm_solver_2m(mixture.velocity, x_1, times, path)
            ours = integrate(mixture.velocity, x_1, times, "dpm", path)
            torch.testing.assert_close(ours, published, atol=1e-12, rtol=0)
            other = integrate(mixture.velocity, x_1, times, "midpoint", path)
            assert (other - published).abs().max() > 1e-3


def dpm_solver_2m(velocity: Velocity, x: Tensor, times: Sequence[float], path: Path) -> Tensor:
    """Algorithm 2 of Lu et al. 2022, of first order at both ends, where log-SNR is infinite."""
    before: tuple[Tensor, float] | None = None
    for t, t_next in pairwise(times):
        alpha, sigma, alpha_next, sigma_next = (
            float(part(torch.tensor(s, dtype=torch.float64)))
            for s in (t, t_next)
            for part in (path.alpha, path.sigma)
        )
        x_0 = x_0_and_eps(path, x, velocity(x, filled(x, t)), filled(x, t))[0]
        here = log(alpha / sigma) if alpha > 0 else -inf
        h = log(alpha_next / sigma_next) - here if sigma_next > 0 else inf
        held = x_0
        if before is not None and isfinite(before[1]) and isfinite(h):
            held = x_0 + h / (2 * (here - before[1])) * (x_0 - before[0])
        x = sigma_next / sigma * x + (alpha_next - alpha * sigma_next / sigma) * held
        before = (x_0, here)
    return x


def test_solver_forgets_a_sample_that_changed_its_expert_and_no_other() -> None:
    """Half of the samples change velocity in the middle; they go on as if they had started there."""
    first, second = (four_silos().expert(k) for k in (0, 1))
    times = uniform_times(10)
    step = solver_step("dpm", LinearPath())
    x_1 = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changed = torch.arange(6) % 2 == 0
    halfway, memory = follow(first, x_1, times[:6], step, SolverMemory.empty(x_1))

    def rest(velocity: Velocity, known: SolverMemory) -> Tensor:
        return follow(velocity, halfway, times[5:], step, known)[0]

    assert torch.equal(rest(first, memory.forget(changed))[~changed], rest(first, memory)[~changed])
    assert torch.equal(
        rest(second, memory.forget(changed))[changed],
        rest(second, SolverMemory.empty(x_1))[changed],
    )
    assert (
        rest(second, memory)[changed] - rest(second, SolverMemory.empty(x_1))[changed]
    ).abs().max() > 1e-3


def test_heun_is_not_of_first_order() -> None:
    assert log2(error(LinearPath(), "heun", 100) / error(LinearPath(), "heun", 200)) > 1.5


def test_solver_evaluates_as_often_as_its_table_says() -> None:
    evaluations = (
        ("euler", 7),
        ("heun", 14),
        ("midpoint", 14),
        ("rk4", 28),
        ("dpm", 7),
    )
    for solver, expected in evaluations:
        times: list[Tensor] = []

        def velocity(x: Tensor, t: Tensor, times: list[Tensor] = times) -> Tensor:
            times.append(t)
            return torch.zeros_like(x)

        integrate(velocity, torch.zeros(3, 2), uniform_times(7), solver)  # type: ignore[arg-type]
        assert len(times) == expected
        assert all(t.shape == (3,) for t in times)


def test_integration_is_refused_when_times_do_not_descend_within_0_and_1() -> None:
    for times in [(1.0,), (0.0, 1.0), (1.0, 0.5, 0.5, 0.0), (1.2, 0.0), (1.0, -0.1)]:
        with case(times=times), pytest.raises(MathError):
            integrate(lambda x, t: x, torch.zeros(1, 2), times)


def test_unknown_solver_and_no_steps_are_refused() -> None:
    with pytest.raises(MathError, check=has_subject("solver")):
        integrate(lambda x, t: x, torch.zeros(1, 2), (1.0, 0.0), "rk45")  # type: ignore[arg-type]
    with pytest.raises(MathError, check=has_subject("steps")):
        uniform_times(0)
