"""The closed-form oracle: a Gaussian mixture whose components belong to silos, with exact experts and an exact router.

Everything here follows from Gaussian conditioning, component by component, without the formulas under test.
"""

# Shape legend: C components, K silos, B batch, D dimensions.
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath, Path


@dataclass(frozen=True)
class GaussianMixture:
    """Components with diagonal covariance; component c belongs to silo ``silo_C[c]``."""

    mean_CD: Tensor
    variance_CD: Tensor
    weight_C: Tensor
    silo_C: Tensor
    path: Path = LinearPath()

    @property
    def num_experts(self) -> int:
        """How many silos there are."""
        return int(self.silo_C.max()) + 1

    @property
    def prior_K(self) -> list[float]:
        """Each silo's share of the data."""
        return [float(self.weight_C[self.silo_C == k].sum()) for k in range(self.num_experts)]

    def on(self, path: Path) -> "GaussianMixture":
        """Return the same data on another path."""
        return GaussianMixture(self.mean_CD, self.variance_CD, self.weight_C, self.silo_C, path)

    def log_components(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        """``log N(x; alpha m_c, alpha^2 v_c + sigma^2)``, shape (B, C)."""
        alpha = self.path.alpha(t_B)[:, None, None]
        sigma = self.path.sigma(t_B)[:, None, None]
        variance_BCD = alpha.square() * self.variance_CD.to(x_BD) + sigma.square()
        square_BCD = (x_BD[:, None] - alpha * self.mean_CD.to(x_BD)).square() / variance_BCD
        return -0.5 * (square_BCD + (2 * math.pi * variance_BCD).log()).sum(dim=-1)

    def log_joint(self, x_BD: Tensor, t_B: Tensor, weight_C: Tensor) -> Tensor:
        """``log weight_c + log N(x; alpha m_c, alpha^2 v_c + sigma^2)``, shape (B, C)."""
        return weight_C.to(x_BD).log() + self.log_components(x_BD, t_B)

    def log_density(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        """``log p(x_t)`` of all the data."""
        return self.log_joint(x_BD, t_B, self.weight_C).logsumexp(dim=-1)

    def denoised(self, x_BD: Tensor, t_B: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
        """E[x_0 | x_t] and E[eps | x_t] under the given component weights."""
        alpha = self.path.alpha(t_B)[:, None, None]
        sigma = self.path.sigma(t_B)[:, None, None]
        mean_CD = self.mean_CD.to(x_BD)
        variance_CD = self.variance_CD.to(x_BD)
        residual = (x_BD[:, None] - alpha * mean_CD) / (
            alpha.square() * variance_CD + sigma.square()
        )
        of_component = self.log_joint(x_BD, t_B, weight_C).softmax(dim=-1)[..., None]
        x_0 = (of_component * (mean_CD + alpha * variance_CD * residual)).sum(dim=1)
        return x_0, (of_component * sigma * residual).sum(dim=1)

    def weights_of(self, k: int) -> Tensor:
        """The weights of silo k's components, 0 elsewhere."""
        return torch.where(self.silo_C == k, self.weight_C, 0.0)

    def velocity_under(self, weight_C: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """The velocity of data whose components have these weights."""

        def velocity(x_BD: Tensor, t_B: Tensor) -> Tensor:
            x_0, eps = self.denoised(x_BD, t_B, weight_C)
            return self.path.d_alpha(t_B)[:, None] * x_0 + self.path.d_sigma(t_B)[:, None] * eps

        return velocity

    def velocity(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        """The velocity of all the data."""
        return self.velocity_under(self.weight_C)(x_BD, t_B)

    def expert(self, k: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The velocity of silo k's data alone."""
        return self.velocity_under(self.weights_of(k))

    def eps_expert(self, k: int) -> Callable[[Tensor, Tensor], Tensor]:
        """What a perfect eps-predicting expert of silo k answers."""
        return lambda x_BD, t_B: self.denoised(x_BD, t_B, self.weights_of(k))[1]

    def experts(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """Every silo's expert."""
        return [self.expert(k) for k in range(self.num_experts)]

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """The exact router: ``log p(x_t | k, t)``, shape (B, K)."""
        log_BC = self.log_components(x_B, t_B)
        parts = (self.weights_of(k) for k in range(self.num_experts))
        columns = [
            (log_BC + (part_C / part_C.sum()).to(x_B).log()).logsumexp(dim=-1) for part_C in parts
        ]
        return torch.stack(columns, dim=-1)

    def silo_of(self, x_BD: Tensor) -> Tensor:
        """The silo of the most likely component of finished samples."""
        return self.silo_C[
            self.log_joint(x_BD, torch.zeros(len(x_BD)), self.weight_C).argmax(dim=-1)
        ]

    def draw(self, num: int, seed: int) -> Tensor:
        """Data, shape (num, D)."""
        generator = torch.Generator().manual_seed(seed)
        c_N = torch.multinomial(self.weight_C, num, replacement=True, generator=generator)
        noise = torch.randn(
            num, self.mean_CD.shape[1], generator=generator, dtype=self.mean_CD.dtype
        )
        return self.mean_CD[c_N] + self.variance_CD[c_N].sqrt() * noise


class UninformedRouter:
    """A router that has learned nothing: every silo equally likely to have made any x_t."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """The same for every silo."""
        return torch.zeros(len(x_B), self.num_experts, dtype=x_B.dtype, device=x_B.device)


def four_silos(path: Path | None = None) -> GaussianMixture:
    """Unequal silos, (.7, .2, .08, .02), of one to three well-separated components in two dimensions."""
    mean_CD = [
        [2.0, 2.0],
        [-2.0, 2.0],
        [0.0, 3.0],
        [2.0, -2.0],
        [0.0, -3.0],
        [-2.0, -1.5],
        [-3.5, 0.0],
    ]
    variance_CD = [
        [0.04, 0.02],
        [0.02, 0.04],
        [0.03, 0.03],
        [0.05, 0.02],
        [0.02, 0.02],
        [0.03, 0.04],
        [0.02, 0.03],
    ]
    weight_C = [0.3, 0.25, 0.15, 0.12, 0.08, 0.08, 0.02]
    silo_C = [0, 0, 0, 1, 1, 2, 3]
    return GaussianMixture(
        torch.tensor(mean_CD, dtype=torch.float64),
        torch.tensor(variance_CD, dtype=torch.float64),
        torch.tensor(weight_C, dtype=torch.float64),
        torch.tensor(silo_C),
        path or LinearPath(),
    )
