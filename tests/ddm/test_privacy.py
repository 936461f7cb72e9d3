import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import chi2, norm

from ddm.errors import NumericalError
from ddm.privacy import (
    GRID,
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    Mechanism,
    discrete_laplace,
    gaussian_delta,
    gaussian_mu,
    rounded_gaussian,
    sketch_sensitivity,
    t_release,
    total_epsilon,
)
from ddm.schedule import CosinePath, LinearPath

FALSE_ALARM = 1e-7


def _brute_delta(epsilon: float, mechanisms: list[Mechanism]) -> float:
    """Hockey-stick divergence by summing over every outcome of the Laplace parts, closed form in the Gaussian part."""
    losses, weights = np.zeros(1), np.ones(1)
    mu = math.sqrt(sum(m.mu**2 for m in mechanisms if isinstance(m, GaussianMechanism)))
    for mechanism in mechanisms:
        if isinstance(mechanism, DiscreteLaplaceMechanism):
            rate = mechanism.epsilon / 2
            z = np.arange(-200, 200)
            p = np.exp(-rate * np.abs(z))
            p /= p.sum()
            loss = rate * (np.abs(z - 2) - np.abs(z))
            losses = (losses[:, None] + loss).ravel()
            weights = (weights[:, None] * p).ravel()
    if mu == 0:
        return float((weights * np.clip(-np.expm1(epsilon - losses), 0, None)).sum())
    inner = norm.cdf(mu / 2 - (epsilon - losses) / mu)
    outer = np.exp(epsilon - losses) * norm.cdf(-mu / 2 - (epsilon - losses) / mu)
    return float((weights * (inner - outer)).sum())


def test_gaussian_delta_matches_numerical_integration() -> None:
    for mu, epsilon in [(0.5, 1.0), (1.49, 7.0), (3.0, 2.0)]:

        def excess(x: float, mu: float = mu, epsilon: float = epsilon) -> float:
            return max(0.0, norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x))

        edge = epsilon / mu + mu / 2
        expected, _ = quad(excess, edge, edge + 20, epsabs=1e-13)
        assert gaussian_delta(mu, epsilon) == pytest.approx(expected, rel=1e-6)


def test_gaussian_mu_spends_exactly_its_budget_and_no_more() -> None:
    for epsilon, delta in [(7.0, 1e-5), (0.1, 1e-9), (50.0, 1e-3), (900.0, 1e-6)]:
        mu = gaussian_mu(epsilon, delta)
        assert gaussian_delta(mu, epsilon) <= delta
        assert gaussian_delta(mu * (1 + 1e-6), epsilon) > delta
    classical = math.sqrt(2 * math.log(1.25 / 1e-5))
    assert gaussian_mu(0.9, 1e-5) > 0.9 / classical  # the textbook bound is looser


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.1)])
def test_gaussian_mu_refuses_what_no_gaussian_meets(epsilon: float, delta: float) -> None:
    with pytest.raises(NumericalError):
        gaussian_mu(epsilon, delta)


@pytest.mark.parametrize(
    "mechanisms",
    [
        [DiscreteLaplaceMechanism(epsilon=1.0), GaussianMechanism(mu=1.49)],
        [DiscreteLaplaceMechanism(epsilon=1.0), DiscreteLaplaceMechanism(epsilon=0.5)],
        [DiscreteLaplaceMechanism(epsilon=0.7)] * 2 + [GaussianMechanism(mu=0.5), GaussianMechanism(mu=0.4)],
    ],
)
def test_total_epsilon_is_a_tight_upper_bound_of_brute_force(mechanisms: list[Mechanism]) -> None:
    exact = brentq(lambda epsilon: _brute_delta(epsilon, mechanisms) - 1e-5, 0, 50)
    found = total_epsilon(mechanisms, 1e-5)
    assert exact - 1e-6 <= found <= exact + 2e-3
    assert abs(total_epsilon(mechanisms[1:], 1e-5) - exact) > 0.1  # leaving one out shows


def test_total_epsilon_is_closed_form_when_one_family_is_alone() -> None:
    gaussians = [GaussianMechanism(mu=0.6), GaussianMechanism(mu=0.8)]
    assert gaussian_delta(1.0, total_epsilon(gaussians, 1e-6)) == pytest.approx(1e-6, rel=1e-6)
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)], 0.0) == 1.0
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)] * 3, 0.0) == 3.0
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)], 1e-5) <= 1.0
    assert total_epsilon(gaussians, 0.0) == math.inf
    assert total_epsilon([], 0.0) == 0.0


