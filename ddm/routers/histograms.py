"""True counts behind noised histograms: posterior means, with priors from public shares and from like groups."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaln, gammaln, logsumexp, softmax
from torch import Tensor

from ddm.errors import NumericalError
from ddm.routers.gaussians import blocks

# Shape legend: K silos, G public groups, R dimensions, A concentrations, N possible counts.

# From 0.1, where the prior leaves a silo's shares open, to 10,000, where it nearly fixes them at the public ones.
_CONCENTRATIONS = np.logspace(-1, 4, 21)
_WIDTHS = (0.35, 0.5, 0.7, 1.0, 1.4)  # of likeness, in distances to the nearest group
_NEGLIGIBLE = 40.0  # noise more than this many e-folds into its tail is left out of sums
_FLOOR = 1e-9


@dataclass(frozen=True)
class HistogramEstimate:
    """What a noised histogram says about the true one.

    Attributes:
        mean_G: posterior means of the true counts, which sum to the public number of units.
        deviation_G: their posterior standard deviations.
        log_evidence: log of the noised histogram's probability under the prior that was taken.
    """

    mean_G: NDArray[np.float64]
    deviation_G: NDArray[np.float64]
    log_evidence: float


def expected_by_likeness(
    noisy_KG: NDArray[np.int64],
    num_units: Sequence[int],
    epsilon: float,
    weight_G: NDArray[np.float64],
    mean_GR: Tensor,
) -> list[HistogramEstimate]:
    """Estimate each silo's histogram with a prior that follows its own counts in like groups, where that fits better.

    A silo that holds more than the public share of one group holds more of those like it. The prior share of a group is
    the public one times the weighted mean of estimated over public shares in the other groups, with weights that fall
    with the distance as a Gaussian. The width is that of the largest evidence; so is the choice against public shares
    alone. Like the estimate itself, this costs no epsilon: it reads nothing but what was released.

    Args:
        noisy_KG: the silos' noised counts.
        num_units: the public number of units of each silo.
        epsilon: the epsilon of the statistic.
        weight_G: public shares of the groups, positive.
        mean_GR: where the groups lie.
    """
    rows = list(zip(noisy_KG, num_units, strict=True))
    by_public_shares = [expected_counts(noisy_G, num, epsilon, weight_G) for noisy_G, num in rows]
    best = list(by_public_shares)
    for like_GG in _likenesses(mean_GR, weight_G):
        for k, (noisy_G, num) in enumerate(rows):
            # How many times its public share the silo holds of a group, by the other groups.
            ratio_G = by_public_shares[k].mean_G / (num * weight_G)
            share_G = weight_G * (like_GG @ ratio_G) + _FLOOR
            prior_G = share_G / share_G.sum()
            estimate = expected_counts(noisy_G, num, epsilon, prior_G)
            if estimate.log_evidence > best[k].log_evidence:
                best[k] = estimate
    return best


def _likenesses(mean_GR: Tensor, weight_G: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Yield, by width, how much each group counts for the others, rows that sum to 1; nothing for a single group."""
    if len(mean_GR) < 2:
        return
    # A group says nothing about itself: its own noise would become its own prior.
    distance_GG = torch.cdist(mean_GR, mean_GR).fill_diagonal_(torch.inf).numpy()
    nearest_G1 = distance_GG.min(1, keepdims=True)
    # Groups may be at one place, at a distance of 0.
    median = float(np.median(nearest_G1))
    unit = max(median, 1e-6 * float(nearest_G1.max())) or 1.0
    for width in _WIDTHS:
        # Relative to the nearest group, so that a group far from all others does not get weights that all underflow to
        # 0.
        excess_GG = distance_GG**2 - nearest_G1**2
        log_GG = -0.5 * excess_GG / (width * unit) ** 2
        like_GG = weight_G * np.exp(log_GG)
        yield like_GG / like_GG.sum(1, keepdims=True)


