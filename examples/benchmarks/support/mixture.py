"""Mixtures of Gaussians whose components belong to silos: exact experts, an exact router, and the exact law."""

# Shape legend: B batch, C components, K silos, D dimensions, N samples, P projections, G grid.
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import Path, Velocity

_GRID = 20_001
_PROJECTIONS = 16


@dataclass(frozen=True)
class Mixture:
    """Components of one standard deviation each in all directions.

    Args:
        mean_CD: of each component.
        std_C: of each component.
        weight_C: of each component; they sum to 1.
        silo_C: the silo that each component belongs to.
        path: the probability path.
    """

    mean_CD: Tensor
    std_C: Tensor
    weight_C: Tensor
    silo_C: Tensor
    path: Path

    @property
    def num_experts(self) -> int:
        """The number of silos, K."""
        return int(self.silo_C.max()) + 1

    @property
    def prior_K(self) -> Tensor:
        """Each silo's share."""
        return torch.zeros(self.num_experts, dtype=torch.float64).index_add(
            0, self.silo_C, self.weight_C
        )

    def _log_joint(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        alpha_B1 = self.path.alpha(t_B)[:, None]
        sigma_B1 = self.path.sigma(t_B)[:, None]
        variance_BC = (alpha_B1 * self.std_C).square() + sigma_B1.square()
        square_BC = (x_BD[:, None] - alpha_B1[..., None] * self.mean_CD).square().sum(-1)
        dims = self.mean_CD.shape[1]
        return self.weight_C.log() - square_BC / (2 * variance_BC) - dims / 2 * variance_BC.log()

    def velocity_of(self, silo: int) -> Velocity:
        """Return the velocity of a silo's data, by Gaussian conditioning.

        Given component c, the mean of x_0 is mean_c + alpha std_c^2 r and that of the noise sigma r, where
        r = (x - alpha mean_c) / (alpha^2 std_c^2 + sigma^2).
        """

        def velocity(x_BD: Tensor, t_B: Tensor) -> Tensor:
            dtype = x_BD.dtype
            x_BD = x_BD.double()
            t_B = t_B.double()
            alpha = self.path.alpha(t_B)[:, None, None]
            sigma = self.path.sigma(t_B)[:, None, None]
            std_C1 = self.std_C[:, None]
            variance_BC1 = (alpha * std_C1).square() + sigma.square()
            residual_BCD = (x_BD[:, None] - alpha * self.mean_CD) / variance_BC1
            x_0_BCD = self.mean_CD + alpha * std_C1.square() * residual_BCD
            d_alpha = self.path.d_alpha(t_B)[:, None, None]
            d_sigma = self.path.d_sigma(t_B)[:, None, None]
            velocity_BCD = d_alpha * x_0_BCD + d_sigma * sigma * residual_BCD
            log_joint_BC = self._log_joint(x_BD, t_B)
            posterior_BC = log_joint_BC.masked_fill(self.silo_C != silo, -torch.inf).softmax(1)
            return (posterior_BC[..., None] * velocity_BCD).sum(1).to(dtype)

        return velocity

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the exact router's ``log p(x_t | k, t)``, (B, K)."""
        log_BC = self._log_joint(x_B.double(), t_B.double())
        columns = [log_BC[:, self.silo_C == k].logsumexp(1) for k in range(self.num_experts)]
        return torch.stack(columns, 1) - self.prior_K.log()

    def draw(self, num: int, seed: int) -> Tensor:
        """Draw data, (num, D)."""
        random = torch.Generator().manual_seed(seed)
        c_N = torch.multinomial(self.weight_C, num, replacement=True, generator=random)
        noise_ND = torch.randn(num, self.mean_CD.shape[1], generator=random, dtype=torch.float64)
        return self.mean_CD[c_N] + self.std_C[c_N, None] * noise_ND

    def quantiles(self, num: int) -> tuple[Tensor, Tensor]:
        """Return fixed directions, (P, D), and the quantiles of the law along each for so many samples, (P, N).

        Along a direction the law is a mixture of Gaussians in one dimension.
        """
        random = torch.Generator().manual_seed(0)
        direction_PD = torch.randn(
            _PROJECTIONS, self.mean_CD.shape[1], generator=random, dtype=torch.float64
        )
        direction_PD /= direction_PD.norm(dim=1, keepdim=True)
        level_N = (torch.arange(num, dtype=torch.float64) + 0.5) / num
        quantiles = []
        for mean_C in direction_PD @ self.mean_CD.T:
            low = float((mean_C - 8 * self.std_C).min())
            high = float((mean_C + 8 * self.std_C).max())
            at_G = torch.linspace(low, high, _GRID, dtype=torch.float64)
            below_GC = (1 + torch.erf((at_G[:, None] - mean_C) / (self.std_C * math.sqrt(2)))) / 2
            quantiles.append(
                at_G[torch.searchsorted(below_GC @ self.weight_C, level_N).clamp(max=_GRID - 1)]
            )
        return direction_PD, torch.stack(quantiles)


def sliced_distance(x_ND: Tensor, direction_PD: Tensor, quantile_PN: Tensor) -> float:
    """Return the sliced Wasserstein-1 distance of samples from a law of known quantiles."""
    return float(((x_ND.double() @ direction_PD.T).sort(0).values.T - quantile_PN).abs().mean())


def plane(path: Path) -> Mixture:
    """Four silos of unequal shares in the plane, with narrow components far from each other."""
    mean = [
        [2.0, 2.0],
        [-2.0, 2.0],
        [0.0, 3.0],
        [2.0, -2.0],
        [0.0, -3.0],
        [-2.0, -1.5],
        [-3.5, 0.0],
    ]
    weight = [0.3, 0.25, 0.15, 0.12, 0.08, 0.08, 0.02]
    silo = [0, 0, 0, 1, 1, 2, 3]
    std = [0.17, 0.2, 0.15, 0.2, 0.15, 0.18, 0.15]
    double = torch.float64
    return Mixture(
        torch.tensor(mean, dtype=double),
        torch.tensor(std, dtype=double),
        torch.tensor(weight, dtype=double),
        torch.tensor(silo),
        path,
    )


def wide(path: Path) -> Mixture:
    """Eight silos in 16 dimensions, four components each, of standard deviations from .05 to .5, data of variance 1."""
    random = torch.Generator().manual_seed(3)
    num = 32
    dims = 16
    std_C = torch.logspace(math.log10(0.05), math.log10(0.5), num, dtype=torch.float64)
    std_C = std_C[torch.randperm(num, generator=random)]
    mean_CD = 0.9 * torch.randn(num, dims, generator=random, dtype=torch.float64)
    weight_C = 0.5 + torch.rand(num, generator=random, dtype=torch.float64)
    return Mixture(mean_CD, std_C, weight_C / weight_C.sum(), torch.arange(num) // 4, path)
