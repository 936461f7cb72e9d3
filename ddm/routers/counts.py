"""The counts router: each expert's share of every public group as mixture weights; valid for every t, no training.

``log p(s | k, t) = log sum_c mass_kc N(s; alpha m_c, alpha^2 S_c + (sigma / C)^2 I)``
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaln, gammaln, logsumexp, softmax
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.partition.layout import Layout
from ddm.protocol.plan import Plan
from ddm.routers.gaussians import NoisedGaussians, blocks
from ddm.routers.sketch import Sketch

# Shape legend: K experts, G public groups, B batch, R sketch dimensions.

_CONCENTRATIONS = np.logspace(-1, 4, 21)
_NEGLIGIBLE = 40.0  # noise more than this many e-folds into its tail is left out of sums
_FLOOR = 1e-9


class CountsRouter:
    """A router that models each expert as a mixture of the public groups' Gaussians, weighted by its noised histogram.

    Args:
        sketch: the plan's public sketch with the groups' means and covariances.
        log_mass_KG: log of each expert's share in each group, minus infinity for none; rows of shares sum to 1.
        path: the probability path.
        error_KG: posterior standard deviation of the shares; zeros when omitted.

    Raises:
        ShapeError: shares of another number of groups.
        NumericalError: shares that are not finite or do not sum to 1.
    """

    def __init__(self, sketch: Sketch, log_mass_KG: Tensor, path: Path, error_KG: Tensor | None = None) -> None:
        if log_mass_KG.ndim != 2 or log_mass_KG.shape[1] != sketch.num_groups:
            raise ShapeError("mass", expected=f"(K, {sketch.num_groups})", got=str(tuple(log_mass_KG.shape)))
        log_mass_KG = log_mass_KG.double()
        total_K = log_mass_KG.logsumexp(1)
        if not bool(torch.isfinite(total_K).all()) or float(total_K.abs().max()) > 1e-3:
            got = f"sums of {float(total_K.exp().min()):g} to {float(total_K.exp().max()):g}"
            raise NumericalError("mass", expected="shares that sum to 1", got=got)
        self.num_experts = len(log_mass_KG)
        self.sketch = sketch
        self.path = path
        self.log_mass_KG = log_mass_KG - total_K[:, None]  # float32 storage leaves errors of 1e-7, which show at t = 1
        self.error_KG = torch.zeros_like(self.log_mass_KG) if error_KG is None else error_KG.double()
        self._groups = NoisedGaussians(sketch.group_mean_GR, sketch.group_cov_GRR)

    @classmethod
    def from_counts(
        cls, sketch: Sketch, noisy_KG: Tensor, num_units: Sequence[int], epsilon: float, path: Path
    ) -> "CountsRouter":
        """Build the router from the silos' histograms, with true counts estimated under the noise (`expected_counts`).

        Args:
            sketch: the plan's public sketch.
            noisy_KG: noised counts, integers, possibly negative.
            num_units: the public number of units of each expert.
            epsilon: of the statistic.
            path: the probability path.
        """
        weight_G = sketch.group_weight_G.double().numpy()
        found = [expected_counts(row.numpy(), n, epsilon, weight_G) for row, n in zip(noisy_KG, num_units, strict=True)]
        mean_KG = torch.from_numpy(np.stack([mean for mean, _ in found]))
        deviation_KG = torch.from_numpy(np.stack([deviation for _, deviation in found]))
        n_K1 = torch.tensor(num_units, dtype=torch.float64)[:, None]
        return cls(sketch, (mean_KG / n_K1).log(), path, deviation_KG / n_K1)

    def head(self, rank: int) -> "CountsRouter":
        """Return the same mixture in the sketch's leading `rank` dimensions, those of the silos' sketches."""
        return CountsRouter(self.sketch.head(rank), self.log_mass_KG, self.path, self.error_KG)

    def split(self, layout: Layout) -> "CountsRouter":
        """Return the router of experts from this one of silos, dividing each silo's groups among its experts."""
        mass_EG, _ = layout.split(self.log_mass_KG.exp())
        silo_E = list(layout.silo_E)
        ratio_EG = mass_EG / self.log_mass_KG[silo_E].exp()
        return CountsRouter(self.sketch, mass_EG.log(), self.path, self.error_KG[silo_E] * ratio_EG)

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | k, t)`` up to a term common to all k, shape (B, K); equal for all k at t = 1.

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        return self.sketch_log_likelihood(self.sketch.of(x_B, t_B, self.path), t_B)

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, K)."""
        log_BG = self.group_log_density(s_BR, t_B)
        log_mass_KG = self.log_mass_KG.to(log_BG)
        parts = (log_BG[rows, None] + log_mass_KG for rows in blocks(len(log_BG), log_mass_KG.numel()))
        return torch.cat([part_BKG.logsumexp(2) for part_BKG in parts])

    def group_log_density(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log N(s; alpha m_c, alpha^2 S_c + (sigma / C)^2 I)`` up to a common constant, shape (B, G)."""
        t_B = t_B.to(s_BR)
        return self._groups.log_density(s_BR, self.path.alpha(t_B), self.path.sigma(t_B) / self.sketch.scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores; the sketch is the plan's."""
        return {"mass": self.log_mass_KG.exp().float(), "mass_error": self.error_KG.float()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], sketch: Sketch, path: Path) -> "CountsRouter":
        """Rebuild the router from tensors loaded against `counts_router_specs`."""
        return cls(sketch, tensors["mass"].double().log(), path, tensors["mass_error"])


