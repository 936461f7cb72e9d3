"""The counts router: each expert's share of every public group as mixture weights; valid for every t, no training.

``log p(s | k, t) = log sum_c mass_kc N(s; alpha m_c, alpha^2 S_c + (sigma / C)^2 I)``
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import TensorSpec
from ddm.partition.layout import Layout
from ddm.routers.gaussians import NoisedGaussians, blocks
from ddm.routers.histograms import expected_by_likeness
from ddm.routers.sketch import Sketch

# Shape legend: K experts, G public groups, B batch, R sketch dimensions.


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

    def __init__(
        self,
        sketch: Sketch,
        log_mass_KG: Tensor,
        path: Path,
        error_KG: Tensor | None = None,
    ) -> None:
        if log_mass_KG.ndim != 2 or log_mass_KG.shape[1] != sketch.num_groups:
            raise ShapeError(
                "mass", expected=f"(K, {sketch.num_groups})", got=str(tuple(log_mass_KG.shape))
            )
        log_mass_KG = log_mass_KG.double()
        total_K = log_mass_KG.logsumexp(1)
        # Not finite where a share is NaN, or where all shares of an expert are 0.
        are_finite = bool(torch.isfinite(total_K).all())
        if not are_finite or float(total_K.abs().max()) > 1e-3:
            sum_K = total_K.exp()
            got = f"sums of {float(sum_K.min()):g} to {float(sum_K.max()):g}"
            raise NumericalError("mass", expected="shares that sum to 1", got=got)
        self.num_experts = len(log_mass_KG)
        self.sketch = sketch
        self.path = path
        # Normalised again: float32 storage leaves errors of 1e-7, which show at t = 1.
        self.log_mass_KG = log_mass_KG - total_K[:, None]
        if error_KG is None:
            error_KG = torch.zeros_like(self.log_mass_KG)
        self.error_KG = error_KG.double()
        self._groups = NoisedGaussians(sketch.group_mean_GR, sketch.group_cov_GRR)

    @classmethod
    def from_counts(
        cls,
        sketch: Sketch,
        noisy_KG: Tensor,
        num_units: Sequence[int],
        epsilon: float,
        path: Path,
    ) -> "CountsRouter":
        """Build the router from the silos' histograms, with true counts estimated under the noise.

        Args:
            sketch: the plan's public sketch.
            noisy_KG: noised counts, integers, possibly negative.
            num_units: the public number of units of each expert.
            epsilon: the epsilon of the statistic.
            path: the probability path.
        """
        estimates = expected_by_likeness(
            noisy_KG.numpy(),
            num_units,
            epsilon,
            sketch.group_weight_G.double().numpy(),
            sketch.group_mean_GR.double(),
        )
        means = [torch.from_numpy(estimate.mean_G) for estimate in estimates]
        deviations = [torch.from_numpy(estimate.deviation_G) for estimate in estimates]
        n_K1 = torch.tensor(num_units, dtype=torch.float64)[:, None]
        mass_KG = torch.stack(means) / n_K1
        error_KG = torch.stack(deviations) / n_K1
        return cls(sketch, mass_KG.log(), path, error_KG)

    def head(self, rank: int) -> "CountsRouter":
        """Return the same mixture in the sketch's leading `rank` dimensions, those of the silos' sketches."""
        narrow_sketch = self.sketch.head(rank)
        return CountsRouter(narrow_sketch, self.log_mass_KG, self.path, self.error_KG)

    def split(self, layout: Layout) -> "CountsRouter":
        """Return the router of experts from this one of silos, dividing each silo's groups among its experts."""
        mass_EG, _ = layout.split(self.log_mass_KG.exp())
        silo_E = list(layout.silo_E)
        # An expert's share of its silo's group scales the error too. Estimated shares are never 0.
        ratio_EG = mass_EG / self.log_mass_KG[silo_E].exp()
        error_EG = self.error_KG[silo_E] * ratio_EG
        return CountsRouter(self.sketch, mass_EG.log(), self.path, error_EG)

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | k, t)`` up to a term common to all k, shape (B, K); equal for all k at t = 1.

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        s_BR = self.sketch.of(x_B, t_B, self.path)
        return self.sketch_log_likelihood(s_BR, t_B)

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, K)."""
        log_BG = self.group_log_density(s_BR, t_B)
        log_mass_KG = self.log_mass_KG.to(log_BG)
        chunks = []
        # All pairs of samples and experts over all groups, (B, K, G), need not fit in memory at once.
        for rows in blocks(log_BG.shape[0], log_mass_KG.numel()):
            joint_BKG = log_BG[rows, None] + log_mass_KG
            chunks.append(joint_BKG.logsumexp(2))
        return torch.cat(chunks)

    def group_log_density(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log N(s; alpha m_c, alpha^2 S_c + (sigma / C)^2 I)`` up to a common constant, shape (B, G)."""
        t_B = t_B.to(s_BR)
        alpha_B = self.path.alpha(t_B)
        noise_B = self.path.sigma(t_B) / self.sketch.scale
        return self._groups.log_density(s_BR, alpha_B, noise_B)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores; the sketch is the plan's."""
        return {"mass": self.log_mass_KG.exp().float(), "mass_error": self.error_KG.float()}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        sketch: Sketch,
        path: Path,
    ) -> "CountsRouter":
        """Rebuild the router from tensors loaded against `counts_router_specs`."""
        log_mass_KG = tensors["mass"].double().log()
        return cls(sketch, log_mass_KG, path, tensors["mass_error"])


def counts_router_specs(num_experts: int, num_groups: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored counts router."""
    shares = TensorSpec("F32", (num_experts, num_groups))
    return {"mass": shares, "mass_error": shares}
