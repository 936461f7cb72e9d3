import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from ddm.diffusion.path import CosinePath, LinearPath
from ddm.errors import NumericalError
from ddm.privacy.accounting import (
    GRID,
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    Mechanism,
    adaptive_epsilon,
    gaussian_delta,
    gaussian_mu,
    gaussian_mu_within,
    privacy_curve,
    sketch_sensitivity,
    t_release,
    total_epsilon,
)
from tests.support.case import case
from tests.support.errors import has_subject


def _brute_delta(epsilon: float, mechanisms: list[Mechanism]) -> float:
    """Hockey-stick divergence by summing over every outcome of the Laplace parts, closed form in the Gaussian part."""
    losses = np.zeros(1)
    weights = np.ones(1)
    place: np.ndarray
    mu = math.sqrt(sum(m.mu**2 for m in mechanisms if isinstance(m, GaussianMechanism)))
    for mechanism in mechanisms:
        if isinstance(mechanism, DiscreteLaplaceMechanism):
            rate = mechanism.epsilon / 2
            z = np.arange(-200, 200)
            p = np.exp(-rate * np.abs(z))
            p /= p.sum()
            for moved in (-1, 1):  # one cell loses the unit, another one gains it
                loss = rate * (np.abs(z - moved) - np.abs(z))
                sums = (losses[:, None] + loss).round(9).ravel()
                losses, place = np.unique(sums, return_inverse=True)
                weights = np.bincount(place, (weights[:, None] * p).ravel()).astype(np.float64)
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


def test_gaussian_mu_refuses_what_no_gaussian_meets() -> None:
    for epsilon, delta in [(0.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.1), (1e-9, 1e-15)]:
        with case(epsilon=epsilon, delta=delta), pytest.raises(NumericalError):
            gaussian_mu(epsilon, delta)


@pytest.mark.parametrize(
    "mechanisms",
    [
        [DiscreteLaplaceMechanism(epsilon=1.0), GaussianMechanism(mu=1.49)],
        [DiscreteLaplaceMechanism(epsilon=1.0), DiscreteLaplaceMechanism(epsilon=0.5)],
        [DiscreteLaplaceMechanism(epsilon=0.7)] * 2
        + [GaussianMechanism(mu=0.5), GaussianMechanism(mu=0.4)],
    ],
)
def test_total_epsilon_is_a_tight_upper_bound_of_brute_force(mechanisms: list[Mechanism]) -> None:
    exact = brentq(lambda epsilon: _brute_delta(epsilon, mechanisms) - 1e-5, 0, 50)
    epsilon = total_epsilon(mechanisms, 1e-5)
    assert exact - 1e-6 <= epsilon <= exact + 2e-3
    assert abs(total_epsilon(mechanisms[1:], 1e-5) - exact) > 0.1  # leaving one out shows


def test_total_epsilon_is_closed_form_when_one_family_is_alone() -> None:
    gaussians = [GaussianMechanism(mu=0.6), GaussianMechanism(mu=0.8)]
    assert gaussian_delta(1.0, total_epsilon(gaussians, 1e-6)) == pytest.approx(1e-6, rel=1e-6)
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)], 0.0) == 1.0
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)] * 3, 0.0) == 3.0
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=1.0)], 1e-5) <= 1.0
    assert total_epsilon(gaussians, 0.0) == math.inf
    assert total_epsilon([], 0.0) == 0.0
    # too much to compose
    assert total_epsilon([DiscreteLaplaceMechanism(epsilon=450.0)] * 2, 1e-5) == 900.0


def test_total_epsilon_of_a_plan_stays_within_the_sum_of_its_parts() -> None:
    plan: list[Mechanism] = [
        DiscreteLaplaceMechanism(epsilon=1.0),
        GaussianMechanism(mu=gaussian_mu(7.0, 1e-5)),
    ]
    once = total_epsilon(plan, 1e-5)
    assert 7.0 < once < 8.0
    assert once < total_epsilon(plan * 2, 1e-5) < 2 * once


