"""Refits a silo's shares of the public groups to its noised histogram and its noised sketches together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddm.routers.counts import CountsRouter

# Shape legend: K silos, G public groups, N sketches of one silo, r dimensions of the silos' sketches.

_EM_STEPS = 500
_EM_TOLERANCE = 1e-10


def refit_shares(
    counts_router: CountsRouter,
    sketches: Sequence[Tensor],
    t_release: float,
) -> CountsRouter:
    """Return the mixture whose shares are the maximum a posteriori given counts and sketches, by EM.

    The silos' sketches may have fewer dimensions than the router; the shares are fitted in these and used in all. The
    counts enter as a Gamma prior on each count with its posterior mean and variance. In log space its mode is the
    counts router itself, the result without any sketches.

    Args:
        counts_router: the shares estimated from the counts, with errors.
        sketches: noised sketches (N, r) at `t_release`, one tensor per silo.
        t_release: noise level of the sketches.
    """
    rows = []
    narrow = counts_router.head(sketches[0].shape[1])
    for log_mass_G, error_G, s_NR in zip(
        counts_router.log_mass_KG, counts_router.error_KG, sketches, strict=True
    ):
        at_N = torch.full((len(s_NR),), t_release, dtype=torch.float64)
        log_NG = narrow.group_log_density(s_NR.double(), at_N)
        # A sketch's densities count relative to each other, so that the largest may be 1.
        largest_N1 = log_NG.amax(1, keepdim=True)
        density_NG = (log_NG - largest_N1).exp()
        mass_G = _em(log_mass_G.exp(), error_G, density_NG)
        rows.append(mass_G)
    mass_KG = torch.stack(rows)
    return CountsRouter(
        counts_router.sketch,
        mass_KG.log(),
        counts_router.path,
        counts_router.error_KG,
    )


def _em(mass_G: Tensor, error_G: Tensor, density_NG: Tensor) -> Tensor:
    """Maximise ``sum_i log sum_c mass_c density_ic + sum_c shape_c log mass_c - rate_c mass_c`` on the simplex."""
    # Exact counts have an error of 0, which would make the prior infinitely sharp.
    error_G = error_G.clamp(min=1e-9)
    # Of the Gamma prior whose mean is the mass and whose deviation is its error; the rate is per unit of mass.
    shape_G = (mass_G / error_G).square()
    rate_G = mass_G / error_G.square()
    for _ in range(_EM_STEPS):
        joint_NG = mass_G * density_NG
        # E step: the expected number of sketches from each group. In log space the mode of a Gamma prior adds its whole
        # shape, not the shape less 1.
        posterior_NG = joint_NG / joint_NG.sum(1, keepdim=True)
        expected_G = posterior_NG.sum(0) + shape_G
        # M step.
        new_G = _on_simplex(expected_G, rate_G)
        change = float((new_G - mass_G).abs().sum())
        mass_G = new_G
        if change < _EM_TOLERANCE:
            break
    return mass_G


def _on_simplex(expected_G: Tensor, rate_G: Tensor) -> Tensor:
    """Return ``expected / (lambda + rate)`` with the lambda that makes it sum to 1, by bisection."""
    # At the lower end a single entry is already at least 1.
    low = float((expected_G - rate_G).max())
    # At the upper end every denominator is at least the sum of all numerators, so that the entries sum to at most 1.
    high = float(expected_G.sum() - rate_G.min())
    for _ in range(200):
        middle = (low + high) / 2
        total = float((expected_G / (middle + rate_G)).sum())
        if total > 1:
            low = middle
        else:
            high = middle
    mass_G = expected_G / (high + rate_G)
    return mass_G / mass_G.sum()
