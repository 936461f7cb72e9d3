import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2, norm

from ddm.errors import NumericalError
from ddm.privacy.noise import discrete_laplace, one_per_unit, rounded_gaussian, shuffled
from tests.support.errors import has_subject

FALSE_ALARM = 1e-7


def _chi_square_fails(
    sample: NDArray[np.int64], edges: NDArray[np.int64], probability: NDArray[np.float64]
) -> bool:
    """Whole numbers clipped into the range of `edges`, against their probabilities."""
    observed = np.array([(np.clip(sample, edges[0], edges[-1]) == edge).sum() for edge in edges])
    expected = probability * len(sample)
    assert expected.min() > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic > chi2.isf(FALSE_ALARM, len(edges) - 1)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_discrete_laplace_noise_has_its_law_and_quartered_noise_is_caught(epsilon: float) -> None:
    num = 4000
    q = math.exp(-epsilon / 2)
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


def test_rounded_gaussian_refuses_noise_whose_low_bits_would_be_missing() -> None:
    widest = 2.0**49
    far = rounded_gaussian((4000,), widest)
    assert np.abs(far).max() < 2**53
    assert {0, 1} == set((far % 2).tolist())  # the lowest bit is still noise
    for std in (widest * 1.01, math.inf, math.nan, -1.0):
        with pytest.raises(NumericalError, check=has_subject("noise")):
            rounded_gaussian((1,), std)


def _chosen_often(unit: NDArray[np.int64], records: list[int], num: int) -> NDArray[np.int64]:
    """How often each of `records` was drawn for its unit."""
    drawn = np.concatenate([one_per_unit(unit, int(unit.max()) + 1) for _ in range(num)])
    return np.array([(drawn == record).sum() for record in records])


def test_one_record_per_unit_is_drawn_uniformly() -> None:
    unit = np.array([2, 0, 1, 0, 2, 0, 0, 0])  # records 1, 3, 5, 6, 7 are unit 0's
    num = 5000
    observed = _chosen_often(unit, [1, 3, 5, 6, 7], num)
    assert observed.sum() == num  # exactly one of them each time
    statistic = float(((observed - num / 5) ** 2 / (num / 5)).sum())
    assert statistic < chi2.isf(FALSE_ALARM, 4)
    # one record twice as likely would have been caught
    skewed = np.array([2, 1, 1, 1, 1]) / 6 * num
    assert float(((skewed - num / 5) ** 2 / (num / 5)).sum()) > 2 * chi2.isf(FALSE_ALARM, 4)
    assert (unit[one_per_unit(unit, 3)] == [0, 1, 2]).all()


def test_shuffle_is_uniform_over_all_orders() -> None:
    num = 6000
    orders, observed = np.unique([shuffled(3) for _ in range(num)], axis=0, return_counts=True)
    assert len(orders) == 6
    assert float(((observed - num / 6) ** 2 / (num / 6)).sum()) < chi2.isf(FALSE_ALARM, 5)