def counts_router_specs(num_experts: int, num_groups: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored counts router."""
    shares = TensorSpec("F32", (num_experts, num_groups))
    return {"mass": shares, "mass_error": shares}


def counts_specs(plan: Plan) -> dict[str, TensorSpec]:
    """Return the specs of a silo's noised histogram."""
    return {"counts": TensorSpec("I64", (plan.statistics.counts.num_groups,))}


def expected_counts(
    noisy_G: NDArray[np.int64], num_units: int, epsilon: float, weight_G: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the posterior mean of a noised histogram's true counts, rescaled to `num_units`, and their deviation.

    Each cell's prior is beta-binomial around the public shares; its concentration maximises the marginal likelihood of
    the silo's own histogram (empirical Bayes). Clipping at 0 instead would turn noise into units that a small silo does
    not have.

    Args:
        noisy_G: noised counts, ``n_c + z_c`` with ``P(z) ~ exp(-epsilon |z| / 2)``.
        num_units: the public sum of the true counts.
        epsilon: of the statistic.
        weight_G: public shares of the groups, positive.
    """
    num_likely = likely_counts(num_units, epsilon)
    evidence_A = np.zeros(len(_CONCENTRATIONS))
    for rows in blocks(len(noisy_G), num_likely):
        cells = _Cells.of(noisy_G[rows], num_units, epsilon, weight_G[rows], num_likely)
        evidence_A += [logsumexp(cells.log_joint(each), axis=1).sum() for each in _CONCENTRATIONS]
    if not bool(np.isfinite(evidence_A.max())):
        got = "NaN or infinity for every concentration"
        raise NumericalError("noisy counts", expected="a finite likelihood", got=got)
    best, found = float(_CONCENTRATIONS[evidence_A.argmax()]), []
    for rows in blocks(len(noisy_G), num_likely):
        cells = _Cells.of(noisy_G[rows], num_units, epsilon, weight_G[rows], num_likely)
        posterior_GN = softmax(cells.log_joint(best), axis=1)
        mean_G = (posterior_GN * cells.n_GN).sum(1) + _FLOOR * num_units
        found.append((mean_G, np.sqrt((posterior_GN * (cells.n_GN - mean_G[:, None]) ** 2).sum(1))))
    mean_G, deviation_G = (np.concatenate(part) for part in zip(*found, strict=True))
    return mean_G * (num_units / mean_G.sum()), deviation_G


def likely_counts(num_units: int, epsilon: float) -> int:
    """Return how many true counts a noised count leaves possible, all others being negligible."""
    return min(2 * math.ceil(2 * _NEGLIGIBLE / epsilon), num_units) + 1


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
        low_G1 = np.clip(centre_G1 - num_likely // 2, 0, num_units + 1 - num_likely)
        n_GN = low_G1 + np.arange(num_likely)
        # Relative to the centre's own noise, so that a count far outside [0, n] does not underflow.
        log_noise_GN = -epsilon / 2 * (np.abs(noisy_G1 - n_GN) - np.abs(noisy_G1 - centre_G1))
        choose_GN = gammaln(num_units + 1) - gammaln(n_GN + 1) - gammaln(num_units - n_GN + 1)
        return cls(n_GN, log_noise_GN + choose_GN, num_units, weight_G[:, None])

    def log_joint(self, concentration: float) -> NDArray[np.float64]:
        """Return log P(n, noisy count) where a cell's rate is Beta(concentration w, concentration (1 - w))."""
        shape_G1 = concentration * self.weight_G1
        rest_G1 = np.maximum(concentration - shape_G1, 1e-9)
        ends_G1 = betaln(shape_G1, rest_G1) + gammaln(self.num_units + shape_G1 + rest_G1)
        rates_GN = gammaln(self.n_GN + shape_G1) + gammaln(self.num_units - self.n_GN + rest_G1)
        return np.asarray(self.log_likely_GN + rates_GN - ends_G1)