def test_total_epsilon_of_a_plan_stays_within_the_sum_of_its_parts() -> None:
    plan: list[Mechanism] = [DiscreteLaplaceMechanism(epsilon=1.0), GaussianMechanism(mu=gaussian_mu(7.0, 1e-5))]
    once = total_epsilon(plan, 1e-5)
    assert 7.0 < once < 8.0
    assert once < total_epsilon(plan * 2, 1e-5) < 2 * once


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_t_release_gives_exactly_the_noise_that_mu_asks(path) -> None:
    import torch

    mu, scale, rank = gaussian_mu(7.0, 1e-5), 4.7, 8
    found = t_release(mu, scale, path, rank)

    def spent(t: float) -> float:
        at = torch.tensor(t, dtype=torch.float64)
        return sketch_sensitivity(rank) * float(path.alpha(at) / (path.sigma(at) / scale))

    assert mu * (1 - 1e-4) < spent(found) <= mu
    assert spent(found - 1e-4) > mu
    assert float(repr(found)) == found


def test_t_release_refuses_a_release_that_would_be_noise_alone() -> None:
    with pytest.raises(NumericalError, match="t_release"):
        t_release(1e-9, 1e4, LinearPath(), 8)


def test_sketch_sensitivity_covers_the_worst_rounding() -> None:
    rng = np.random.default_rng(0)
    worst = 0.0
    for rank in (1, 8, 64):
        point = rng.standard_normal((2000, rank))
        point /= np.linalg.norm(point, axis=1, keepdims=True)
        coarse = 2.0**-4  # a coarse grid makes the effect visible; the bound scales with the grid
        rounded = np.rint(point / coarse) * coarse
        worst = float((2 * np.linalg.norm(rounded, axis=1)).max())
        assert worst <= 2 + math.sqrt(rank) * coarse
    assert worst > 2
    assert sketch_sensitivity(64) == 2 + 8 * GRID


def _chi_square_fails(sample: NDArray[np.int64], edges: NDArray[np.int64], probability: NDArray[np.float64]) -> bool:
    """Whole numbers clipped into the range of `edges`, against their probabilities."""
    observed = np.array([(np.clip(sample, edges[0], edges[-1]) == edge).sum() for edge in edges])
    expected = probability * len(sample)
    assert expected.min() > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic > chi2.isf(FALSE_ALARM, len(edges) - 1)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_discrete_laplace_noise_has_its_law_and_quartered_noise_is_caught(epsilon: float) -> None:
    num, q = 4000, math.exp(-epsilon / 2)
    reach = int(math.log(num / 60) / (epsilon / 2))
    edges = np.arange(-reach, reach + 1)
    probability = (1 - q) / (1 + q) * q ** np.abs(edges)
    probability[[0, -1]] = q**reach / (1 + q)  # all of the tail
    assert not _chi_square_fails(discrete_laplace(num, epsilon), edges, probability)
    assert _chi_square_fails(discrete_laplace(num, 4 * epsilon), edges, probability)
    assert _chi_square_fails(discrete_laplace(num, epsilon) // 4, edges, probability)


@pytest.mark.parametrize("std", [0.8, 3.0, 12.5])
def test_rounded_gaussian_noise_has_its_law_and_quartered_noise_is_caught(std: float) -> None:
    num = 40_000
    reach = math.ceil(2.5 * std)
    edges = np.arange(-reach, reach + 1)
    upper = norm.cdf((edges + 0.5) / std)
    probability = np.diff(np.concatenate([[0.0], upper[:-1], [1.0]]))
    assert not _chi_square_fails(rounded_gaussian((num,), std), edges, probability)
    assert _chi_square_fails(rounded_gaussian((num,), std / 4), edges, probability)


def test_rounded_gaussian_reaches_the_far_tail_and_never_infinity() -> None:
    class Extreme:
        def __init__(self, octet: int) -> None:
            self.octet = octet

        def below(self, bound: int) -> int:
            raise NotImplementedError

        def octets(self, num: int) -> bytes:
            return bytes([self.octet]) * num

    far = rounded_gaussian((1,), 1e6, Extreme(0))
    assert -14e6 < far[0] < -12.5e6
    assert rounded_gaussian((1,), 1e6, Extreme(255))[0] == 0


def test_noise_differs_between_draws_whatever_the_seeds_are() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)  # has no effect, and must not
        draws.append((rounded_gaussian((50,), 1e6), discrete_laplace(200, 0.1)))
    assert not np.array_equal(draws[0][0], draws[1][0])
    assert not np.array_equal(draws[0][1], draws[1][1])


def test_mechanisms_survive_json() -> None:
    for mechanism in (GaussianMechanism(mu=1.25), DiscreteLaplaceMechanism(epsilon=0.5)):
        assert type(mechanism).model_validate_json(mechanism.model_dump_json()) == mechanism
