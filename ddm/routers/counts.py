"""The counts router: each expert's share of every public group as mixture weights; valid for every t, no training.

``log p(s | k, t) = log sum_c mass_kc N(s; alpha m_c, alpha^2 S_c + (sigma / C)^2 I)``
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaln, gammaln, logsumexp
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
    reach = min(num_units, math.ceil(2 * _NEGLIGIBLE / epsilon))
    centre_G = np.clip(noisy_G, 0, num_units)
    low_G = np.clip(centre_G - reach, 0, max(num_units - 2 * reach, 0))
    n_GN = low_G[:, None] + np.arange(min(2 * reach, num_units) + 1)
    # Relative to the centre's own noise, so that a count far outside [0, n] does not underflow.
    log_noise_GN = -epsilon / 2 * (np.abs(noisy_G[:, None] - n_GN) - np.abs(noisy_G - centre_G)[:, None])
    best: tuple[float, NDArray[np.float64]] | None = None
    for concentration in _CONCENTRATIONS:
        log_joint_GN = log_noise_GN + _beta_binomial(n_GN, num_units, concentration * weight_G[:, None], concentration)
        evidence = float(logsumexp(log_joint_GN, axis=1).sum())
        if best is None or evidence > best[0]:
            best = evidence, log_joint_GN
    if best is None or not math.isfinite(best[0]):
        got = "NaN or infinity for every concentration"
        raise NumericalError("noisy counts", expected="a finite likelihood", got=got)
    posterior_GN = np.exp(best[1] - logsumexp(best[1], axis=1, keepdims=True))
    mean_G = (posterior_GN * n_GN).sum(1) + _FLOOR * num_units
    deviation_G = np.sqrt((posterior_GN * (n_GN - mean_G[:, None]) ** 2).sum(1))
    return mean_G * (num_units / mean_G.sum()), deviation_G


def _beta_binomial(
    n: NDArray[np.int64], total: int, shape: NDArray[np.float64], concentration: float
) -> NDArray[np.float64]:
    """Return log P(n) of `total` trials whose rate is Beta(shape, concentration - shape)."""
    rest = np.maximum(concentration - shape, 1e-9)
    choose = gammaln(total + 1) - gammaln(n + 1) - gammaln(total - n + 1)
    return np.asarray(choose + betaln(n + shape, total - n + rest) - betaln(shape, rest))
