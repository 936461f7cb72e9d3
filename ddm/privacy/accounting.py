"""Privacy accounting: the cost of statistics, alone and composed, and the noise that a budget requires.

Neighbouring data sets are related by replace-one: one unit's record is replaced, and the number of units is public.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from scipy.special import log_ndtr

from ddm.errors import NumericalError
from ddm.protocol.base import Epsilon, Model
from ddm.protocol.weight_privacy import MAX_NOISE_MULTIPLIER, DpSgdMechanism

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    from ddm.diffusion.path import Path

GRID = 2.0**-16
# Replacing a unit takes one from a cell and adds one to another.
COUNTS_SENSITIVITY = 2
_MIN_MU = 1e-9
_MAX_MU = 200.0
# A privacy loss distribution's cells up to about its epsilon; finer than 1e-4 is never needed.
_CELLS = 20_000
_FINEST_CELL = 1e-4
# Beyond it exp(epsilon) leaves the range of floating point within dp-accounting.
_MAX_COMPOSED = 300.0
# A step's privacy loss has about the standard deviation of the rate over the noise multiplier.
_COARSE = 0.01
_MIN_NOISE = 0.25
_NOISE_GRID = 1024
# A public grid for t_release, so that a decimal in a document represents it exactly.
_T_STEP = 2.0**-20


class GaussianMechanism(Model):
    """Gaussian noise; `mu` is the L2 sensitivity over the noise's standard deviation."""

    kind: Literal["gaussian"] = "gaussian"
    mu: Annotated[float, Field(gt=0.0, le=_MAX_MU)]


class DiscreteLaplaceMechanism(Model):
    """Noise ``P(z) ~ exp(-epsilon |z| / 2)`` on each cell of a histogram, whose L1 sensitivity is 2."""

    kind: Literal["discrete_laplace"] = "discrete_laplace"
    epsilon: Epsilon


