"""How samples travel from noise to data: cut where they may change experts, grouped by the expert that they follow.

Between two decisions of a strategy a sample follows one thing, so all that follow the same expert travel together for
as long as that lasts: one step under `sample`, the whole way under `lock` with t_lock = 1, where each expert is needed
once and then no more.
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
"""Told how many samples have just taken a step."""


@dataclass(frozen=True)
class Travellers:
    """Samples at one time: where they are, what a multistep solver remembers of them."""

    x_B: Tensor
    memory: Memory

    def of(self, rows: Tensor) -> "Travellers":
        """Return some of them."""
        return Travellers(self.x_B[rows], self.memory.of(rows))


@dataclass(frozen=True)
class Journey:
    """How samples are carried from noise to data.

    Args:
        mixture: what they can follow.
        strategy: what they do follow.
        times: S + 1 times, descending.
        step: the solver's.
        router_every: see `segments`.
        tick: told of progress.
    """

    mixture: Mixture
    strategy: Strategy
    times: Sequence[float]
    step: Step
    router_every: int
    tick: Tick

    def carry(self, x_B: Tensor, uniform_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Carry samples from noise to data.

        Args:
            x_B: where they start, shape (B, ...).
            uniform_BS: in [0, 1), one number per step.

        Returns:
            Where they end, and the last expert that each followed; of a mixture, one drawn from its last weights.
        """
        all_BK = torch.ones(len(x_B), len(self.mixture.experts), dtype=torch.bool, device=x_B.device)
        k_B = torch.zeros(len(x_B), dtype=torch.int64, device=x_B.device)
        travellers, before_BK = Travellers(x_B, Memory.none(x_B)), all_BK
        for number, segment in enumerate(segments(self.strategy, self.times, self.router_every)):
            allowed_BK = all_BK
            if segment.follow is not Follow.MEAN or segment.times[-1] == self.times[-1]:
                w_BK = self.mixture.posterior(travellers.x_B, filled(x_B, segment.times[0]))
                if segment.follow is Follow.SELECT:
                    allowed_BK = _selected(self.strategy, w_BK)
                k_B = draw_expert(w_BK * allowed_BK, uniform_BS[:, segment.first])
            if segment.follow is Follow.DRAW:
                allowed_BK = one_hot(k_B, all_BK.shape[1]).bool()
            travellers = Travellers(travellers.x_B, travellers.memory.forget((allowed_BK != before_BK).any(1)))
            # There and back: the last expert of one segment, still in memory, is the first of the next.
            order = -1 if number % 2 else 1
            travellers, before_BK = self._along(segment, travellers, allowed_BK, order), allowed_BK
        return travellers.x_B, k_B

    def _along(self, segment: Segment, travellers: Travellers, allowed_BK: Tensor, order: int) -> Travellers:
        """Take a segment's steps; samples that are allowed one expert travel apart from those of other experts."""
        if bool((allowed_BK.sum(1) > 1).any()):
            return self._follow(self._mean(segment, travellers.x_B, allowed_BK), segment, travellers)
        present = allowed_BK.any(0).nonzero()[:, 0].tolist()[::order]
        members = (allowed_BK[:, k].nonzero()[:, 0] for k in present)
        groups = [rows for group in members for rows in torch.split(group, self.mixture.together)]
        parts = [self._follow(self._one(allowed_BK[rows]), segment, travellers.of(rows)) for rows in groups]
        x_B = torch.cat([part.x_B for part in parts])
        memory = Memory(
            torch.cat([part.memory.x_0_B for part in parts]),
            torch.cat([part.memory.known_B for part in parts]),
            parts[0].memory.t,
        )
        return Travellers(x_B, memory).of(torch.cat(groups).argsort())

    def _follow(self, velocity: Velocity, segment: Segment, travellers: Travellers) -> Travellers:
        def step(u: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory) -> tuple[Tensor, Memory]:
            taken = self.step(u, x_B, t, t_next, memory)
            self.tick(len(x_B))
            return taken

        return Travellers(*follow(velocity, travellers.x_B, segment.times, step, travellers.memory))

    def _one(self, allowed_BK: Tensor) -> Velocity:
        """The velocity of samples that follow one expert each: no router has a say in it."""

        def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            w_BK = allowed_BK.to(x_B)
            return self.mixture.velocity(x_B, t_B, w_BK.repeat(len(self.mixture.branches), 1))

        return velocity

    def _mean(self, segment: Segment, x_B: Tensor, allowed_BK: Tensor) -> Velocity:
        """The velocity of mixtures, weighted anew at every evaluation, or as at the start where the router rests."""
        if self.router_every == 1:
            return lambda x_B, t_B: self.mixture.velocity(x_B, t_B, self.mixture.weights(x_B, t_B, allowed_BK))
        held_RK = self.mixture.weights(x_B, filled(x_B, segment.times[0]), allowed_BK)
        return lambda x_B, t_B: self.mixture.velocity(x_B, t_B, held_RK)


def _selected(strategy: Strategy, w_BK: Tensor) -> Tensor:
    if not isinstance(strategy, TopK | Nucleus | Threshold):
        raise TypeError(f"{type(strategy).__name__} selects no experts")
    return strategy.select(w_BK)


def randomness(samples: range, shape: Sequence[int], seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """Everything random about some samples: noise, and one uniform number a step, each sample from its own stream."""
    noise, uniform_BS = np.empty((len(samples), *shape), np.float32), np.empty((len(samples), steps))
    for row, i in enumerate(samples):
        own = stream("sample", seed, i)
        noise[row], uniform_BS[row] = own.standard_normal(tuple(shape), dtype=np.float32), own.random(steps)
    return torch.from_numpy(noise), torch.from_numpy(uniform_BS)
