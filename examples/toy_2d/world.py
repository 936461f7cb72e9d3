"""The toy's data: three islands in the plane, a Gaussian mixture whose velocities are known in closed form.

Component c has mean m_c, variance s_c^2 in both directions, and belongs to one silo. At time t of the linear path it is
``N((1 - t) m_c, ((1 - t)^2 s_c^2 + t^2) I)``; all else is Bayes' rule over components.
"""

# Shape legend: B batch, C components, K silos, D = 2 dimensions.
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

SILOS = ("north", "east", "west")
SHARES = (0.55, 0.30, 0.15)


@dataclass(frozen=True)
class ToyWorld:
    """The mixture.

    Args:
        mean_CD: of each component.
        std_C: of each component, the same in both directions.
        weight_C: of each component; they sum to 1.
        silo_C: the silo that each component belongs to.
    """

    mean_CD: Tensor
    std_C: Tensor
    weight_C: Tensor
    silo_C: Tensor

    def log_joint(self, x_BD: Tensor, t_B: Tensor, silo: int | None = None) -> Tensor:
        """``log weight_c + log p_t(x | c)`` up to a common constant, (B, C); of all components or of one silo's."""
        t_B1 = t_B[:, None]
        mean_BCD = (1 - t_B1)[..., None] * self.mean_CD
        variance_BC = ((1 - t_B1) * self.std_C).square() + t_B1.square()
        square_BC = (x_BD[:, None] - mean_BCD).square().sum(-1)
        log_BC = self.weight_C.log() - variance_BC.log() - square_BC / (2 * variance_BC)
        return log_BC if silo is None else log_BC.masked_fill(self.silo_C != silo, -torch.inf)

    def velocity(self, x_BD: Tensor, t_B: Tensor, silo: int | None = None) -> Tensor:
        """``u = E[eps - x_0 | x_t]``, of all the data or of one silo's, (B, D)."""
        t_B1 = t_B[:, None]
        variance_BC = ((1 - t_B1) * self.std_C).square() + t_B1.square()
        residual_BCD = (x_BD[:, None] - (1 - t_B1)[..., None] * self.mean_CD) / variance_BC[
            ..., None
        ]
        x_0_BCD = self.mean_CD + ((1 - t_B1) * self.std_C.square())[..., None] * residual_BCD
        of_component_BC = self.log_joint(x_BD, t_B, silo).softmax(1)
        return (of_component_BC[..., None] * (t_B1[..., None] * residual_BCD - x_0_BCD)).sum(1)

    def density(self, x_BD: Tensor, t: float, silo: int | None = None) -> Tensor:
        """``p_t(x)`` up to a constant, (B,)."""
        return (
            self.log_joint(x_BD, torch.full((len(x_BD),), t, dtype=x_BD.dtype), silo)
            .logsumexp(1)
            .exp()
        )

    def draw(self, num: int, seed: int, silo: int | None = None) -> Tensor:
        """Data, of all silos or of one, (num, D), float32."""
        random = torch.Generator().manual_seed(seed)
        weight_C = self.weight_C if silo is None else self.weight_C * (self.silo_C == silo)
        c_N = torch.multinomial(weight_C, num, replacement=True, generator=random)
        noise_ND = torch.randn(num, 2, generator=random, dtype=self.mean_CD.dtype)
        return (self.mean_CD[c_N] + self.std_C[c_N, None] * noise_ND).float()


def islands() -> ToyWorld:
    """Three arms of a whirl, one per silo, of unequal shares; near the middle they come close to each other."""
    along = torch.linspace(0.0, 1.0, 7, dtype=torch.float64)
    mean = []
    weight = []
    for silo, share in enumerate(SHARES):
        angle = pi / 2 - silo * 2 * pi / 3 + 1.9 * along
        radius = 0.55 + 2.1 * along
        mean.append(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
        weight.append(share * torch.full_like(along, 1 / len(along)))
    std_C = (0.16 + 0.12 * along).repeat(len(SHARES))
    return ToyWorld(
        torch.cat(mean),
        std_C,
        torch.cat(weight),
        torch.arange(len(SHARES)).repeat_interleave(len(along)),
    )
