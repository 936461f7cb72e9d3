"""Where does the noise of a statistic come from, and how is it drawn so that it hides what it is added to?

Noise is drawn from the operating system's randomness, as whole numbers; no seed reaches this file.
"""

import math
import secrets
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from ddm.errors import NumericalError
from ddm.privacy.accounting import COUNTS_SENSITIVITY

_MAX_STD = 2.0**49  # 13 deviations stay below 2^53, so that a float64 holds every whole number of the noise exactly


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

    Raises:
        NumericalError: noise so wide that its own low bits would be missing.

    Source:
        Mironov 2012 shows the attack on floating-point noise that integers close.
    """
    if not 0 <= std <= _MAX_STD:
        raise NumericalError("noise", expected=f"a deviation of at most {_MAX_STD:g} grid steps", got="more")
    num = math.prod(shape)
    bits = np.frombuffer(noise.octets(17 * num), dtype=np.uint8)
    sign = np.where(bits[:num] & 1, 1.0, -1.0)
    high, low = bits[num:].view(np.uint64).reshape(2, num).astype(np.float64)
    tail = (high + (low + 0.5) * 2.0**-64) * 2.0**-65  # in (0, 1/2]
    whole = np.rint(sign * np.abs(ndtri(tail)) * std)
    return np.asarray(whole, dtype=np.int64).reshape(shape)


def one_per_unit(unit_N: NDArray[np.int64], num_units: int, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Draw one record of each unit uniformly; return their indices, by unit.

    Args:
        unit_N: each record's unit, every one of 0 to num_units - 1 among them.
        num_units: how many there are.
        noise: where the choice comes from; 128 bits for each record.
    """
    order_N = _shuffled_within(unit_N, noise)
    return order_N[np.searchsorted(unit_N[order_N], np.arange(num_units))]


def shuffled(num: int, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Return a uniform random order of `num` things."""
    return _shuffled_within(np.zeros(num, dtype=np.int64), noise)


def _shuffled_within(key_N: NDArray[np.int64], noise: Noise) -> NDArray[np.int64]:
    """Return an order by key, uniform among equal keys: they are sorted by 128 random bits each."""
    low_N, high_N = np.frombuffer(noise.octets(16 * len(key_N)), dtype=np.uint64).reshape(2, -1)
    return np.asarray(np.lexsort((low_N, high_N, key_N)), dtype=np.int64)
