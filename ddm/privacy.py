"""What does a release cost, how much noise does it need, and where does the noise come from?

Everything is under the replace-one relation: one unit's record is exchanged for another, the number of units is public.
Noise is drawn from the operating system's randomness; no seed reaches this file.
"""

import math
import secrets
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from ddm.errors import NumericalError
from ddm.protocol.base import Epsilon, Model
from ddm.schedule import Path

GRID = 2.0**-16
COUNTS_SENSITIVITY = 2  # replacing a unit takes one from a cell and adds one to another
_MAX_MU = 200.0
_CELLS = 20_000  # a privacy loss distribution's cells per basic-composition epsilon; finer than 1e-4 is never needed
_T_STEP = 2.0**-20  # a public grid for t_release, so that a document's decimal names it exactly


class GaussianMechanism(Model):
    """Gaussian noise; `mu` is the L2 sensitivity over the noise's standard deviation."""

    kind: Literal["gaussian"] = "gaussian"
    mu: Annotated[float, Field(gt=0.0, le=_MAX_MU)]


class DiscreteLaplaceMechanism(Model):
    """Noise ``P(z) ~ exp(-epsilon |z| / 2)`` on each cell of a histogram, whose L1 sensitivity is 2."""

    kind: Literal["discrete_laplace"] = "discrete_laplace"
    epsilon: Epsilon


Mechanism = GaussianMechanism | DiscreteLaplaceMechanism


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the smallest delta of a Gaussian mechanism at `epsilon`.

    ``Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)``

    Source:
        Balle and Wang 2018, Theorem 8, with mu = sensitivity / standard deviation.
    """
    inner = float(log_ndtr(mu / 2 - epsilon / mu))
    outer = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, -math.exp(inner) * math.expm1(min(0.0, outer - inner)))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta) private.

    Raises:
        NumericalError: epsilon or delta outside the range that a Gaussian mechanism can meet.
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise NumericalError("Gaussian mechanism", expected="epsilon > 0 and 0 < delta < 1", got="others")
    if gaussian_delta(_MAX_MU, epsilon) <= delta:
        raise NumericalError("Gaussian mechanism", expected=f"a mu of at most {_MAX_MU:g}", got="more")
    mu = float(brentq(lambda m: gaussian_delta(m, epsilon) - delta, 1e-9, _MAX_MU, xtol=1e-13, rtol=1e-12))
    while gaussian_delta(mu, epsilon) > delta:  # the root may lie a rounding above
        mu *= 1 - 1e-12
    return mu


def total_epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """Return an upper bound on the epsilon of all mechanisms together, at `delta`.

    It holds for parameters that were not chosen from earlier outputs. The privacy loss distributions are composed
    pessimistically. Basic composition, with the Gaussians first composed exactly (``mu^2`` adds), is a second upper
    bound; the smaller of the two is returned, so that a pure release costs exactly its epsilon and no discretisation
    step more.
    """
    listed = list(mechanisms)
    if not listed:
        return 0.0
    laplace = [m.epsilon for m in listed if isinstance(m, DiscreteLaplaceMechanism)]
    mu = math.sqrt(math.fsum(m.mu**2 for m in listed if isinstance(m, GaussianMechanism)))
    basic = math.fsum(laplace) + _gaussian_epsilon(mu, delta)
    if math.isinf(basic) or delta == 0.0 or len(laplace) + (mu > 0) == 1:
        return basic
    from dp_accounting.pld import privacy_loss_distribution as pld  # takes seconds, and samplers never need it

    step = max(1e-4, basic / _CELLS)
    parts = []
    for epsilon in sorted(set(laplace)):
        one = pld.from_discrete_laplace_mechanism(
            epsilon / COUNTS_SENSITIVITY,
            COUNTS_SENSITIVITY,
            value_discretization_interval=step,
            use_connect_dots=True,
        )
        parts.append(one.self_compose(laplace.count(epsilon)))
    if mu > 0:
        parts.append(pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=step))
    composed = parts[0]
    for part in parts[1:]:
        composed = composed.compose(part)
    return min(basic, float(composed.get_epsilon_for_delta(delta)))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon of a Gaussian mechanism at `delta`."""
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if delta == 0:
        return math.inf
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    epsilon = float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, high, xtol=1e-13, rtol=1e-12))
    return float(epsilon * (1 + 1e-12))


