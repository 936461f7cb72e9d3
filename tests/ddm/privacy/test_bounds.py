"""How far noise may carry a release: each bound against the law itself, from both sides."""

import math
from itertools import product

import numpy as np
import pytest

from ddm.privacy.bounds import (
    FAILURE,
    cell_noise_bound,
    sketch_norm_bound,
    total_noise_bound,
)
from tests.support.case import case


def law(epsilon: float, reach: int) -> np.ndarray:
    """The probabilities of -reach to reach, all of one sign, so that sums of small ones stay exact."""
    a = math.exp(-epsilon / 2)
    return np.array([(1 - a) / (1 + a) * a ** abs(z) for z in range(-reach, reach + 1)])


def beyond(law_Z: np.ndarray, bound: int) -> float:
    """The probability of a magnitude above `bound`, smallest terms first."""
    centre = len(law_Z) // 2
    return 2 * math.fsum(law_Z[centre + bound + 1 :])


def test_cell_noise_bound_is_the_smallest_that_fails_as_seldom_as_it_says() -> None:
    for epsilon, num_cells in product([0.1, 1.0, 7.3, 60.0], [1, 4, 128]):
        with case(epsilon=epsilon, num_cells=num_cells):
            bound = cell_noise_bound(epsilon, num_cells)
            law_Z = law(epsilon, 2 * bound + 100)
            assert num_cells * beyond(law_Z, bound) <= FAILURE
            assert bound == 0 or num_cells * beyond(law_Z, bound - 1) > FAILURE


def test_total_noise_bound_holds_and_is_not_loose() -> None:
    for epsilon, num_cells in [(1.0, 1), (1.0, 4), (1.0, 32), (0.3, 8), (8.0, 16)]:
        with case(epsilon=epsilon, num_cells=num_cells):
            bound = total_noise_bound(epsilon, num_cells)
            one_Z = law(epsilon, 2 * bound)
            total_Z = one_Z
            for _ in range(num_cells - 1):
                total_Z = np.convolve(total_Z, one_Z)
            assert beyond(total_Z, bound) <= FAILURE
            assert beyond(total_Z, math.floor(0.8 * bound)) > FAILURE


@pytest.mark.parametrize("num_rows", [1, 300, 10**6])
def test_sketch_norm_bound_is_the_closed_form_in_two_dimensions(num_rows: int) -> None:
    """``P(|n| > q) = exp(-q^2 / 2)`` in the plane."""
    q = math.sqrt(2 * math.log(num_rows / FAILURE))
    expected = 0.2 * (1 + math.sqrt(2) * 2.0**-16) + 0.8 / 3.0 * q
    assert sketch_norm_bound(0.2, 0.8, 3.0, 2, num_rows) == pytest.approx(expected, rel=1e-5)
    assert sketch_norm_bound(0.2, 0.8, 3.0, 2, num_rows) > expected