Mechanism = GaussianMechanism | DiscreteLaplaceMechanism | DpSgdMechanism


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the smallest delta of a Gaussian mechanism at `epsilon`.

    ``Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)``

    Source:
        Balle and Wang 2018, Theorem 8, with mu = sensitivity / standard deviation.
    """
    inner = float(log_ndtr(mu / 2 - epsilon / mu))
    outer = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    # exp(inner) - exp(outer), written so that equal leading digits do not cancel. Rounding may put outer above inner.
    log_ratio = min(0.0, outer - inner)
    return max(0.0, -math.exp(inner) * math.expm1(log_ratio))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta) private.

    Raises:
        NumericalError: epsilon or delta outside the range that a Gaussian mechanism can meet.
    """
    got = f"epsilon {epsilon:g} and delta {delta:g}"
    if not (epsilon > 0 and 0 < delta < 1):
        raise NumericalError(
            "Gaussian mechanism", expected="epsilon > 0 and 0 < delta < 1", got=got
        )
    smallest_delta = gaussian_delta(_MIN_MU, epsilon)
    largest_delta = gaussian_delta(_MAX_MU, epsilon)
    if not smallest_delta <= delta < largest_delta:
        expected = f"epsilon and delta that a mu of {_MIN_MU:g} to {_MAX_MU:g} meets"
        raise NumericalError("Gaussian mechanism", expected=expected, got=got)

    def excess(mu: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    mu = _root(excess, _MIN_MU, _MAX_MU, xtol=1e-13, rtol=1e-12)
    # The root may be above by rounding.
    while excess(mu) > 0:
        mu *= 1 - 1e-12
    return mu


Curve = Callable[[float], float]  # maps delta to an epsilon, non-increasing


def total_epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """Return an upper bound on the epsilon of all mechanisms together, at `delta`.

    It holds for mechanisms that were all chosen before any of them was drawn; see `adaptive_epsilon` for others.
    """
    return privacy_curve(mechanisms)(delta)


def privacy_curve(mechanisms: Iterable[Mechanism]) -> Curve:
    """Return an upper bound on the epsilon of all mechanisms together, as a non-increasing function of delta.

    The privacy loss distributions are composed pessimistically. Basic composition, with the Gaussians first composed
    exactly (their ``mu^2`` add up), is a second upper bound. The smaller of the two is returned, so that a single
    pure-DP statistic costs exactly its epsilon, without a discretisation error.
    """
    listed = list(mechanisms)
    laplace = [one.epsilon for one in listed if isinstance(one, DiscreteLaplaceMechanism)]
    laplace.sort()
    squares = [one.mu**2 for one in listed if isinstance(one, GaussianMechanism)]
    mu = math.sqrt(math.fsum(squares))
    trained = [one for one in listed if isinstance(one, DpSgdMechanism)]
    trained.sort(key=lambda mechanism: mechanism.model_dump_json())
    num_gaussians = int(mu > 0)
    # Of delta, which histograms do not need.
    num_shares = max(1, num_gaussians + len(trained))

    def basic(delta: float) -> float:
        share = delta / num_shares
        epsilons = [*laplace, _gaussian_epsilon(mu, share)]
        epsilons += [_dp_sgd_epsilon(mechanism, share) for mechanism in trained]
        return math.fsum(epsilons)

    is_single = len(laplace) + num_gaussians + len(trained) <= 1
    exceeds_range = math.fsum(laplace) > _MAX_COMPOSED
    if trained and _mean_loss(mu) > _MAX_COMPOSED:
        exceeds_range = True
    if is_single or exceeds_range:
        return basic
    composed = _composed_loss(tuple(laplace), mu, tuple(trained))

    def curve(delta: float) -> float:
        by_basic_composition = basic(delta)
        if delta <= 0:
            return by_basic_composition
        by_loss = float(composed.get_epsilon_for_delta(delta))
        return min(by_basic_composition, by_loss)

    return curve


def adaptive_epsilon(steps: Iterable[Sequence[Mechanism]], delta: float) -> float:
    """Return an upper bound on the epsilon of all steps together where each was chosen adaptively, after those before.

    It is a privacy filter: as long as this bound, computed before each step is drawn, never exceeds a budget fixed in
    advance, everything drawn is private at that budget, and the sequence may stop at any time. The mechanisms of one
    step are fixed before any of them is drawn, and composed as in `total_epsilon`.

    Args:
        steps: the mechanisms of each step, in the order in which the steps began.
        delta: of the budget.

    Source:
        Proved in docs/adr/0007-a-ledger-for-adaptive-plans.md.
    """
    listed = [tuple(step) for step in steps]
    curves = {step: privacy_curve(step) for step in set(listed)}
    return filter_epsilon([curves[step] for step in listed], delta)


def filter_epsilon(curves: Sequence[Curve], delta: float) -> float:
    """Add up the steps' epsilons, step j at the share ``1 / (j (j + 1))`` of delta, the last one at ``1 / j``."""
    last = len(curves)
    epsilons = []
    for j, curve in enumerate(curves, start=1):
        # The shares of all steps sum to delta: 1 / (j (j + 1)) = 1 / j - 1 / (j + 1), and the last one takes the rest.
        divisor = j * (j + 1)
        if j == last:
            divisor = j
        epsilons.append(curve(delta / divisor))
    return math.fsum(epsilons)


def gaussian_mu_within(total_epsilon: float, delta: float, counts_epsilon: float) -> float:
    """Return the largest mu that stays within a total together with counts of `counts_epsilon`, to a precision of 1e-6.

    Raises:
        NumericalError: the counts alone exceed the total.
    """
    counts = DiscreteLaplaceMechanism(epsilon=counts_epsilon)

    def epsilon_excess(mu: float) -> float:
        curve = privacy_curve([counts, GaussianMechanism(mu=mu)])
        return curve(delta) - total_epsilon

    if epsilon_excess(_MIN_MU) > 0:
        expected = f"a total epsilon above {counts_epsilon:g}, which the counts cost"
        raise NumericalError("Gaussian mechanism", expected=expected, got=f"{total_epsilon:g}")
    high = gaussian_mu(total_epsilon, delta)
    low = _MIN_MU
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if epsilon_excess(middle) > 0:
            high = middle
        else:
            low = middle
    return low


# A silo computes the cost of the same plan before every draw.
@lru_cache(maxsize=8)
def _composed_loss(
    laplace: tuple[float, ...],
    mu: float,
    trained: tuple[DpSgdMechanism, ...] = (),
) -> "PrivacyLossDistribution":
    """Compose histograms and a Gaussian on a grid that does not depend on delta, so that the curve is monotone.

    Replacing a unit lowers one cell of a histogram by one and raises another one, or changes nothing. The noise of
    cells is independent, and that of a rise is distributed as that of a fall: so a histogram is two mechanisms of
    sensitivity 1, which compose to less than one of sensitivity 2.
    """
    # It takes seconds to import, and sampling does not need it.
    from dp_accounting.pld import privacy_loss_distribution as pld

    largest_loss = math.fsum(laplace) + _mean_loss(mu)
    step = max(_FINEST_CELL, largest_loss / _CELLS)
    if trained:
        # Its steps add up their discretisation errors.
        step = min(_dp_sgd_interval(mechanism) for mechanism in trained)
    parts = []
    for epsilon in sorted(set(laplace)):
        one = pld.from_discrete_laplace_mechanism(
            epsilon / COUNTS_SENSITIVITY,
            1,
            value_discretization_interval=step,
            use_connect_dots=True,
        )
        # Two mechanisms for each histogram: one for the cell that falls, one for that which rises.
        num_mechanisms = 2 * laplace.count(epsilon)
        parts.append(one.self_compose(num_mechanisms))
    if mu > 0:
        gaussian = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=step)
        parts.append(gaussian)
    parts += [_dp_sgd_loss(mechanism, step) for mechanism in trained]
    return reduce(lambda left, right: left.compose(right), parts)


