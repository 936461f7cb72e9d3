"""Integrates samples from noise to data, in segments between changes of experts, grouped by the expert they follow.

Within a segment each sample follows the same experts, so samples of one expert are integrated as a group: for one step
under `sample`, and from noise to data under `lock` with t_lock = 1, which loads each expert only once.
"""

# Shape legend: K experts, B batch, R = rows of all branches, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddm.diffusion.path import Velocity
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import Memory, Step, filled, follow
from ddm.sampling.mixture import Mixture
from ddm.sampling.strategies import Follow, Nucleus, Segment, Strategy, Threshold, TopK, draw_expert, segments

Tick = Callable[[int], None]
"""Called with the number of samples that have just taken a step."""


@dataclass(frozen=True)
class SolverState:
    """Samples at one time, and what a multistep solver remembers of them."""

    x_B: Tensor
    memory: Memory

    def of(self, rows: Tensor) -> "SolverState":
        """Return the state of some of the samples."""
        return SolverState(self.x_B[rows], self.memory.of(rows))


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of samples through a mixture under one strategy, solver and time grid.

    Args:
        mixture: the experts and their posteriors.
        strategy: selects the experts that a sample follows.
        times: S + 1 times, descending.
        step: the solver's step.
        router_every: see `segments`.
        tick: reports progress.
    """

    mixture: Mixture
    strategy: Strategy
    times: Sequence[float]
    step: Step
    router_every: int
    tick: Tick

    def integrate(self, x_B: Tensor, uniform_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Integrate samples from noise to data.

        Args:
            x_B: the noise, shape (B, ...).
            uniform_BS: in [0, 1), one number per step; draws the experts.

        Returns:
            The samples, and the last expert that each followed; for a mixture, one drawn from its last weights.
        """
        all_BK = torch.ones(len(x_B), len(self.mixture.experts), dtype=torch.bool, device=x_B.device)
        k_B = torch.zeros(len(x_B), dtype=torch.int64, device=x_B.device)
        state, before_BK = SolverState(x_B, Memory.none(x_B)), all_BK
        for number, segment in enumerate(segments(self.strategy, self.times, self.router_every)):
            allowed_BK = all_BK
            if segment.follow is not Follow.MEAN or segment.times[-1] == self.times[-1]:
                w_BK = self.mixture.posterior(state.x_B, filled(x_B, segment.times[0]))
                if segment.follow is Follow.SELECT:
                    allowed_BK = _selected(self.strategy, w_BK)
                k_B = draw_expert(w_BK * allowed_BK, uniform_BS[:, segment.first])
            if segment.follow is Follow.DRAW:
                allowed_BK = one_hot(k_B, all_BK.shape[1]).bool()
            state = SolverState(state.x_B, state.memory.forget((allowed_BK != before_BK).any(1)))
            # Alternating the order starts a segment with the expert that the last one left in memory.
            order = -1 if number % 2 else 1
            state, before_BK = self._integrate_segment(segment, state, allowed_BK, order), allowed_BK
        return state.x_B, k_B

    def _integrate_segment(self, segment: Segment, state: SolverState, allowed_BK: Tensor, order: int) -> SolverState:
        """Take a segment's steps; where each sample is allowed one expert, integrate the samples of each as a group."""
        if bool((allowed_BK.sum(1) > 1).any()):
            return self._follow(self._mean(segment, state.x_B, allowed_BK), segment, state)
        present = allowed_BK.any(0).nonzero()[:, 0].tolist()[::order]
        members = (allowed_BK[:, k].nonzero()[:, 0] for k in present)
        groups = [rows for group in members for rows in torch.split(group, self.mixture.together)]
        parts = [self._follow(self._one(allowed_BK[rows]), segment, state.of(rows)) for rows in groups]
        x_B = torch.cat([part.x_B for part in parts])
        memory = Memory.joined([part.memory for part in parts])
        return SolverState(x_B, memory).of(torch.cat(groups).argsort())

    def _follow(self, velocity: Velocity, segment: Segment, state: SolverState) -> SolverState:
        def step(u: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory) -> tuple[Tensor, Memory]:
            result = self.step(u, x_B, t, t_next, memory)
            self.tick(len(x_B))
            return result

        return SolverState(*follow(velocity, state.x_B, segment.times, step, state.memory))

    def _one(self, allowed_BK: Tensor) -> Velocity:
        """Return the velocity of samples that follow one expert each, for which no router is needed."""

        def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            w_BK = allowed_BK.to(x_B)
            return self.mixture.velocity(x_B, t_B, w_BK.repeat(len(self.mixture.branches), 1))

        return velocity

    def _mean(self, segment: Segment, x_B: Tensor, allowed_BK: Tensor) -> Velocity:
        """Return the velocity of mixtures, with weights of every evaluation, or of the segment's start."""
        if self.router_every == 1:
            return lambda x_B, t_B: self.mixture.velocity(x_B, t_B, self.mixture.weights(x_B, t_B, allowed_BK))
        held_RK = self.mixture.weights(x_B, filled(x_B, segment.times[0]), allowed_BK)
        return lambda x_B, t_B: self.mixture.velocity(x_B, t_B, held_RK)


def _selected(strategy: Strategy, w_BK: Tensor) -> Tensor:
    if not isinstance(strategy, TopK | Nucleus | Threshold):
        raise TypeError(f"expected a strategy with a method select, got {type(strategy).__name__}")
    return strategy.select(w_BK)


def draw_noise(samples: Sequence[int], shape: Sequence[int], seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return the noise of some samples and one uniform number per step, each sample from its own random stream."""
    noise, uniform_BS = np.empty((len(samples), *shape), np.float32), np.empty((len(samples), steps))
    for row, i in enumerate(samples):
        own = stream("sample", seed, i)
        noise[row], uniform_BS[row] = own.standard_normal(tuple(shape), dtype=np.float32), own.random(steps)
    return torch.from_numpy(noise), torch.from_numpy(uniform_BS)
