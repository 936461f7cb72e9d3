"""The whole idea on one page: experts that never met, one distribution.

Each silo trains an expert on its own images: a velocity u_k(x, t) from noise (t = 1) to that silo's data (t = 0). The
velocity of all the data together is a weighted mean of theirs, exactly:

    u(x, t) = sum_k w_k(x, t) u_k(x, t),    w_k(x, t) = pi_k p_t^k(x) / sum_j pi_j p_t^j(x)

w_k is the probability that a sample x noised to time t came from silo k; a router models it. A sample may follow this
mean (K evaluations a step), or one expert drawn with these probabilities (one evaluation); both have the law of the
pooled data. Following the most probable expert does not: near t = 1 that is always the largest silo.
"""

# Shape legend: K experts, B batch, N samples, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.routers.base import Router, log_prior, posterior
from ddm.sampling import SolverName, Step, filled, solver_named, uniform_times
from ddm.schedule import LinearPath, Path, Velocity, expand_time
from ddm.strategies import Follow, Full, Lock, Sample, Strategy, TopOne, draw_expert, strategy_named
from ddm.streams import stream

__all__ = ["Ensemble", "Full", "Lock", "Sample", "Samples", "Strategy", "TopOne", "mix_velocity", "strategy_named"]


def mix_velocity(u_KB: Tensor, w_BK: Tensor) -> Tensor:
    """Mix expert velocities into the velocity of the pooled data.

    ``u(x, t) = sum_k w_k(x, t) u_k(x, t)``

    Args:
        u_KB: every expert's velocity at the same (x_t, t), shape (K, B, ...), data units per unit t.
        w_BK: router posterior; entries in [0, 1], rows sum to 1.

    Returns:
        Shape (B, ...), dtype and device of ``u_KB``.

    Raises:
        ShapeError: the two disagree on K or B.

    Source:
        McAllister et al. 2025, marginal flow over a partition.
    """
    if u_KB.dim() < 2 or w_BK.dim() != 2 or w_BK.T.shape != u_KB.shape[:2]:
        got = f"velocities {tuple(u_KB.shape)} and weights {tuple(w_BK.shape)}"
        raise ShapeError("mixture", expected="velocities (K, B, ...) and weights (B, K)", got=got)
    return torch.einsum("kb...,bk->b...", u_KB, w_BK.to(u_KB))


