"""Solvers against the closed-form flow of one Gaussian, and their order of convergence."""

from math import log2

import pytest
import torch
from torch import Tensor

from ddm.errors import MathError
from ddm.sampling import SolverName, integrate, uniform_times
from ddm.schedule import CosinePath, LinearPath, Path
from tests.ddm.gaussian_mixture import GaussianMixture


def one_gaussian(path: Path) -> GaussianMixture:
    """Its flow is ``x_t = alpha m + sqrt(alpha^2 v + sigma^2) x_1``, so noise x_1 ends at ``m + sqrt(v) x_1``."""
    mean, variance = torch.tensor([[1.5, -0.5]]), torch.tensor([[0.25, 0.04]])
    return GaussianMixture(mean.double(), variance.double(), torch.ones(1).double(), torch.zeros(1).long(), path)


def error(path: Path, solver: SolverName, steps: int) -> float:
    gaussian = one_gaussian(path)
    x_1 = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = integrate(gaussian.velocity, x_1, uniform_times(steps), solver)
    return float((found - (gaussian.mean_CD + gaussian.variance_CD.sqrt() * x_1)).abs().max())


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_solver_converges_to_the_closed_form_with_its_order(path: Path, solver: SolverName, order: int) -> None:
    coarse, fine = error(path, solver, 100), error(path, solver, 200)
    assert abs(log2(coarse / fine) - order) < 0.15
    assert fine < 0.02


def test_heun_is_not_of_first_order() -> None:
    assert log2(error(LinearPath(), "heun", 100) / error(LinearPath(), "heun", 200)) > 1.5


def test_solver_evaluates_once_a_step_for_euler_and_twice_for_heun() -> None:
    for solver, expected in (("euler", 7), ("heun", 14)):
        asked: list[Tensor] = []

        def velocity(x: Tensor, t: Tensor, asked: list[Tensor] = asked) -> Tensor:
            asked.append(t)
            return torch.zeros_like(x)

        integrate(velocity, torch.zeros(3, 2), uniform_times(7), solver)  # type: ignore[arg-type]
        assert len(asked) == expected
        assert all(t.shape == (3,) for t in asked)


@pytest.mark.parametrize("times", [(1.0,), (0.0, 1.0), (1.0, 0.5, 0.5, 0.0), (1.2, 0.0), (1.0, -0.1)])
def test_integration_is_refused_when_times_do_not_descend_within_0_and_1(times: tuple[float, ...]) -> None:
    with pytest.raises(MathError):
        integrate(lambda x, t: x, torch.zeros(1, 2), times)


def test_unknown_solver_and_no_steps_are_refused() -> None:
    with pytest.raises(MathError, match="solver"):
        integrate(lambda x, t: x, torch.zeros(1, 2), (1.0, 0.0), "rk45")  # type: ignore[arg-type]
    with pytest.raises(MathError, match="steps"):
        uniform_times(0)