def expected_counts(
    noisy_G: NDArray[np.int64],
    num_units: int,
    epsilon: float,
    weight_G: NDArray[np.float64],
) -> HistogramEstimate:
    """Estimate a noised histogram's true counts.

    Each cell's prior is beta-binomial around `weight_G`; its concentration maximises the marginal likelihood of
    the silo's own histogram (empirical Bayes). Clipping at 0 instead would turn noise into units that a small silo does
    not have.

    Args:
        noisy_G: noised counts, ``n_c + z_c`` with ``P(z) ~ exp(-epsilon |z| / 2)``.
        num_units: the public sum of the true counts.
        epsilon: the epsilon of the statistic.
        weight_G: prior shares of the groups, positive.
    """
    num_likely = likely_counts(num_units, epsilon)
    evidence_A = np.zeros(len(_CONCENTRATIONS))
    for rows in blocks(len(noisy_G), num_likely):
        cells = _Cells.of(noisy_G[rows], num_units, epsilon, weight_G[rows], num_likely)
        for a, concentration in enumerate(_CONCENTRATIONS):
            log_joint_GN = cells.log_joint(concentration)
            evidence_A[a] += logsumexp(log_joint_GN, axis=1).sum()
    if not bool(np.isfinite(evidence_A.max())):
        got = "NaN or infinity for every concentration"
        raise NumericalError("noisy counts", expected="a finite likelihood", got=got)
    best_concentration = float(_CONCENTRATIONS[evidence_A.argmax()])
    means = []
    deviations = []
    for rows in blocks(len(noisy_G), num_likely):
        # Computed a second time, since those of all blocks together may not fit in memory.
        cells = _Cells.of(noisy_G[rows], num_units, epsilon, weight_G[rows], num_likely)
        posterior_GN = softmax(cells.log_joint(best_concentration), axis=1)
        mean_G = (posterior_GN * cells.n_GN).sum(1) + _FLOOR * num_units
        deviation_GN = cells.n_GN - mean_G[:, None]
        variance_G = (posterior_GN * deviation_GN**2).sum(1)
        means.append(mean_G)
        deviations.append(np.sqrt(variance_G))
    mean_G = np.concatenate(means)
    deviation_G = np.concatenate(deviations)
    # The cells were estimated one by one, and their sum is public.
    to_num_units = num_units / mean_G.sum()
    return HistogramEstimate(
        mean_G=mean_G * to_num_units,
        deviation_G=deviation_G,
        log_evidence=float(evidence_A.max()),
    )


def likely_counts(num_units: int, epsilon: float) -> int:
    """Return how many true counts a noised count leaves possible, all others being negligible."""
    # P(z) ~ exp(-epsilon |z| / 2) has fallen by `_NEGLIGIBLE` e-folds at this |z|.
    largest_noise = math.ceil(2 * _NEGLIGIBLE / epsilon)
    return min(2 * largest_noise, num_units) + 1


@dataclass(frozen=True)
class _Cells:
    """Some cells of a histogram, and for each the true counts that its noised count leaves possible.

    Attributes:
        n_GN: those counts.
        log_likely_GN: log of the noise's probability times the binomial coefficient, up to a constant of each cell.
        num_units: the sum of all true counts.
        weight_G1: public shares of the cells.
    """

    n_GN: NDArray[np.float64]
    log_likely_GN: NDArray[np.float64]
    num_units: int
    weight_G1: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        noisy_G: NDArray[np.int64],
        num_units: int,
        epsilon: float,
        weight_G: NDArray[np.float64],
        num_likely: int,
    ) -> "_Cells":
        noisy_G1 = noisy_G[:, None].astype(np.float64)  # of which no difference overflows
        centre_G1 = np.clip(noisy_G1, 0, num_units)
        highest_start = num_units + 1 - num_likely
        low_G1 = np.clip(centre_G1 - num_likely // 2, 0, highest_start)
        n_GN = low_G1 + np.arange(num_likely)
        # Relative to the centre's own noise, so that a count far outside [0, n] does not underflow.
        noise_GN = np.abs(noisy_G1 - n_GN)
        noise_of_centre_G1 = np.abs(noisy_G1 - centre_G1)
        log_noise_GN = -epsilon / 2 * (noise_GN - noise_of_centre_G1)
        # The logarithm of the binomial coefficient.
        rest_GN = num_units - n_GN
        log_choose_GN = gammaln(num_units + 1) - gammaln(n_GN + 1) - gammaln(rest_GN + 1)
        return cls(n_GN, log_noise_GN + log_choose_GN, num_units, weight_G[:, None])

    def log_joint(self, concentration: float) -> NDArray[np.float64]:
        """Return log P(n, noisy count) where a cell's rate is Beta(concentration w, concentration (1 - w))."""
        shape_G1 = concentration * self.weight_G1
        # A plan with one group gives it the weight 1, and a Beta distribution needs both parameters above 0.
        rest_G1 = np.maximum(concentration - shape_G1, 1e-9)
        # The beta-binomial: C(m, n) B(n + a, m - n + b) / B(a, b), whose first factor `log_likely_GN` holds.
        num_units = self.num_units
        log_in_cell_GN = gammaln(self.n_GN + shape_G1)
        log_elsewhere_GN = gammaln(num_units - self.n_GN + rest_G1)
        rates_GN = log_in_cell_GN + log_elsewhere_GN
        log_normaliser_G1 = betaln(shape_G1, rest_G1) + gammaln(num_units + shape_G1 + rest_G1)
        return np.asarray(self.log_likely_GN + rates_GN - log_normaliser_G1)