def test_epsilon_never_rises_with_delta_so_that_one_more_plan_never_costs_less_than_nothing() -> (
    None
):
    steps: list[list[Mechanism]] = [
        [GaussianMechanism(mu=0.7)],
        [DiscreteLaplaceMechanism(epsilon=0.8), GaussianMechanism(mu=1.49)],
        [
            DiscreteLaplaceMechanism(epsilon=0.3),
            DiscreteLaplaceMechanism(epsilon=0.4),
            GaussianMechanism(mu=3.0),
        ],
        [GaussianMechanism(mu=1e-7)],
    ]
    for step in steps:
        curve = privacy_curve(step)
        costs = [curve(delta) for delta in np.geomspace(1e-13, 0.3, 60)]
        assert (np.diff(costs) <= 0).all()
    totals = [adaptive_epsilon((steps * 3)[:num], 1e-5) for num in range(13)]
    assert (np.diff(totals) >= 0).all()
    assert totals[0] == 0.0 < totals[1]


def test_hundred_plans_cost_what_their_shares_of_delta_cost_in_closed_form() -> None:
    mu = 0.5
    delta = 1e-5
    num = 100
    shares = [delta / (j * (j + 1)) for j in range(1, num)] + [delta / num]
    assert math.fsum(shares) == pytest.approx(delta, rel=1e-12)
    expected = sum(brentq(lambda e, d=d: gaussian_delta(mu, e) - d, 0, 50) for d in shares)
    epsilon = adaptive_epsilon([[GaussianMechanism(mu=mu)]] * num, delta)
    assert epsilon == pytest.approx(expected, rel=1e-6)
    # what it costs that plans may adapt
    assert epsilon > 3 * total_epsilon([GaussianMechanism(mu=mu)] * num, delta)


def test_one_plan_costs_its_composed_epsilon_and_pure_plans_their_sum() -> None:
    plan: list[Mechanism] = [DiscreteLaplaceMechanism(epsilon=1.0), GaussianMechanism(mu=0.7)]
    assert adaptive_epsilon([plan], 1e-5) == total_epsilon(plan, 1e-5)
    pure = [[DiscreteLaplaceMechanism(epsilon=epsilon)] for epsilon in (0.5, 0.25, 1.0)]
    assert adaptive_epsilon(pure, 0.0) == adaptive_epsilon(pure, 1e-5) == 1.75
    assert adaptive_epsilon([*pure, plan], 0.0) == math.inf
    assert adaptive_epsilon([], 1e-5) == 0.0


@pytest.mark.parametrize(
    ("total", "delta", "counts"), [(4.0, 1e-5, 1.0), (8.0, 1e-6, 0.5), (0.5, 1e-5, 0.4)]
)
def test_gaussian_beside_counts_uses_up_the_total_and_no_more(
    total: float, delta: float, counts: float
) -> None:
    mu = gaussian_mu_within(total, delta, counts)
    laplace = DiscreteLaplaceMechanism(epsilon=counts)
    assert total_epsilon([laplace, GaussianMechanism(mu=mu)], delta) <= total
    assert total_epsilon([laplace, GaussianMechanism(mu=mu * (1 + 1e-5))], delta) > total
    # splitting epsilon by hand gives some away
    assert mu > gaussian_mu(total - counts, delta) * 1.01


def test_gaussian_beside_counts_that_cost_the_total_is_refused() -> None:
    with pytest.raises(NumericalError, check=has_subject("Gaussian mechanism")):
        gaussian_mu_within(1.0, 1e-5, 1.0001)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_t_release_gives_exactly_the_noise_that_mu_asks(path) -> None:
    import torch

    mu = gaussian_mu(7.0, 1e-5)
    scale = 4.7
    rank = 8
    level = t_release(mu, scale, path, rank)

    def spent(t: float) -> float:
        at = torch.tensor(t, dtype=torch.float64)
        return sketch_sensitivity(rank) * float(path.alpha(at) / (path.sigma(at) / scale))

    assert mu * (1 - 1e-4) < spent(level) <= mu
    assert spent(level - 1e-4) > mu
    assert float(repr(level)) == level


def test_t_release_refuses_a_release_that_would_be_noise_alone() -> None:
    with pytest.raises(NumericalError, check=has_subject("t_release")):
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


