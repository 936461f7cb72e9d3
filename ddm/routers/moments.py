"""The moments router: one Gaussian per silo, from its noised mean and second moments; valid for every t.

``log p(s | k, t) = log N(s; alpha m_k, alpha^2 S_k + (sigma / C)^2 I)``
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import ShapeError
from ddm.io.tensors import TensorSpec
from ddm.partition.layout import Layout
from ddm.privacy.accounting import gaussian_mu, moments_sensitivity
from ddm.protocol.plan import Plan
from ddm.routers.gaussians import NoisedGaussians
from ddm.routers.sketch import Sketch

# Shape legend: K silos, B batch, R sketch dimensions, r of them in the silos' moments.

# tau^2: up to two public standard deviations, as in the unit ball
_SPREADS = np.logspace(-4, 0.6, 47)
_FLOOR = 0.05  # smallest variance of a silo in any direction, as a share of the public one


class MomentsRouter:
    """A router that models each expert as one Gaussian in the sketch's leading dimensions.

    Args:
        sketch: the plan's public sketch.
        mean_KR: mean of each silo's sketches, in the leading dimensions.
        cov_KRR: their covariance.
        path: the probability path.

    Raises:
        ShapeError, NumericalError: more dimensions than the sketch, or covariances that are not positive definite.
    """

    def __init__(self, sketch: Sketch, mean_KR: Tensor, cov_KRR: Tensor, path: Path) -> None:
        self.num_experts, self.rank = mean_KR.shape
        self.sketch = sketch.head(self.rank)
        self.mean_KR, self.cov_KRR = mean_KR, cov_KRR
        self.path = path
        self._silos = NoisedGaussians(mean_KR, cov_KRR)

    @classmethod
    def from_moments(
        cls,
        sketch: Sketch,
        sum_KR: Tensor,
        second_KRR: Tensor,
        num_units: Sequence[int],
        noise_std: float,
        path: Path,
    ) -> "MomentsRouter":
        """Build the router from the silos' moments, estimating the true ones under their noise (`expected_moments`).

        Args:
            sketch: the plan's public sketch.
            sum_KR: noised sums of sketches.
            second_KRR: noised sums of their outer products.
            num_units: the public number of units of each silo.
            noise_std: of the statistic, from `moments_noise_std`.
            path: the probability path.
        """
        narrow = sketch.head(sum_KR.shape[1])
        statistics = zip(sum_KR.double(), second_KRR.double(), num_units, strict=True)
        found = [
            expected_moments(narrow, total_R, second_RR, n, noise_std)
            for total_R, second_RR, n in statistics
        ]
        means, covs = zip(*found, strict=True)
        return cls(sketch, torch.stack(means), torch.stack(covs), path)

    def head(self, rank: int) -> "MomentsRouter":
        """Return the same Gaussians in the leading `rank` dimensions, or in all that the router has."""
        r = min(rank, self.rank)
        return MomentsRouter(self.sketch, self.mean_KR[:, :r], self.cov_KRR[:, :r, :r], self.path)

    def split(self, layout: Layout) -> "MomentsRouter":
        """Return the router of experts from this one of silos; the experts of a silo share its Gaussian."""
        silo_E = list(layout.silo_E)
        return MomentsRouter(self.sketch, self.mean_KR[silo_E], self.cov_KRR[silo_E], self.path)

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | k, t)`` up to a term common to all k, shape (B, K); equal for all k at t = 1.

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        return self.sketch_log_likelihood(self.sketch.of(x_B, t_B, self.path), t_B)

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, K); dimensions beyond its own are ignored."""
        t_B = t_B.to(s_BR)
        noise_B = self.path.sigma(t_B) / self.sketch.scale
        return self._silos.log_density(s_BR[:, : self.rank], self.path.alpha(t_B), noise_B)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores; the sketch is the plan's."""
        return {"mean": self.mean_KR.float(), "cov": self.cov_KRR.float()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], sketch: Sketch, path: Path
    ) -> "MomentsRouter":
        """Rebuild the router from tensors loaded against `moments_router_specs`."""
        return cls(sketch, tensors["mean"], tensors["cov"], path)


def moments_router_specs(num_experts: int, rank: int) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored moments router."""
    return {
        "mean": TensorSpec("F32", (num_experts, rank)),
        "cov": TensorSpec("F32", (num_experts, rank, rank)),
    }


def moments_specs(plan: Plan) -> dict[str, TensorSpec]:
    """Return the specs of a silo's noised moments."""
    rank = plan.statistics.moments.rank if plan.statistics.moments else 0
    return {"sum": TensorSpec("F32", (rank,)), "second": TensorSpec("F32", (rank, rank))}


