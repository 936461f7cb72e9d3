"""Mixes the experts' velocities into the velocity of the pooled data, with guidance towards a condition.

``(1 + g) sum_k w_k(x|c) u_k(x|c) - g sum_k w_k(x) u_k(x)`` has a conditional and an unconditional `Branch`, each with
a prior and a posterior of its own. Without guidance one branch is enough. Where samples differ in their conditions,
there is one conditional branch for each condition.
"""

# Shape legend: K experts, B batch, G conditions, R = rows of the evaluated branches, one after the other,
# ... all data dimensions.
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm.diffusion.path import Experts, expand_time
from ddm.errors import MathError, ShapeError
from ddm.routers.base import ConditionalRouter, Router, log_posterior
from ddm.sampling.precision import InArithmetic, evaluate, full_precision


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
    return _mixed(
        experts, x_B, t_B, w_BK, None if condition_B is None else condition_B.__getitem__, together
    )


def _mixed(
    experts: Experts,
    x_B: Tensor,
    t_B: Tensor,
    w_BK: Tensor,
    told: Callable[[Tensor], Tensor] | None,
    together: int,
) -> Tensor:
    """Mix velocities as `mix_velocity` does; `told` returns the conditions of the rows that it is called with."""
    if tuple(w_BK.shape) != (len(x_B), len(experts)) or t_B.shape != x_B.shape[:1]:
        got = f"weights {tuple(w_BK.shape)} and times {tuple(t_B.shape)}"
        expected = f"weights ({len(x_B)}, {len(experts)}) and times ({len(x_B)},)"
        raise ShapeError("mixture", expected=expected, got=got)
    u_B, has_weight_BK = torch.zeros_like(x_B), w_BK > 0
    for k in has_weight_BK.any(0).nonzero()[:, 0].tolist():
        for rows in torch.split(has_weight_BK[:, k].nonzero()[:, 0], together):
            condition = () if told is None else (told(rows),)
            u_rows = evaluate(experts[k], x_B[rows], t_B[rows], *condition)
            u_B.index_add_(0, rows, expand_time(w_BK[rows, k], u_rows) * u_rows)
    return u_B


@dataclass(frozen=True)
class Branch:
    """The ensemble under one condition, or unconditional.

    Args:
        log_prior_K: log of each expert's share under the condition; minus infinity for an expert left out.
        router: models which expert's data x_t came from, under the condition; None works only where the posterior is
            the prior.
        condition: the condition, without the batch dimension; None for unconditional experts.
        router_shares: whether `log_prior_K` is that of all data, and the router says how data of the condition differ.
    """

    log_prior_K: Tensor
    router: Router | None
    condition: Tensor | None = None
    router_shares: bool = False

    @property
    def num_active(self) -> int:
        """The number of experts with a weight above 0."""
        return int(self.log_prior_K.isfinite().sum())

    def log_posterior(
        self,
        x_B: Tensor,
        t_B: Tensor,
        allowed_BK: Tensor | None = None,
        *,
        together: int,
        condition_B: Tensor | None = None,
    ) -> Tensor:
        """Return the log-posterior (B, K) among the experts allowed: the prior's at t = 1, and where one is allowed.

        Args:
            x_B: noised samples.
            t_B: their times.
            allowed_BK: all where omitted.
            together: most samples that the router evaluates at once.
            condition_B: each sample's condition, where they differ within the branch.
        """
        log_prior_BK = self.log_prior_K.to(x_B.device).expand(len(x_B), -1)
        if condition_B is None and self.condition is not None:
            condition_B = self.condition.expand(len(x_B), *self.condition.shape)
        told = isinstance(self.router, ConditionalRouter) and condition_B is not None
        condition_B = condition_B.to(x_B.device) if told and condition_B is not None else None
        if (
            self.router_shares
            and isinstance(self.router, ConditionalRouter)
            and condition_B is not None
        ):
            log_prior_BK = log_prior_BK + self.router.log_shares(condition_B).to(log_prior_BK)
        if allowed_BK is not None:
            log_prior_BK = log_prior_BK.masked_fill(~allowed_BK, -torch.inf)
        if bool((t_B >= 1).all()) or int(log_prior_BK.isfinite().sum(1).max()) == 1:
            return log_prior_BK.log_softmax(1)
        if self.router is None:
            raise MathError(
                "mixture at t < 1", expected="a router", got="an ensemble without a router"
            )
        found = []
        with full_precision(x_B):
            for rows in torch.split(torch.arange(len(x_B), device=x_B.device), together):
                router = self.router
                if isinstance(router, ConditionalRouter) and condition_B is not None:
                    router = router.given(condition_B[rows])
                found.append(log_posterior(router, x_B[rows], t_B[rows], log_prior_BK[rows]))
        return torch.cat(found)

    def posterior(
        self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None, *, together: int
    ) -> Tensor:
        """Return `log_posterior` as probabilities."""
        return self.log_posterior(x_B, t_B, allowed_BK, together=together).exp()


@dataclass(frozen=True)
class OfSamples:
    """The conditions of samples that differ in them.

    Args:
        group_B: the number of each sample's branch.
        condition_B: each sample's condition.
    """

    group_B: Tensor
    condition_B: Tensor

    def __len__(self) -> int:
        return len(self.condition_B)

    def of(self, rows: Tensor | slice) -> "OfSamples":
        """Return the conditions of some of the samples."""
        rows = rows.to(self.group_B.device) if isinstance(rows, Tensor) else rows
        return OfSamples(self.group_B[rows], self.condition_B[rows])


