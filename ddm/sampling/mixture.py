"""Mixes the experts' velocities into the velocity of the pooled data, with guidance towards a condition.

``(1 + g) sum_k w_k(x|c) u_k(x|c) - g sum_k w_k(x) u_k(x)`` has a conditional and an unconditional `Branch`, each with
a prior and a posterior of its own. Without guidance one branch is enough.
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

    Each expert is evaluated once, and only on the samples in which its weight is above 0.

    Args:
        experts: velocities.
        x_B: samples on the canonical path, shape (B, ...).
        t_B: times in [0, 1], shape (B,).
        w_BK: router posterior; entries in [0, 1], rows sum to 1.
        condition_B: the experts' condition, one row per sample; None for unconditional experts.
        together: most samples that an expert evaluates at once.

    Returns:
        Shape (B, ...), data units per unit t, dtype and device of ``x_B``.

    Raises:
        ShapeError: weights for another number of experts or samples, or not one time per sample.

    Source:
        McAllister et al. 2025, marginal flow over a partition.
    """
    if tuple(w_BK.shape) != (len(x_B), len(experts)) or t_B.shape != x_B.shape[:1]:
        got = f"weights {tuple(w_BK.shape)} and times {tuple(t_B.shape)}"
        expected = f"weights ({len(x_B)}, {len(experts)}) and times ({len(x_B)},)"
        raise ShapeError("mixture", expected=expected, got=got)
    u_B, has_weight_BK = torch.zeros_like(x_B), w_BK > 0
    for k in has_weight_BK.any(0).nonzero()[:, 0].tolist():
        for rows in torch.split(has_weight_BK[:, k].nonzero()[:, 0], together):
            condition = () if condition_B is None else (condition_B[rows],)
            u_rows = experts[k](x_B[rows], t_B[rows], *condition)
            u_B.index_add_(0, rows, expand_time(w_BK[rows, k], u_rows) * u_rows)
    return u_B


@dataclass(frozen=True)
class Branch:
    """The ensemble under one condition, or unconditional.

    Args:
        factor: the factor of its velocity in the guided mixture: 1 + g, or -g.
        log_prior_K: log of each expert's share under the condition; minus infinity for an expert left out.
        router: models which expert's data x_t came from, under the condition; None works only where the posterior is
            the prior.
        condition: the condition of every sample, without the batch dimension; None for unconditional experts.
    """

    factor: float
    log_prior_K: Tensor
    router: Router | None
    condition: Tensor | None = None

    def posterior(self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None, *, together: int) -> Tensor:
        """Return the posterior (B, K) among the experts allowed; it is the prior at t = 1, and where one is allowed."""
        log_prior_BK = self.log_prior_K.to(x_B.device).expand(len(x_B), -1)
        if allowed_BK is not None:
            log_prior_BK = log_prior_BK.masked_fill(~allowed_BK, -torch.inf)
        if bool((t_B >= 1).all()) or int(log_prior_BK.isfinite().sum(1).max()) == 1:
            return log_prior_BK.softmax(1)
        if self.router is None:
            raise MathError("mixture at t < 1", expected="a router", got="an ensemble without a router")
        parts = zip(*(torch.split(each, together) for each in (x_B, t_B, log_prior_BK)), strict=True)
        return torch.cat([posterior(self.router, *part) for part in parts])


@dataclass(frozen=True)
class Mixture:
    """A guided mixture of experts.

    Args:
        experts: velocities on the canonical path.
        branches: the conditional one, or the only one, first; its posterior decides which expert a sample follows.
        together: most samples that an expert or a router evaluates at once.
    """

    experts: Experts
    branches: tuple[Branch, ...]
    together: int

    @property
    def num_active(self) -> int:
        """The number of experts with a weight above 0 in some branch."""
        return max(int(branch.log_prior_K.isfinite().sum()) for branch in self.branches)

    def posterior(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the posterior (B, K) of the first branch."""
        return self.branches[0].posterior(x_B, t_B, together=self.together)

    def weights(self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None) -> Tensor:
        """Return every branch's posterior among the experts allowed, (R, K)."""
        found = [branch.posterior(x_B, t_B, allowed_BK, together=self.together) for branch in self.branches]
        return torch.cat(found)

    def velocity(self, x_B: Tensor, t_B: Tensor, w_RK: Tensor) -> Tensor:
        """Return the guided mixture, shape (B, ...); each expert is evaluated once for all branches."""
        num, conditions = len(x_B), [branch.condition for branch in self.branches]
        x_R, t_R = (torch.cat([part] * len(conditions)) for part in (x_B, t_B))
        u_RB = mix_velocity(self.experts, x_R, t_R, w_RK, _rows(conditions, num), together=self.together)
        parts = zip(self.branches, torch.split(u_RB, num), strict=True)
        return torch.stack([branch.factor * u_B for branch, u_B in parts]).sum(0)


def _rows(conditions: Sequence[Tensor | None], num: int) -> Tensor | None:
    """Return every branch's condition, one row per sample."""
    if conditions[0] is None:
        return None
    return torch.cat([each.expand(num, *each.shape) for each in conditions if each is not None])