def moments_noise_std(plan: Plan) -> float:
    """Return the noise's standard deviation: of each entry of a sum and each off-diagonal entry of the second moments.

    Raises:
        ShapeError: the plan has no moments.
    """
    moments = plan.statistics.moments
    if moments is None:
        raise ShapeError("plan", expected="the statistic moments", got="a plan without it")
    return moments_sensitivity(moments.rank) / gaussian_mu(moments.epsilon, moments.delta)


def expected_moments(
    sketch: Sketch, sum_R: Tensor, second_RR: Tensor, num_units: int, noise_std: float
) -> tuple[Tensor, Tensor]:
    """Return the posterior estimate of the Gaussian of a silo's sketches, from its noised moments.

    In the eigenbasis of the public covariance, with eigenvalues l_i, the silo's mean has the prior ``N(0, tau^2 l_i)``
    around the public mean, and that of entry (i, j) of its covariance ``N(0, tau^2 l_i l_j)`` around the public one
    (twice the variance on the diagonal). The statistic adds noise of variance ``(noise_std / n)^2`` (twice that on the
    diagonal), and sampling n images adds ``l_i / n`` and ``l_i l_j / n``. Each tau is averaged over its posterior given
    the silo's own moments. The result is the posterior mean. Each direction's remaining uncertainty, the variance of
    its mean and the standard deviation of its variance, is added to its variance, and the variances are floored: a
    covariance estimated from noise is often not positive definite, and a Gaussian that is too narrow does more harm
    than one that is too wide.

    Args:
        sketch: the public sketch of the statistic's dimensions.
        sum_R: noised sum of sketches, float64.
        second_RR: noised sum of their outer products, float64.
        num_units: n, public.
        noise_std: of the statistic.
    """
    public_mean_R, public_cov_RR = _public_moments(sketch)
    variance_R, axes_RR = torch.linalg.eigh(public_cov_RR)
    noise = (noise_std / num_units) ** 2
    off_R = axes_RR.T @ (sum_R / num_units - public_mean_R)
    shift_R, shift_variance_R = _posterior(off_R, variance_R, noise + variance_R / num_units)
    mean_R = public_mean_R + axes_RR @ shift_R
    off_RR = (
        axes_RR.T @ (second_RR / num_units - torch.outer(mean_R, mean_R) - public_cov_RR) @ axes_RR
    )
    row, column = torch.triu_indices(*off_RR.shape)
    twice, scale = 1.0 + (row == column).double(), variance_R[row] * variance_R[column]
    entry, entry_variance = _posterior(
        off_RR[row, column], twice * scale, twice * (noise + scale / num_units)
    )
    off_RR[row, column], off_RR[column, row] = entry, entry
    unknown_R = shift_variance_R + entry_variance[row == column].sqrt()
    root_R = variance_R.sqrt()
    relative_RR = (off_RR + (variance_R + unknown_R).diag()) / torch.outer(root_R, root_R)
    ratio_R, turn_RR = torch.linalg.eigh(relative_RR)
    back_RR = axes_RR @ (root_R[:, None] * turn_RR) * ratio_R.clamp(min=_FLOOR).sqrt()
    return mean_R, back_RR @ back_RR.T


def _public_moments(sketch: Sketch) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the public images' sketches, from their groups'."""
    weight_G = sketch.group_weight_G.double()
    mean_GR = sketch.group_mean_GR.double()
    mean_R = weight_G @ mean_GR
    off_GR = mean_GR - mean_R
    within_RR = torch.einsum("g,grq->rq", weight_G, sketch.group_cov_GRR.double())
    return mean_R, within_RR + off_GR.T @ (weight_G[:, None] * off_GR)


def _posterior(found: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posterior mean and variance of ``N(0, tau^2 scale)`` numbers under noise, averaged over tau."""
    signal = torch.from_numpy(_SPREADS)[:, None] * scale
    total = signal + noise
    weight = (-0.5 * (found.square() / total + total.log()).sum(1)).softmax(0)[:, None]
    kept = signal / total
    mean = found * (weight * kept).sum(0)
    return mean, (weight * (kept * noise + (kept * found - mean).square())).sum(0)
