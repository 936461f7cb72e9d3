"""The velocity of the pooled data at a point: experts' velocities, weighted, and guided by a condition.

``(1 + g) sum_k w_k(x|c) u_k(x|c) - g sum_k w_k(x) u_k(x)``: one `Branch` with the condition and one without, each with
its own prior and its own posterior. Without guidance one branch is left.
"""

# Shape legend: K experts, B batch, R = rows of all branches, branch by branch, ... all data dimensions.
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import Experts, expand_time
from ddm.errors import MathError, ShapeError
from ddm.routers.base import Router, posterior


def mix_velocity(
    experts: Experts,
    x_B: Tensor,
    t_B: Tensor,
    w_BK: Tensor,
    condition_B: Tensor | None = None,
    *,
    together: int = 1 << 30,
) -> Tensor:
    """Mix expert velocities into the velocity of the pooled data.

    ``u(x, t) = sum_k w_k(x, t) u_k(x, t)``

    Each expert is visited once, and asked only about samples in which it has a weight.

    Args:
        experts: velocities.
        x_B: samples on the canonical path, shape (B, ...).
        t_B: times in [0, 1], shape (B,).
        w_BK: router posterior; entries in [0, 1], rows sum to 1.
        condition_B: what conditional experts are told, one row per sample; None where they have no condition.
        together: most samples that an expert is given at once.

    Returns:
        Shape (B, ...), data units per unit t, dtype and device of ``x_B``.

    Raises:
        ShapeError: weights for other experts or samples.

    Source:
        McAllister et al. 2025, marginal flow over a partition.
    """
    if tuple(w_BK.shape) != (len(x_B), len(experts)) or t_B.shape != x_B.shape[:1]:
        got = f"weights {tuple(w_BK.shape)} and times {tuple(t_B.shape)}"
        raise ShapeError("mixture", expected=f"weights ({len(x_B)}, {len(experts)}), one time a sample", got=got)
    u_B, has_weight_BK = torch.zeros_like(x_B), w_BK > 0
    for k in has_weight_BK.any(0).nonzero()[:, 0].tolist():
        for rows in torch.split(has_weight_BK[:, k].nonzero()[:, 0], together):
            told = () if condition_B is None else (condition_B[rows],)
            u_rows = experts[k](x_B[rows], t_B[rows], *told)
            u_B.index_add_(0, rows, expand_time(w_BK[rows, k], u_rows) * u_rows)
    return u_B


@dataclass(frozen=True)
class Branch:
    """The ensemble under one condition, or under none.

    Args:
        factor: what its velocity is multiplied by: 1 + g, or -g.
        log_prior_K: log of every expert's share under the condition; minus infinity leaves one out.
        router: who could have made x_t under the condition; None leaves what needs no router.
        condition: what every sample's expert is told, without the batch dimension; None where experts have none.
    """

    factor: float
    log_prior_K: Tensor
    router: Router | None
    condition: Tensor | None = None

    def posterior(self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None, *, together: int) -> Tensor:
        """Return the posterior (B, K) among the experts allowed; at t = 1, and with one left, it is the prior."""
        log_prior_BK = self.log_prior_K.to(x_B.device).expand(len(x_B), -1)
        if allowed_BK is not None:
            log_prior_BK = log_prior_BK.masked_fill(~allowed_BK, -torch.inf)
        if bool((t_B >= 1).all()) or int(log_prior_BK.isfinite().sum(1).max()) == 1:
            return log_prior_BK.softmax(1)
        if self.router is None:
            raise MathError("mixture at t < 1", expected="a router", got="none")
        parts = zip(*(torch.split(each, together) for each in (x_B, t_B, log_prior_BK)), strict=True)
        return torch.cat([posterior(self.router, *part) for part in parts])


@dataclass(frozen=True)
class Mixture:
    """Experts under every branch that counts.

    Args:
        experts: velocities on the canonical path.
        branches: the first one decides which expert a sample follows.
        together: most samples that an expert or a router is given at once.
    """

    experts: Experts
    branches: tuple[Branch, ...]
    together: int

    @property
    def num_active(self) -> int:
        """The number of experts that may be asked."""
        return max(int(branch.log_prior_K.isfinite().sum()) for branch in self.branches)

    def posterior(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the posterior (B, K) under the condition."""
        return self.branches[0].posterior(x_B, t_B, together=self.together)

    def weights(self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None) -> Tensor:
        """Return every branch's posterior among the experts allowed, (R, K)."""
        found = [branch.posterior(x_B, t_B, allowed_BK, together=self.together) for branch in self.branches]
        return torch.cat(found)

    def velocity(self, x_B: Tensor, t_B: Tensor, w_RK: Tensor) -> Tensor:
        """Return the guided mixture, shape (B, ...); each expert is visited once for all branches."""
        num, told = len(x_B), [branch.condition for branch in self.branches]
        x_R, t_R = (torch.cat([part] * len(told)) for part in (x_B, t_B))
        u_RB = mix_velocity(self.experts, x_R, t_R, w_RK, _rows(told, num), together=self.together)
        parts = zip(self.branches, torch.split(u_RB, num), strict=True)
        return torch.stack([branch.factor * u_B for branch, u_B in parts]).sum(0)


def _rows(told: Sequence[Tensor | None], num: int) -> Tensor | None:
    """One row per sample of what every branch's experts are told."""
    if told[0] is None:
        return None
    return torch.cat([each.expand(num, *each.shape) for each in told if each is not None])
