"""Attacks on the statistics: membership inference, re-identification and reconstruction of one record.

The attacker knows everything but the target: the mechanism and its noise level, every other record and, for
membership, both candidate records. `neighbours` and `drawing` draw the statistics that are attacked here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import beta
from torch import Tensor

from ddm.routers.sketch import Sketch

# Shape legend: N experiments, records or rows, R sketch dimensions, D values of an image, T thresholds.

Scores = NDArray[np.float64]
_TAILS_T = np.geomspace(1e-4, 0.5, 40)


def epsilon_bound(
    first_N: Scores, second_N: Scores, delta: float, confidence: float = 0.999
) -> float:
    """Return a lower confidence bound on the epsilon of a statistic, from the scores of independent experiments.

    ``epsilon >= log((TPR - delta) / FPR)`` for any test, and with the worlds exchanged ``log((TNR - delta) / FNR)``.
    Which of the two, and at which threshold, every other experiment decides; the rest measure that one test.

    Args:
        first_N: scores under the first of two neighbouring data sets, where they are the higher ones.
        second_N: scores under the second.
        delta: of the claim.
        confidence: of the bound (Clopper and Pearson 1934).
    """
    tests = ((first_N, second_N), (-second_N, -first_N))
    chosen = []
    for hits_N, alarms_N in tests:
        shares_T = np.concatenate([_TAILS_T, 1 - _TAILS_T])
        threshold_T = np.quantile(
            np.concatenate([hits_N[::2], alarms_N[::2]]), shares_T, method="higher"
        )
        bound_T = _bounds(hits_N[::2], alarms_N[::2], threshold_T, delta, confidence)
        chosen.append((bound_T.max(), threshold_T[bound_T.argmax()]))
    better = int(chosen[1][0] > chosen[0][0])
    hits_N, alarms_N = tests[better]
    found_T = _bounds(
        hits_N[1::2], alarms_N[1::2], np.array([chosen[better][1]]), delta, confidence
    )
    return max(0.0, float(found_T[0]))


def _bounds(
    hits_N: Scores, alarms_N: Scores, threshold_T: Scores, delta: float, confidence: float
) -> Scores:
    """Return the bound from each threshold: a low hit rate over a high rate of false alarms."""
    miss = (1 - confidence) / 2  # of either rate
    hits_T = (hits_N[:, None] >= threshold_T).sum(0)
    alarms_T = (alarms_N[:, None] >= threshold_T).sum(0)
    low_T = np.where(
        hits_T > 0, beta.ppf(miss, np.maximum(hits_T, 1), len(hits_N) - hits_T + 1), 0.0
    )
    others_T = len(alarms_N) - alarms_T
    high_T = np.where(others_T > 0, beta.ppf(1 - miss, alarms_T + 1, np.maximum(others_T, 1)), 1.0)
    return np.asarray(np.log(np.maximum(low_T - delta, 1e-300) / high_T))


@dataclass(frozen=True)
class Rates:
    """Shares of released sketches that were assigned to the record that they came from.

    Attributes:
        average: of all records.
        longest: of those whose sketches have the largest norm.
        loneliest: of those whose sketches are farthest from any other.
    """

    average: float
    longest: float
    loneliest: float

    @property
    def outlying(self) -> float:
        """The higher rate of the two kinds of outliers."""
        return max(self.longest, self.loneliest)


def reidentification(
    s_0_NR: Tensor, released_NR: Tensor, alpha: float, outlying: int = 20, *, together: bool = False
) -> Rates:
    """Assign released sketches to the records of a known cohort by maximum likelihood.

    Args:
        s_0_NR: the records' sketches without noise, all of which the attacker has.
        released_NR: the released ones, row i from record i (see `drawing.sketches_in_order`); assigning does not use
            the order.
        alpha: of the path, at the noise level of the statistic.
        outlying: how many records count as outliers.
        together: assign each record once (the most likely permutation) instead of each sketch by itself.
    """
    squared_NN = torch.cdist(released_NR.double(), alpha * s_0_NR.double()).square()
    found_N = (
        linear_sum_assignment(squared_NN.numpy())[1] if together else squared_NN.argmin(1).numpy()
    )
    right_N = torch.from_numpy(found_N == np.arange(len(s_0_NR))).double()
    apart_NN = torch.cdist(s_0_NR.double(), s_0_NR.double()).fill_diagonal_(float("inf"))
    longest = s_0_NR.norm(dim=1).topk(outlying).indices
    loneliest = apart_NN.amin(1).topk(outlying).indices
    return Rates(*(float(right_N[rows].mean()) for rows in (slice(None), longest, loneliest)))


def reconstruct(
    released_NR: Tensor,
    alpha: float,
    sigma: float,
    sketch: Sketch,
    guess_ND: Tensor,
    mean_R: Tensor,
    cov_RR: Tensor,
) -> Tensor:
    """Return the images that are expected given their released sketches, under a Gaussian prior; shape (N, D).

    ``x = guess + C A^T K (s_r / alpha - mean),    K = S (S + (sigma / (alpha C))^2 I)^-1``

    Args:
        released_NR: released sketches.
        alpha: of the path, at the noise level of the statistic.
        sigma: likewise.
        sketch: the public projection, of R dimensions.
        guess_ND: what is guessed without the statistic, one image for each row or one for all.
        mean_R: the sketch of that guess, or one a row.
        cov_RR: S, the public covariance of sketches around it.
    """
    cov_RR = cov_RR.double()
    noise_RR = (sigma / (alpha * sketch.scale)) ** 2 * torch.eye(len(cov_RR), dtype=torch.float64)
    gain_RR = torch.linalg.solve(cov_RR + noise_RR, cov_RR)  # the transpose of K
    moved_NR = (released_NR.double() / alpha - mean_R.double()) @ gain_RR
    reconstructed: Tensor = guess_ND.double() + sketch.scale * moved_NR @ sketch.basis_RD.double()
    return reconstructed


def error_reduction(images_ND: Tensor, guess_ND: Tensor, found_ND: Tensor) -> float:
    """Return how much smaller the squared error of `found_ND` is than that of `guess_ND`, as a share of the latter."""
    error, guess = (
        (images_ND.double() - other.double()).square().sum() for other in (found_ND, guess_ND)
    )
    return float(1 - error / guess)