def test_histogram_by_two_cells_costs_no_more_than_the_accounted_worst_case() -> None:
    """Taking one from a cell and adding one to another, against moving one cell by 2, which is what is accounted."""
    epsilon = 0.8
    rate = epsilon / 2
    z = np.arange(-300, 301)
    p = np.exp(-rate * np.abs(z))
    p /= p.sum()

    def loss(shift: int) -> np.ndarray:
        return rate * (np.abs(z - shift) - np.abs(z))

    two_cells = (loss(1)[:, None] + loss(-1)).ravel(), (p[:, None] * p).ravel()
    for threshold in np.linspace(0, epsilon, 9):
        real = float((two_cells[1] * np.clip(-np.expm1(threshold - two_cells[0]), 0, None)).sum())
        accounted = float((p * np.clip(-np.expm1(threshold - loss(2)), 0, None)).sum())
        assert real <= accounted + 1e-12
    # with an L1 sensitivity of 1 it would be half of that
    assert float(two_cells[0].max()) == pytest.approx(epsilon)


def test_mechanisms_survive_json() -> None:
    for mechanism in (GaussianMechanism(mu=1.25), DiscreteLaplaceMechanism(epsilon=0.5)):
        assert type(mechanism).model_validate_json(mechanism.model_dump_json()) == mechanism


def moved_pair_epsilon(epsilons: Sequence[float], delta: float) -> float:
    """The exact epsilon of histograms in which one count moves, from the closed form of each cell's loss.

    A cell's loss is ``+-epsilon / 2``, the former with probability ``1 / (1 + exp(-epsilon / 2))``.
    """
    losses = {0.0: 1.0}
    for epsilon in (value for value in epsilons for _ in range(2)):
        up = 1 / (1 + math.exp(-epsilon / 2))
        after: dict[float, float] = {}
        for loss, share in losses.items():
            for moved, chance in ((epsilon / 2, up), (-epsilon / 2, 1 - up)):
                total = round(loss + moved, 9)
                after[total] = after.get(total, 0.0) + share * chance
        losses = after
    return brentq(lambda e: hockey_stick(losses, e) - delta, 0.0, sum(epsilons))


def hockey_stick(losses: Mapping[float, float], epsilon: float) -> float:
    return math.fsum(
        share * -math.expm1(epsilon - loss) for loss, share in losses.items() if loss > epsilon
    )


def test_loss_of_a_moved_count_is_that_of_the_histogram_itself() -> None:
    epsilon = 1.2
    reach = np.arange(-60, 61)
    mass = np.exp(-epsilon / 2 * np.abs(reach))
    before = np.outer(mass, mass) / mass.sum() ** 2  # cells that hold (1, 0) and (0, 1)
    first = before[1:-1, 1:-1]
    second = before[2:, :-2]
    up = 1 / (1 + math.exp(-epsilon / 2))
    losses = {epsilon: up**2, 0.0: 2 * up * (1 - up), -epsilon: (1 - up) ** 2}
    for level in (0.0, 0.3, 0.9, 1.1):
        brute = np.maximum(first - math.exp(level) * second, 0).sum()
        assert hockey_stick(losses, level) == pytest.approx(brute, abs=1e-12)


@pytest.mark.parametrize("epsilons", [(1.0, 1.0), (1.0, 0.5, 0.25), (0.5,) * 8, (2.0, 2.0)])
def test_histograms_cost_no_less_than_their_moved_counts_and_hardly_more(
    epsilons: tuple[float, ...],
) -> None:
    for delta in (1e-6, 1e-5, 1e-3):
        exact = moved_pair_epsilon(epsilons, delta)
        total = total_epsilon(
            [DiscreteLaplaceMechanism(epsilon=epsilon) for epsilon in epsilons], delta
        )
        assert exact * (1 - 1e-12) <= total <= exact * 1.001 + 2e-3


def test_histograms_cost_less_than_as_if_one_cell_moved_by_two() -> None:
    epsilons = (0.5,) * 8
    delta = 1e-5
    one = pld.from_discrete_laplace_mechanism(
        0.25, 2, value_discretization_interval=1e-4, use_connect_dots=True
    )
    by_two = one.self_compose(len(epsilons)).get_epsilon_for_delta(delta)
    saved = (
        1
        - total_epsilon([DiscreteLaplaceMechanism(epsilon=epsilon) for epsilon in epsilons], delta)
        / by_two
    )
    assert 0.01 < saved < 0.2