@dataclass(frozen=True)
class Samples:
    """What an ensemble drew.

    Args:
        images: float32, shape (N, C, H, W), on the CPU, in the data's range but not clipped to it.
        expert_N: the last expert that each sample followed; under `Full`, one drawn from the last posterior.
        num_experts: K.
    """

    images: Tensor
    expert_N: Tensor
    num_experts: int

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the samples that each expert accounts for; to be held against the prior."""
        counts_K = torch.bincount(self.expert_N, minlength=self.num_experts).double()
        return tuple((counts_K / counts_K.sum()).tolist())


@dataclass(frozen=True)
class Ensemble:
    """Experts and a router that together are one generative model.

    Args:
        experts: velocities on `path`, called as ``expert(x_B, t_B)``; see `ddm.schedule.as_velocity` for others.
        router: who could have made x_t; None leaves lock with t_lock = 1.
        prior: the weight of every expert, in any unit; 0 withdraws it.
        shape: one sample, usually (C, H, W).
        path: the canonical path.
        expert_ids: the experts' names, in order.
        device: where the experts live.
        chunk_size: samples simulated together, always this many; part of what a seed means.

    Raises:
        ShapeError: prior, names or router disagree with the number of experts.
    """

    experts: Sequence[Velocity]
    router: Router | None
    prior: Sequence[float]
    shape: Sequence[int]
    path: Path = field(default_factory=LinearPath)
    expert_ids: Sequence[str] = ()
    device: torch.device | str = "cpu"
    chunk_size: int = 64

    def __post_init__(self) -> None:
        log_prior(self.prior, len(self.experts))
        others = {"names": len(self.expert_ids) or len(self.experts)}
        others["the router"] = self.router.num_experts if self.router else len(self.experts)
        for subject, number in others.items():
            if number != len(self.experts):
                raise ShapeError(subject, expected=f"{len(self.experts)} experts", got=str(number))

    @classmethod
    def open(
        cls, folder: FilePath | str, *, root: FilePath | str | bytes, state: FilePath | None = None, **options: Any
    ) -> "Ensemble":
        """Verify a release, then build its ensemble; see `ddm.artifact.open_ensemble`.

        Args:
            folder: the release.
            root: the root of trust, obtained out of band: its file, or its bytes.
            state: where versions seen before are kept, so that a rollback shows.
            options: passed on.

        Raises:
            TrustError: anything about the release does not verify.
        """
        from ddm.artifact import open_ensemble

        pinned = FilePath(root) if isinstance(root, str) else root
        return open_ensemble(FilePath(folder), root=pinned, state=state, **options)

    def velocity(self, x_B: Tensor, t_B: Tensor, prior: Sequence[float] | None = None) -> Tensor:
        """The velocity of the pooled data at (x, t): the exact mixture, all experts evaluated.

        Args:
            x_B: samples on the canonical path, shape (B, ...).
            t_B: times in [0, 1], shape (B,).
            prior: weights other than the ensemble's own.

        Returns:
            Shape (B, ...).
        """
        expand_time(t_B, x_B)
        log_prior_K = log_prior(self.prior if prior is None else prior, len(self.experts))
        return self._mean(x_B, t_B, log_prior_K=log_prior_K)

    def sample(
        self,
        num: int,
        *,
        strategy: str | Strategy = "lock",
        tau: float = 1.0,
        steps: int = 50,
        solver: SolverName = "heun",
        seed: int = 0,
        prior: Sequence[float] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """Draw samples; the same seed gives the same bytes, and sample i is the same for every `num`.

        Args:
            num: how many, N.
            strategy: a `Strategy`, or its name: full, sample, lock, top-1.
            tau: with the name lock, from which time on a sample keeps its expert.
            steps: solver steps, evenly spaced in t.
            solver: `heun` (two evaluations a step) or `euler`.
            seed: any integer >= 0.
            prior: weights other than the ensemble's own: equal silos, or 0 to withdraw one.
            on_progress: told (solver steps done, solver steps in all).

        Raises:
            MathError: an argument out of range, or a strategy that needs a router where there is none.
        """
        if num < 1 or seed < 0:
            raise MathError("sample", expected="num >= 1 and seed >= 0", got=f"{num} and {seed}")
        chosen = strategy_named(strategy, tau=tau) if isinstance(strategy, str) else strategy
        log_prior_K = log_prior(self.prior if prior is None else prior, len(self.experts))
        if chosen.needs_router and self.router is None and int(log_prior_K.isfinite().sum()) > 1:
            remedy = "Use the strategy lock with t_lock = 1, or an ensemble that has a router."
            raise MathError(f"strategy {type(chosen).__name__}", expected="a router", got="none", remedy=remedy)
        recipe = _Recipe(chosen, uniform_times(steps), solver_named(solver), log_prior_K, seed)
        num_chunks = -(-num // self.chunk_size)
        done = count(1)

        def tick() -> None:
            if on_progress:
                on_progress(next(done), num_chunks * steps)

        with torch.inference_mode():
            chunks = [self._chunk(recipe, chunk * self.chunk_size, tick) for chunk in range(num_chunks)]
        images, expert_N = (torch.cat(parts)[:num].cpu() for parts in zip(*chunks, strict=True))
        return Samples(images, expert_N, len(self.experts))

    def _chunk(self, recipe: "_Recipe", first: int, tick: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Simulate one whole chunk, so that batches never depend on how many samples were asked for."""
        times = recipe.times
        x_B, uniform_BS = self._randomness(range(first, first + self.chunk_size), recipe.seed, len(times) - 1)
        k_B = torch.zeros(self.chunk_size, dtype=torch.int64, device=x_B.device)
        mean = partial(self._mean, log_prior_K=recipe.log_prior_K)
        for n, (t, t_next) in enumerate(pairwise(times)):
            follow = recipe.strategy.follow(t, times[n - 1] if n else float("inf"))
            if follow is Follow.ARGMAX:
                k_B = self._weights(x_B, filled(x_B, t), recipe.log_prior_K).argmax(dim=-1)
            elif follow is Follow.DRAW or (follow is Follow.MEAN and n == len(times) - 2):
                k_B = draw_expert(self._weights(x_B, filled(x_B, t), recipe.log_prior_K), uniform_BS[:, n])
            x_B = recipe.step(mean if follow is Follow.MEAN else self._following(k_B), x_B, t, t_next)
            tick()
        return x_B, k_B

    def _randomness(self, samples: range, seed: int, steps: int) -> tuple[Tensor, Tensor]:
        """Everything random about some samples: x_1, and one uniform number a step, each sample from its own stream."""
        streams = [stream("sample", seed, i) for i in samples]
        noise = np.stack([own.standard_normal(tuple(self.shape), dtype=np.float32) for own in streams])
        uniform = np.stack([own.random(steps) for own in streams])
        x_1 = torch.from_numpy(noise).to(self.device) * self.path.sigma(torch.ones(()))
        return x_1, torch.from_numpy(uniform).to(self.device)

    def _weights(self, x_B: Tensor, t_B: Tensor, log_prior_K: Tensor) -> Tensor:
        """The posterior (B, K); at t = 1, and with one expert left, it is the prior whatever x is."""
        if bool((t_B >= 1).all()) or int(log_prior_K.isfinite().sum()) == 1:
            return log_prior_K.exp().to(x_B.device).expand(x_B.shape[0], -1)
        if self.router is None:
            raise MathError("mixture at t < 1", expected="a router", got="none")
        return posterior(self.router, x_B, t_B, log_prior_K)

    def _mean(self, x_B: Tensor, t_B: Tensor, *, log_prior_K: Tensor) -> Tensor:
        """Every expert that has a weight, mixed; one without is never asked."""
        active = log_prior_K.isfinite().nonzero()[:, 0].tolist()
        u_KB = torch.stack([self.experts[k](x_B, t_B) for k in active])
        return mix_velocity(u_KB, self._weights(x_B, t_B, log_prior_K)[:, active])

    def _following(self, k_B: Tensor) -> Velocity:
        """Each sample follows its own expert, held for the whole step; each expert is asked once."""
        groups = [(k, (k_B == k).nonzero()[:, 0]) for k in sorted(set(k_B.tolist()))]

        def followed(x_B: Tensor, t_B: Tensor) -> Tensor:
            u_B = torch.empty_like(x_B)
            for k, members in groups:
                u_B[members] = self.experts[k](x_B[members], t_B[members])
            return u_B

        return followed


@dataclass(frozen=True)
class _Recipe:
    """How one call of `Ensemble.sample` draws, checked."""

    strategy: Strategy
    times: Sequence[float]
    step: Step
    log_prior_K: Tensor
    seed: int
