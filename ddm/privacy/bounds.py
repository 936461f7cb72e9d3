"""Bounds statistics by what honest noise can reach; a silo beyond them did not draw what the plan says.

For an honest silo each bound fails with a probability of at most `FAILURE` over a whole file, so a silo refused by one
has made a mistake or is dishonest. The bounds limit one silo's influence on the router; they do not prove that noise
was drawn.
"""

import math

import numpy as np
from scipy.special import gammainccinv

from ddm.privacy.accounting import COUNTS_SENSITIVITY, GRID

FAILURE = 1e-12
_ROUNDING = 1 + 1e-6  # of float32 values
_NUM_RATES = 512


def cell_noise_bound(epsilon: float, num_cells: int) -> int:
    """Return B such that no cell's noise exceeds B in magnitude.

    ``P(|z| > B) = 2 a^(B + 1) / (1 + a)`` with ``a = exp(-epsilon / 2)``, times the number of cells. A silo of n_k
    units thus releases counts within [-B, n_k + B].

    Args:
        epsilon: the epsilon of the histogram, under replace-one.
        num_cells: G.
    """
    rate = epsilon / COUNTS_SENSITIVITY
    log_tail = math.log(2 * num_cells / FAILURE) - math.log1p(math.exp(-rate))
    return max(0, math.ceil(log_tail / rate) - 1)


def total_noise_bound(epsilon: float, num_cells: int) -> int:
    """Return B such that the sum of all cells' noise exceeds B in magnitude with probability at most `FAILURE`.

    Chernoff: ``P(|sum z| >= b) <= 2 M(l)^G exp(-l b)`` for every rate l in (0, epsilon / 2), with the moment generating
    function ``M(l) = (1 - a)^2 / ((1 - a e^l) (1 - a e^-l))``; the best of many rates is taken.

    Args:
        epsilon: the epsilon of the histogram, under replace-one.
        num_cells: G.
    """
    rate = epsilon / COUNTS_SENSITIVITY
    l_L = rate * (np.arange(_NUM_RATES) + 0.5) / _NUM_RATES
    # log(1 - exp(x)) is written log(-expm1(x)), which is exact near x = 0.
    log_numerator = 2 * np.log(-np.expm1(-rate))
    log_above_L = np.log(-np.expm1(l_L - rate))
    log_below_L = np.log(-np.expm1(-l_L - rate))
    log_m_L = log_numerator - log_above_L - log_below_L
    # The b at which the bound is `FAILURE`.
    bound_L = (num_cells * log_m_L + math.log(2 / FAILURE)) / l_L
    return math.ceil(float(bound_L.min()))


def sketch_norm_bound(
    alpha: float,
    sigma: float,
    scale_C: float,
    rank: int,
    num_rows: int,
) -> float:
    """Return the largest norm of a row ``alpha s_0 + (sigma / C) n`` with s_0 in the unit ball and n standard normal.

    ``alpha (1 + sqrt(R) grid) + (sigma / C) q``, where the norm of n exceeds q in none of the rows: its square is chi
    squared with R degrees of freedom.

    Args:
        alpha: of the path at t_release.
        sigma: the sigma of the path at t_release.
        scale_C: the sketch's scale, in data units.
        rank: R.
        num_rows: n_k.
    """
    q = _chi(rank, FAILURE / num_rows)
    signal = alpha * (1 + math.sqrt(rank) * GRID)
    noise = sigma / scale_C * q
    return (signal + noise) * _ROUNDING


def _chi(degrees: int, failure: float) -> float:
    """Return q such that the norm of that many standard normals exceeds q with probability `failure`."""
    return math.sqrt(2 * float(gammainccinv(degrees / 2, failure)))
