"""The noise of statistics: integer noise from the operating system's random source, without a seed.

Integer noise leaves no floating-point artefacts from which the exact value could be recovered.
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

# 13 standard deviations stay below 2^53, so that a float64 represents the noise exactly
_MAX_STD = 2.0**49


class Octets(Protocol):
    """A source of random bytes."""

    def octets(self, num: int) -> bytes:
        """Return `num` uniform bytes."""
        ...


class Noise(Octets, Protocol):
    """A source of random bits: `OS_NOISE`, except in tests."""

    def below(self, bound: int) -> int:
        """Return a uniform integer in [0, bound)."""
        ...


class _OsNoise:
    """The operating system's random source."""

    def below(self, bound: int) -> int:
        return secrets.randbelow(bound)

    def octets(self, num: int) -> bytes:
        return secrets.token_bytes(num)


OS_NOISE: Noise = _OsNoise()


def discrete_laplace(num: int, epsilon: float, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Draw `num` integers with ``P(z) ~ exp(-epsilon |z| / 2)``, exactly: no floating point touches them.

    It is the difference of two geometric variables; `epsilon` is taken as the exact rational number of the float.

    Source:
        Canonne, Kamath and Steinke 2020, Algorithms 1 and 2.
    """
    rate = Fraction(epsilon) / COUNTS_SENSITIVITY
    draws = []
    for _ in range(num):
        upwards = _geometric(rate, noise)
        downwards = _geometric(rate, noise)
        draws.append(upwards - downwards)
    return np.array(draws, dtype=np.int64)


def _geometric(rate: Fraction, noise: Noise) -> int:
    """Draw from P(n) ~ exp(-rate n), n >= 0, in integers alone: the names are those of Algorithm 2."""
    s = rate.numerator
    t = rate.denominator
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


def rounded_gaussian(
    shape: tuple[int, ...],
    std: float,
    noise: Octets = OS_NOISE,
) -> NDArray[np.int64]:
    """Draw Gaussian noise of standard deviation `std`, rounded to whole numbers.

    Added to integers it is the Gaussian mechanism followed by rounding, so the low bits of a floating-point sum reveal
    nothing. The inverse CDF of 128 random bits and a sign has a relative precision of 2^-53 out to 13 deviations.

    Raises:
        NumericalError: `std` is negative, not finite, or so large that the low bits of the noise would be missing.

    Source:
        Mironov 2012, for the attack on floating-point noise that this prevents.
    """
    if not 0 <= std <= _MAX_STD:
        raise NumericalError(
            "noise",
            expected=f"a standard deviation of 0 to {_MAX_STD:g} grid steps",
            got=f"{std:g}",
        )
    num = math.prod(shape)
    # One byte for the sign and 16 for the tail of each number.
    octets = np.frombuffer(noise.octets(17 * num), dtype=np.uint8)
    sign = np.where(octets[:num] & 1, 1.0, -1.0)
    words = octets[num:].view(np.uint64).reshape(2, num)
    high, low = words.astype(np.float64)
    # 128 bits below the point, halved: in (0, 1/2]. The half keeps it above 0, where the inverse is infinite.
    fraction = high + (low + 0.5) * 2.0**-64
    tail = fraction * 2.0**-65
    magnitude = np.abs(ndtri(tail))
    whole = np.rint(sign * magnitude * std)
    return np.asarray(whole, dtype=np.int64).reshape(shape)


def one_per_unit(
    unit_N: NDArray[np.int64],
    num_units: int,
    noise: Noise = OS_NOISE,
) -> NDArray[np.int64]:
    """Draw one record of each unit uniformly; return their indices, in the order of units.

    Args:
        unit_N: each record's unit; each of 0 to num_units - 1 occurs.
        num_units: number of units.
        noise: the random source; 128 bits per record.
    """
    order_N = _shuffled_within(unit_N, noise)
    # The first record of each unit in a random order of its records.
    first_U = np.searchsorted(unit_N[order_N], np.arange(num_units))
    return order_N[first_U]


def shuffled(num: int, noise: Noise = OS_NOISE) -> NDArray[np.int64]:
    """Return a uniformly random permutation of `num` indices."""
    one_key_N = np.zeros(num, dtype=np.int64)
    return _shuffled_within(one_key_N, noise)


def _shuffled_within(key_N: NDArray[np.int64], noise: Noise) -> NDArray[np.int64]:
    """Return an order by key, uniform among equal keys: they are sorted by 128 random bits each."""
    octets = noise.octets(16 * len(key_N))
    low_N, high_N = np.frombuffer(octets, dtype=np.uint64).reshape(2, -1)
    # The last key of lexsort decides first.
    order_N = np.lexsort((low_N, high_N, key_N))
    return np.asarray(order_N, dtype=np.int64)
