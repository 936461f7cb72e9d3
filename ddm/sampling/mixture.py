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
from ddm.sampling.precision import CastExperts, evaluate, full_precision

ConditionOfRows = Callable[[Tensor], Tensor]
"""Called with the numbers of some rows; returns their conditions, as experts receive them."""

# Times are compared within the rounding of float32.
_TIME_TOLERANCE = 1e-6


def mix_velocity(
    experts: Experts,
    x_B: Tensor,
    t_B: Tensor,
    w_BK: Tensor,
    condition_B: Tensor | None = None,
    *,
    chunk_size: int = 1 << 30,
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
        chunk_size: most samples that an expert evaluates at once.

    Returns:
        Shape (B, ...), data units per unit t, dtype and device of ``x_B``.

    Raises:
        ShapeError: weights for another number of experts or samples, or not one time per sample.

    Source:
        McAllister et al. 2025, marginal flow over a partition.
    """
    condition_of_rows = None if condition_B is None else condition_B.__getitem__
    return _mix(experts, x_B, t_B, w_BK, condition_of_rows, chunk_size)


def _mix(
    experts: Experts,
    x_B: Tensor,
    t_B: Tensor,
    w_BK: Tensor,
    condition_of_rows: ConditionOfRows | None,
    chunk_size: int,
) -> Tensor:
    """Mix velocities as `mix_velocity` does, with conditions that are made for the rows of one chunk at a time."""
    num_samples = len(x_B)
    num_experts = len(experts)
    if tuple(w_BK.shape) != (num_samples, num_experts) or t_B.shape != (num_samples,):
        expected = f"weights ({num_samples}, {num_experts}) and times ({num_samples},)"
        got = f"weights {tuple(w_BK.shape)} and times {tuple(t_B.shape)}"
        raise ShapeError("mixture", expected=expected, got=got)
    u_B = torch.zeros_like(x_B)
    has_weight_BK = w_BK > 0
    used_experts = has_weight_BK.any(0).nonzero()[:, 0].tolist()
    for k in used_experts:
        rows_of_expert = has_weight_BK[:, k].nonzero()[:, 0]
        for rows in torch.split(rows_of_expert, chunk_size):
            condition = []
            if condition_of_rows is not None:
                condition.append(condition_of_rows(rows))
            u_rows = evaluate(experts[k], x_B[rows], t_B[rows], *condition)
            # The sum is formed expert by expert: one velocity of each at the same time would take K times the memory.
            weight = expand_time(w_BK[rows, k], u_rows)
            u_B.index_add_(0, rows, weight * u_rows)
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
        chunk_size: int,
        condition_B: Tensor | None = None,
    ) -> Tensor:
        """Return the log-posterior (B, K) among the experts allowed: the prior's at t = 1, and where one is allowed.

        Args:
            x_B: noised samples.
            t_B: their times.
            allowed_BK: all where omitted.
            chunk_size: most samples that the router evaluates at once.
            condition_B: each sample's condition, where they differ within the branch.
        """
        condition_B = self._condition_for_router(x_B, condition_B)
        log_prior_BK = self._log_prior(x_B, condition_B)
        if allowed_BK is not None:
            log_prior_BK = log_prior_BK.masked_fill(~allowed_BK, -torch.inf)
        # Pure noise tells nothing, and where one expert is left there is nothing to tell: no router is needed.
        is_pure_noise = bool((t_B >= 1).all())
        if is_pure_noise or int(log_prior_BK.isfinite().sum(1).max()) == 1:
            return log_prior_BK.log_softmax(1)
        if self.router is None:
            raise MathError(
                "mixture at t < 1",
                expected="a router",
                got="an ensemble without a router",
                remedy="Use an ensemble that has a router; the strategy lock with t_lock = 1 needs none.",
            )
        chunks = []
        # Differences of large log-likelihoods decide the posterior, and bfloat16 would round them away.
        with full_precision(x_B):
            all_rows = torch.arange(len(x_B), device=x_B.device)
            for rows in torch.split(all_rows, chunk_size):
                router = self.router
                if isinstance(router, ConditionalRouter) and condition_B is not None:
                    router = router.given(condition_B[rows])
                log_w_BK = log_posterior(router, x_B[rows], t_B[rows], log_prior_BK[rows])
                chunks.append(log_w_BK)
        return torch.cat(chunks)

    def posterior(
        self,
        x_B: Tensor,
        t_B: Tensor,
        allowed_BK: Tensor | None = None,
        *,
        chunk_size: int,
    ) -> Tensor:
        """Return `log_posterior` as probabilities."""
        log_w_BK = self.log_posterior(x_B, t_B, allowed_BK, chunk_size=chunk_size)
        return log_w_BK.exp()

    def _condition_for_router(self, x_B: Tensor, condition_B: Tensor | None) -> Tensor | None:
        """Return each sample's condition, None for a router that reads none."""
        if not isinstance(self.router, ConditionalRouter):
            return None
        if condition_B is None and self.condition is not None:
            condition_B = self.condition.expand(len(x_B), *self.condition.shape)
        if condition_B is None:
            return None
        return condition_B.to(x_B.device)

    def _log_prior(self, x_B: Tensor, condition_B: Tensor | None) -> Tensor:
        """Return the log-prior of each sample, (B, K)."""
        log_prior_BK = self.log_prior_K.to(x_B.device).expand(len(x_B), -1)
        if not self.router_shares or condition_B is None:
            return log_prior_BK
        if not isinstance(self.router, ConditionalRouter):
            return log_prior_BK
        log_shares_BK = self.router.log_shares(condition_B)
        return log_prior_BK + log_shares_BK.to(log_prior_BK)


@dataclass(frozen=True)
class SampleConditions:
    """The conditions of samples that differ in them.

    Args:
        branch_B: the number of each sample's branch.
        condition_B: each sample's condition.
    """

    branch_B: Tensor
    condition_B: Tensor

    def __len__(self) -> int:
        return len(self.condition_B)

    def of(self, rows: Tensor | slice) -> "SampleConditions":
        """Return the conditions of some of the samples."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.branch_B.device)
        return SampleConditions(self.branch_B[rows], self.condition_B[rows])


@dataclass(frozen=True)
class Mixture:
    """A guided mixture of experts.

    Args:
        experts: velocities on the canonical path.
        conditional: one branch, or one for each condition that samples have; their posterior decides which expert a
            sample follows.
        chunk_size: most samples that an expert or a router evaluates at once.
        unconditional: the branch that guidance leads away from; None without guidance.
        guidance: g.
        interval: the times, both included, between which guidance applies.
        sample_conditions: the samples' conditions, where they differ.

    Source:
        Kynkäänniemi et al. 2024, for the interval, arXiv 2404.07724.
    """

    experts: CastExperts
    conditional: tuple[Branch, ...]
    chunk_size: int
    unconditional: Branch | None = None
    guidance: float = 0.0
    interval: tuple[float, float] = (0.0, 1.0)
    sample_conditions: SampleConditions | None = None

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, the conditional ones first."""
        if self.unconditional is None:
            return self.conditional
        return (*self.conditional, self.unconditional)

    @property
    def num_active(self) -> int:
        """The number of experts with a weight above 0 in some branch."""
        return max(branch.num_active for branch in self.branches)

    @property
    def active_K(self) -> Tensor:
        """The experts with a weight above 0 under some condition, bool (K,)."""
        active = [branch.log_prior_K.isfinite() for branch in self.conditional]
        return torch.stack(active).any(0)

    @property
    def num_conditions(self) -> int | None:
        """The number of samples, where each has a condition of its own."""
        if self.sample_conditions is None:
            return None
        return len(self.sample_conditions)

    def of(self, rows: Tensor | slice) -> "Mixture":
        """Return the mixture of some of the samples."""
        if self.sample_conditions is None:
            return self
        return replace(self, sample_conditions=self.sample_conditions.of(rows))

    def log_posterior(
        self,
        x_B: Tensor,
        t_B: Tensor,
        allowed_BK: Tensor | None = None,
    ) -> Tensor:
        """Return the log-posterior (B, K) of the experts under each sample's condition."""
        conditions = self.sample_conditions
        if conditions is None:
            (branch,) = self.conditional
            return branch.log_posterior(x_B, t_B, allowed_BK, chunk_size=self.chunk_size)
        if len(self.conditional) == 1:
            # Texts: one branch, in which each sample has a condition of its own.
            return self.conditional[0].log_posterior(
                x_B,
                t_B,
                allowed_BK,
                chunk_size=self.chunk_size,
                condition_B=conditions.condition_B,
            )
        # Classes: each has a branch, since the shares of the experts differ from class to class.
        # In float64, as priors are, whatever the dtype of the samples.
        log_w_BK = x_B.new_empty(len(x_B), len(self.experts), dtype=torch.float64)
        branch_B = conditions.branch_B.to(x_B.device)
        for number, branch in enumerate(self.conditional):
            rows = (branch_B == number).nonzero()[:, 0]
            if not len(rows):
                continue
            allowed = allowed_BK
            if allowed_BK is not None:
                allowed = allowed_BK[rows]
            log_w = branch.log_posterior(
                x_B[rows],
                t_B[rows],
                allowed,
                chunk_size=self.chunk_size,
            )
            log_w_BK[rows] = log_w.double()
        return log_w_BK

    def posterior(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_posterior` as probabilities."""
        return self.log_posterior(x_B, t_B).exp()

    def weights(
        self,
        x_B: Tensor,
        t_B: Tensor,
        allowed_BK: Tensor | None = None,
        *,
        of_all_branches: bool = False,
    ) -> Tensor:
        """Return the posterior among the experts allowed of every branch that is evaluated at these times, (R, K).

        Args:
            x_B: noised samples.
            t_B: their times.
            allowed_BK: all where omitted.
            of_all_branches: whether the weights serve at later times too, when guidance may apply.
        """
        w_BK = self.log_posterior(x_B, t_B, allowed_BK).exp()
        if self.unconditional is None:
            return w_BK
        if not of_all_branches and not bool(self._is_guided(t_B).any()):
            return w_BK
        unconditional_BK = self.unconditional.posterior(
            x_B, t_B, allowed_BK, chunk_size=self.chunk_size
        )
        return torch.cat([w_BK, unconditional_BK.to(w_BK.dtype)])

    def velocity(self, x_B: Tensor, t_B: Tensor, w_RK: Tensor) -> Tensor:
        """Return the guided mixture, shape (B, ...); each expert is evaluated once for all branches."""
        num_samples = len(x_B)
        is_guided_B = self._is_guided(t_B)
        guides = self.unconditional is not None and bool(is_guided_B.any())
        # The unconditional branch is a second copy of the samples, so that an expert is evaluated once for both.
        copies = 1
        if guides:
            copies = 2
        x_R = torch.cat([x_B] * copies)
        t_R = torch.cat([t_B] * copies)
        # Weights of a segment's start may have rows of a branch that is not evaluated now.
        w_RK = w_RK[: len(x_R)]
        condition_of_rows = self._condition_of_rows(x_B, copies)
        u_R = _mix(self.experts, x_R, t_R, w_RK, condition_of_rows, self.chunk_size)
        if not guides:
            return u_R
        conditional_B = u_R[:num_samples]
        unconditional_B = u_R[num_samples:]
        # Outside of the interval g is 0, which leaves the conditional velocity alone.
        g_B = expand_time(is_guided_B * self.guidance, x_B)
        return (1 + g_B) * conditional_B - g_B * unconditional_B

    def _is_guided(self, t_B: Tensor) -> Tensor:
        """Return whether guidance applies at each time."""
        low, high = self.interval
        return (t_B >= low - _TIME_TOLERANCE) & (t_B <= high + _TIME_TOLERANCE)

    def _condition_of_rows(self, x_B: Tensor, copies: int) -> ConditionOfRows | None:
        """Return a function for the conditions of rows of the evaluated branches; None for unconditional experts."""
        branches = [self.conditional[0]]
        if copies == 2 and self.unconditional is not None:
            branches.append(self.unconditional)
        conditions = [branch.condition for branch in branches if branch.condition is not None]
        if not conditions:
            return None
        condition_G = torch.stack(conditions).to(x_B.device)
        num_samples = len(x_B)

        def condition_of_rows(rows: Tensor) -> Tensor:
            # Made for a few rows at a time: texts of all samples would take gigabytes.
            condition_R = condition_G[rows // num_samples]
            if self.sample_conditions is not None:
                is_conditional = rows < num_samples
                own = self.sample_conditions.of(rows[is_conditional]).condition_B
                condition_R[is_conditional] = own.to(condition_R)
            return condition_R

        return condition_of_rows