@dataclass(frozen=True)
class Mixture:
    """A guided mixture of experts.

    Args:
        experts: velocities on the canonical path.
        conditional: one branch, or one for each condition that samples have; their posterior decides which expert a
            sample follows.
        together: most samples that an expert or a router evaluates at once.
        unconditional: the branch that guidance leads away from; None without guidance.
        guidance: g.
        interval: the times, both included, between which guidance applies.
        of_samples: the samples' conditions, where they differ.

    Source:
        Kynkäänniemi et al. 2024, for the interval, arXiv 2404.07724.
    """

    experts: InArithmetic
    conditional: tuple[Branch, ...]
    together: int
    unconditional: Branch | None = None
    guidance: float = 0.0
    interval: tuple[float, float] = (0.0, 1.0)
    of_samples: "OfSamples | None" = None

    @property
    def num_active(self) -> int:
        """The number of experts with a weight above 0 in some branch."""
        return max(branch.num_active for branch in (*self.conditional, *self._others()))

    @property
    def active_K(self) -> Tensor:
        """The experts with a weight above 0 under some condition, bool (K,)."""
        return torch.stack([branch.log_prior_K.isfinite() for branch in self.conditional]).any(0)

    @property
    def num(self) -> int | None:
        """The number of samples, where each has a condition of its own."""
        return len(self.of_samples) if self.of_samples else None

    def of(self, rows: Tensor | slice) -> "Mixture":
        """Return the mixture of some of the samples."""
        return replace(self, of_samples=self.of_samples.of(rows)) if self.of_samples else self

    def log_posterior(self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None) -> Tensor:
        """Return the log-posterior (B, K) of the experts under each sample's condition."""
        if len(self.conditional) == 1 or self.of_samples is None:
            own = self.of_samples.condition_B if self.of_samples else None
            return self.conditional[0].log_posterior(
                x_B, t_B, allowed_BK, together=self.together, condition_B=own
            )
        found = x_B.new_empty(len(x_B), len(self.experts), dtype=torch.float64)
        group_B = self.of_samples.group_B.to(x_B.device)
        for group in range(len(self.conditional)):
            rows = (group_B == group).nonzero()[:, 0]
            if len(rows):
                allowed = None if allowed_BK is None else allowed_BK[rows]
                branch = self.conditional[group]
                found[rows] = branch.log_posterior(
                    x_B[rows], t_B[rows], allowed, together=self.together
                ).double()
        return found

    def posterior(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_posterior` as probabilities."""
        return self.log_posterior(x_B, t_B).exp()

    def weights(
        self, x_B: Tensor, t_B: Tensor, allowed_BK: Tensor | None = None, *, held: bool = False
    ) -> Tensor:
        """Return the posterior among the experts allowed of every branch that is evaluated at these times, (R, K).

        Args:
            x_B: noised samples.
            t_B: their times.
            allowed_BK: all where omitted.
            held: return those of all branches, for weights that serve at later times too.
        """
        found = [self.log_posterior(x_B, t_B, allowed_BK).exp()]
        if self._others() and (held or bool(self._guided(t_B).any())):
            found += [
                each.posterior(x_B, t_B, allowed_BK, together=self.together)
                for each in self._others()
            ]
        return torch.cat([part.to(found[0].dtype) for part in found])

    def velocity(self, x_B: Tensor, t_B: Tensor, w_RK: Tensor) -> Tensor:
        """Return the guided mixture, shape (B, ...); each expert is evaluated once for all branches."""
        num, guided_B = len(x_B), self._guided(t_B)
        copies = 1 + len(self._others()) * int(bool(guided_B.any()))
        x_R, t_R = (torch.cat([part] * copies) for part in (x_B, t_B))
        u_R = _mixed(
            self.experts, x_R, t_R, w_RK[: len(x_R)], self._conditions(x_B, copies), self.together
        )
        if copies == 1:
            return u_R
        g_B = expand_time(guided_B * self.guidance, x_B)
        return (1 + g_B) * u_R[:num] - g_B * u_R[num:]

    def _others(self) -> tuple[Branch, ...]:
        return () if self.unconditional is None else (self.unconditional,)

    def _guided(self, t_B: Tensor) -> Tensor:
        """Return whether guidance applies at each time, within the rounding of float32."""
        low, high = self.interval
        return (t_B >= low - 1e-6) & (t_B <= high + 1e-6)

    def _conditions(self, x_B: Tensor, copies: int) -> Callable[[Tensor], Tensor] | None:
        """Return what tells some rows of the evaluated branches their conditions; texts of all would take gigabytes."""
        branches, num = (self.conditional[0], *self._others())[:copies], len(x_B)
        found = [branch.condition for branch in branches if branch.condition is not None]
        if not found:
            return None
        condition_G = torch.stack(found).to(x_B.device)

        def told(rows: Tensor) -> Tensor:
            condition_R = condition_G[rows // num]
            if self.of_samples is not None:
                own = rows < num
                condition_R[own] = self.of_samples.of(rows[own]).condition_B.to(condition_R)
            return condition_R

        return told