def _mean_loss(mu: float) -> float:
    """Return about the largest privacy loss of a Gaussian mechanism that matters."""
    return mu * (mu / 2 + 6)


@lru_cache(maxsize=8)
def _dp_sgd_loss(mechanism: DpSgdMechanism, interval: float) -> "PrivacyLossDistribution":
    """Compose the steps of private training, under replace-one.

    With x among its units a step's sum of clipped gradients, over the clip norm, is ``N(0, s^2)`` plus, with
    probability q, a vector g of norm at most 1; with x' in its place, plus a vector g'. The pair
    ``(1-q) N(0, s^2) + q N(1, s^2)`` and ``(1-q) N(0, s^2) + q N(-1, s^2)`` on the line dominates it, which is how
    dp-accounting reads REPLACE_ONE; one of add-or-remove, whose epsilon is about half, would not. The proof is in
    docs/adr/0056-private-training-hides-one-unit-for-another.md.

    Source:
        Balle, Barthe and Gaboardi 2018, Theorem 2 (advanced joint convexity); Choquette-Choo et al. 2024, arXiv
        2310.15526, on mixtures of Gaussians; Zhu, Dong and Wang 2022, on dominating pairs under composition.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        mechanism.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=mechanism.rate,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    return one.self_compose(mechanism.steps)


def _dp_sgd_interval(mechanism: DpSgdMechanism) -> float:
    """Return cells of the privacy loss that are fine beside the loss of one step; the bound holds with any."""
    if mechanism.rate >= _COARSE * mechanism.noise_multiplier:
        return 1e-3
    return 1e-4


def _dp_sgd_epsilon(mechanism: DpSgdMechanism, delta: float) -> float:
    if delta <= 0:
        return math.inf
    loss = _dp_sgd_loss(mechanism, _dp_sgd_interval(mechanism))
    return float(loss.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def noise_multiplier_for(
    epsilon: float,
    delta: float,
    rate: float,
    steps: int,
) -> float:
    """Return the least noise multiplier, to 1/1024, with which private training is (epsilon, delta) private.

    Raises:
        NumericalError: no noise multiplier up to 2^14 is enough.
    """

    def epsilon_excess(multiplier: float, *, coarse: bool = True) -> float:
        """Return how far the epsilon of this noise is above the wanted one, on a logarithmic scale."""
        # About its mean loss, of which a distribution would fill the memory.
        mean_loss = 2 * steps * (rate / multiplier) ** 2
        if mean_loss > _MAX_COMPOSED + 4 * epsilon:
            return math.inf
        mechanism = DpSgdMechanism(noise_multiplier=multiplier, rate=rate, steps=steps)
        interval = 1e-3
        if not coarse:
            interval = _dp_sgd_interval(mechanism)
        loss = _dp_sgd_loss(mechanism, interval)
        cost = float(loss.get_epsilon_for_delta(delta))
        # Finite, as the root finder needs it.
        return math.log(min(cost, 1e6) + 1e-9) - math.log(epsilon)

    # Bracket the root by doubling and halving, since each evaluation takes long.
    low = high = 1.0
    while epsilon_excess(low) <= 0 and low > _MIN_NOISE:
        high = low
        low = low / 2
    while epsilon_excess(high) > 0:
        low = high
        high = 2 * high
        if high > MAX_NOISE_MULTIPLIER:
            expected = (
                f"an epsilon that a noise multiplier of at most {MAX_NOISE_MULTIPLIER:g} reaches"
            )
            got = f"epsilon {epsilon:g} and delta {delta:g} for {steps} steps at rate {rate:.4g}"
            remedy = "Ask for fewer steps, fewer units per step, or a higher epsilon."
            raise NumericalError("private training", expected=expected, got=got, remedy=remedy)
    # The root finder needs finite values at both ends.
    while epsilon_excess(low) == math.inf and high - low > 1 / _NOISE_GRID:
        middle = (low + high) / 2
        if epsilon_excess(middle) <= 0:
            high = middle
        else:
            low = middle
    multiplier = high
    if epsilon_excess(low) <= 0:
        multiplier = low
    elif epsilon_excess(low) < math.inf:
        multiplier = _root(epsilon_excess, low, high, xtol=5e-4, rtol=1e-4)
    cells = math.ceil(multiplier * _NOISE_GRID)
    # The root may be below by its tolerance, and the coarse distribution states another epsilon than the fine one.
    while epsilon_excess(cells / _NOISE_GRID, coarse=False) > 0:
        cells += 1
    return cells / _NOISE_GRID


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon of a Gaussian mechanism at `delta`."""
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if delta == 0:
        return math.inf
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2

    def excess(epsilon: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    epsilon = _root(excess, 0.0, high, xtol=1e-13, rtol=1e-12)
    # Above the root, which may be too low by its tolerance.
    return float(epsilon * (1 + 1e-12))


def sketch_sensitivity(rank: int) -> float:
    """Return the L2 sensitivity of one unit-ball sketch rounded to `GRID`, under replace-one."""
    return 2.0 + math.sqrt(rank) * GRID


def _root(
    function: Callable[[float], float],
    low: float,
    high: float,
    **tolerances: float,
) -> float:
    """Return where a function is 0 between two arguments at which its signs differ."""
    from scipy.optimize import brentq  # takes half a second, and most commands need none

    return float(brentq(function, low, high, **tolerances))


def t_release(
    mu: float,
    scale_C: float,
    path: "Path",
    rank: int,
) -> float:
    """Return the noise level at which one sketch per unit is a Gaussian mechanism of at most `mu`.

    ``mu = sensitivity * C * alpha_r / sigma_r``; rounded up to a multiple of 2^-20, which only adds noise.

    Args:
        mu: the budget of the statistic.
        scale_C: the sketch's scale, in data units.
        path: the probability path.
        rank: dimensions of the sketch.

    Raises:
        NumericalError: the statistic would be pure noise.
    """
    import torch  # takes seconds, and anybody who has a path has it already

    def ratio(t: float) -> float:
        time = torch.tensor(t, dtype=torch.float64)
        alpha = path.alpha(time)
        sigma = path.sigma(time)
        return float(alpha / sigma)

    target = mu / (sketch_sensitivity(rank) * scale_C)
    t = _root(lambda u: ratio(u) - target, 1e-12, 1.0, xtol=1e-14)
    t = math.ceil(t / _T_STEP) * _T_STEP
    while ratio(t) > target:
        t += _T_STEP
    if t >= 1.0:
        remedy = "Raise the epsilon or the delta of the sketches."
        raise NumericalError(
            "t_release",
            expected="below 1",
            got="1, at which sketches are pure noise",
            remedy=remedy,
        )
    return t