def sketch_sensitivity(rank: int) -> float:
    """Return the L2 sensitivity of one unit-ball sketch rounded to `GRID`, under replace-one."""
    return 2.0 + math.sqrt(rank) * GRID


def t_release(mu: float, scale_C: float, path: Path, rank: int) -> float:
    """Return the noise level at which one sketch per unit is a Gaussian mechanism of at most `mu`.

    ``mu = sensitivity * C * alpha_r / sigma_r``; rounded up to a multiple of 2^-20, which only adds noise.

    Args:
        mu: what the release may cost.
        scale_C: the sketch's scale, in data units.
        path: the probability path.
        rank: dimensions of the sketch.

    Raises:
        NumericalError: the release would be noise alone.
    """

    def ratio(t: float) -> float:
        at = torch.tensor(t, dtype=torch.float64)
        found: float = (path.alpha(at) / path.sigma(at)).item()
        return found

    target = mu / (sketch_sensitivity(rank) * scale_C)
    t = float(brentq(lambda u: ratio(u) - target, 1e-12, 1.0, xtol=1e-14))
    t = math.ceil(t / _T_STEP) * _T_STEP
    while ratio(t) > target:
        t += _T_STEP
    if t >= 1.0:
        raise NumericalError("t_release", expected="below 1", got="1: the sketches would be noise alone")
    return t


class Noise(Protocol):
    """A source of random bits; tests hand in one that refuses, everything else uses `OS_NOISE`."""

    def below(self, bound: int) -> int:
        """Return a uniform integer in [0, bound)."""
        ...

    def octets(self, num: int) -> bytes:
        """Return `num` uniform bytes."""
        ...


class _OsNoise:
    """The operating system's random numbers."""

    def below(self, bound: int) -> int:
        return secrets.randbelow(bound)

    def octets(self, num: int) -> bytes:
        return secrets.token_bytes(num)


OS_NOISE: Noise = _OsNoise()


def discrete_laplace(num: int, epsilon: float, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Draw `num` integers with ``P(z) ~ exp(-epsilon |z| / 2)``, exactly: no floating point touches them.

    The difference of two geometric variables; `epsilon` counts as the rational number that the float is.

    Source:
        Canonne, Kamath and Steinke 2020, Algorithms 1 and 2.
    """
    rate = Fraction(epsilon) / COUNTS_SENSITIVITY
    return np.array([_geometric(rate, noise) - _geometric(rate, noise) for _ in range(num)], dtype=np.int64)


def _geometric(rate: Fraction, noise: Noise) -> int:
    """Draw from P(n) ~ exp(-rate n), n >= 0."""
    s, t = rate.numerator, rate.denominator
    u = noise.below(t)
    while not _bernoulli_exp(u, t, noise):
        u = noise.below(t)
    wholes = 0
    while _bernoulli_exp(1, 1, noise):
        wholes += 1
    return (u + t * wholes) // s


def _bernoulli_exp(numerator: int, denominator: int, noise: Noise) -> bool:
    """Return True with probability exp(-numerator / denominator), for a fraction in [0, 1]."""
    k = 1
    while noise.below(denominator * k) < numerator:
        k += 1
    return k % 2 == 1


def rounded_gaussian(shape: tuple[int, ...], std: float, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Draw Gaussian noise of standard deviation `std`, rounded to whole numbers.

    Added to integers it is the Gaussian mechanism followed by rounding, so the low bits of a floating-point sum cannot
    betray the secret. Inverse CDF of 128 random bits and a sign: relative precision 2^-53 out to 13 deviations.

    Source:
        Mironov 2012 shows the attack on floating-point noise that integers close.
    """
    num = math.prod(shape)
    bits = np.frombuffer(noise.octets(17 * num), dtype=np.uint8)
    sign = np.where(bits[:num] & 1, 1.0, -1.0)
    high, low = bits[num:].view(np.uint64).reshape(2, num).astype(np.float64)
    tail = (high + (low + 0.5) * 2.0**-64) * 2.0**-65  # in (0, 1/2]
    whole = np.rint(sign * np.abs(ndtri(tail)) * std)
    return np.asarray(whole, dtype=np.int64).reshape(shape)
