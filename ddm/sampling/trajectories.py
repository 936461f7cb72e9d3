"""Integrates samples from noise to data, in segments between changes of experts, grouped by the expert they follow.

Within a segment each sample follows the same experts, so samples of one expert are integrated as a group: for one step
under `sample`, and from noise to data under `lock` with t_lock = 1, which loads each expert only once.
"""

# Shape legend: K experts, B batch, R = rows of all branches, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddm.diffusion.multistep import Memory, filled
from ddm.diffusion.path import Velocity
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import Step, follow
from ddm.errors import MathError, ShapeError
from ddm.sampling.mixture import Mixture
from ddm.sampling.provenance import Log
from ddm.sampling.strategies import (
    Follow,
    Nucleus,
    Segment,
    Strategy,
    Threshold,
    TopK,
    draw_expert,
    segments,
)

Tick = Callable[[int], None]
"""Called with the number of samples that have just taken a step."""

Callback = Callable[[int, float, Tensor, Tensor], Tensor | None]
"""Called after each step as ``callback(step, t, x, experts)``.

`step` counts from 0, `t` is the time that the step reached, `x` are all samples there, (N, ...), on the experts'
device, and `experts` says which experts each of them followed during the step, bool (N, K). A tensor that it returns
takes the place of `x`.
"""


@dataclass(frozen=True)
class SolverState:
    """Samples at one time, and what a multistep solver remembers of them."""

    x_B: Tensor
    memory: Memory

    def of(self, rows: Tensor | slice) -> "SolverState":
        """Return the state of some of the samples."""
        return SolverState(self.x_B[rows], self.memory.of(rows))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Underway:
    """Samples somewhere between noise and data.

    Args:
        state: where they are.
        allowed_BK: the experts that they followed last.
        k_B: the last expert that was drawn for each.
        t_before: where their last step began; infinite before the first one.
        num_steps: how many steps they have taken.
    """

    state: SolverState
    allowed_BK: Tensor
    k_B: Tensor
    t_before: float = inf
    num_steps: int = 0

    def at(self, x_B: Tensor) -> "Underway":
        """Return the samples moved elsewhere; a multistep solver starts anew."""
        return replace(self, state=SolverState(x_B, Memory.none(x_B)))


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
        callback: see `Callback`; samples are brought together after every step for it.
        log: notes which experts samples follow.
    """

    mixture: Mixture
    strategy: Strategy
    times: Sequence[float]
    step: Step
    router_every: int
    tick: Tick
    callback: Callback | None = None
    log: Log | None = None

    def __post_init__(self) -> None:
        branches = self.mixture.conditional + (
            (self.mixture.unconditional,) if self.mixture.unconditional else ()
        )
        asked = self.strategy.needs_router or self.times[0] < 1
        if (
            asked
            and self.mixture.num_active > 1
            and any(branch.router is None for branch in branches)
        ):
            remedy = "Use the strategy lock with t_lock = 1, from pure noise on, or an ensemble that has a router."
            subject, got = (
                f"strategy {type(self.strategy).__name__}",
                "an ensemble without a router",
            )
            raise MathError(subject, expected="a router", got=got, remedy=remedy)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of samples."""
        return self.mixture.experts.dtype

    def of(self, samples: range) -> "Trajectories":
        """Return the trajectories of the samples with these numbers."""
        return replace(self, mixture=self.mixture.of(slice(samples.start, samples.stop)))

    def start(self, x_B: Tensor) -> Underway:
        """Return samples that have not moved yet."""
        all_BK = torch.ones(
            len(x_B), len(self.mixture.experts), dtype=torch.bool, device=x_B.device
        )
        k_B = torch.zeros(len(x_B), dtype=torch.int64, device=x_B.device)
        return Underway(SolverState(x_B, Memory.none(x_B)), all_BK, k_B)

    def integrate(self, x_B: Tensor, uniform_BS: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Integrate samples along all times.

        Args:
            x_B: where they start, shape (B, ...).
            uniform_BS: in [0, 1), one number per step; draws the experts.
            first: the number of the first sample.

        Returns:
            The samples, and the last expert that each followed; for a mixture, one drawn from its last weights.
        """
        arrived = self.move(self.start(x_B), self.times, uniform_BS, first)
        return arrived.state.x_B, arrived.k_B

    def move(
        self, samples: Underway, times: Sequence[float], uniform_BS: Tensor, first: int = 0
    ) -> Underway:
        """Integrate samples along some of the times; see `integrate`."""
        state, before_BK, k_B = samples.state, samples.allowed_BK, samples.k_B
        all_BK = torch.ones_like(before_BK)
        for number, segment in enumerate(
            segments(self.strategy, times, self.router_every, samples.t_before)
        ):
            allowed_BK, follow, t = all_BK, segment.follow, segment.times[0]
            if follow is Follow.KEEP:
                allowed_BK = before_BK
            elif follow is not Follow.MEAN or segment.times[-1] == self.times[-1]:
                w_BK = self.mixture.posterior(state.x_B, filled(state.x_B, t))
                if follow is Follow.SELECT:
                    allowed_BK = _selected(self.strategy, w_BK)
                k_B = draw_expert(w_BK * allowed_BK, uniform_BS[:, segment.first])
            if follow in (Follow.DRAW, Follow.LOCK):
                allowed_BK = one_hot(k_B, all_BK.shape[1]).bool()
            changed_B = (allowed_BK != before_BK).any(1)
            if self.log:
                is_new = samples.num_steps + segment.first == 0
                self.log.note(
                    first, t, allowed_BK, torch.ones_like(changed_B) if is_new else changed_B
                )
            state = SolverState(state.x_B, state.memory.forget(changed_B))
            # Alternating the order starts a segment with the expert that the last one left in memory.
            order, num = -1 if number % 2 else 1, samples.num_steps + segment.first
            state, before_BK = (
                self._integrate_segment(segment, state, allowed_BK, order, num),
                allowed_BK,
            )
        num_steps = samples.num_steps + len(times) - 1
        return Underway(state, before_BK, k_B, times[-2], num_steps)

    def _integrate_segment(
        self, segment: Segment, state: SolverState, allowed_BK: Tensor, order: int, num_steps: int
    ) -> SolverState:
        """Take a segment's steps; where each sample is allowed one expert, integrate the samples of each as a group."""
        groups: list[tuple[Tensor | slice, Velocity]] = []
        if bool((allowed_BK.sum(1) > 1).any()):
            groups.append((slice(None), self._mean(segment, state.x_B, allowed_BK)))
        else:
            present = allowed_BK.any(0).nonzero()[:, 0].tolist()[::order]
            members = (allowed_BK[:, k].nonzero()[:, 0] for k in present)
            parts = [
                rows for group in members for rows in torch.split(group, self.mixture.together)
            ]
            groups += [(rows, self._one(allowed_BK[rows], self.mixture.of(rows))) for rows in parts]
        if self.callback is None:
            return self._together(groups, segment.times, state)
        for n, leg in enumerate(pairwise(segment.times)):
            state = self._together(groups, leg, state)
            moved_B = self.callback(num_steps + n, leg[-1], state.x_B, allowed_BK)
            if moved_B is not None:
                if moved_B.shape != state.x_B.shape:
                    got = str(tuple(moved_B.shape))
                    raise ShapeError(
                        "what the callback returned", expected=str(tuple(state.x_B.shape)), got=got
                    )
                state = SolverState(moved_B.to(state.x_B), state.memory)
        return state

    def _together(
        self,
        groups: list[tuple[Tensor | slice, Velocity]],
        times: Sequence[float],
        state: SolverState,
    ) -> SolverState:
        """Integrate groups of samples one after the other, and return all of them in their order."""
        parts = [self._follow(velocity, times, state.of(rows)) for rows, velocity in groups]
        if isinstance(groups[0][0], slice):
            return parts[0]
        x_B = torch.cat([part.x_B for part in parts])
        memory = Memory.joined([part.memory for part in parts])
        return SolverState(x_B, memory).of(torch.cat([rows for rows, _ in groups]).argsort())  # type: ignore[misc]

    def _follow(
        self, velocity: Velocity, times: Sequence[float], state: SolverState
    ) -> SolverState:
        def step(
            u: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory
        ) -> tuple[Tensor, Memory]:
            result = self.step(u, x_B, t, t_next, memory)
            self.tick(len(x_B))
            return result

        return SolverState(*follow(velocity, state.x_B, times, step, state.memory))

    @staticmethod
    def _one(allowed_BK: Tensor, mixture: Mixture) -> Velocity:
        """Return the velocity of samples that follow one expert each, for which no router is needed."""

        def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            return mixture.velocity(x_B, t_B, allowed_BK.to(x_B).repeat(2, 1))

        return velocity

    def _mean(self, segment: Segment, x_B: Tensor, allowed_BK: Tensor) -> Velocity:
        """Return the velocity of mixtures, with weights of every evaluation, or of the segment's start."""
        if self.router_every == 1:
            return lambda x_B, t_B: self.mixture.velocity(
                x_B, t_B, self.mixture.weights(x_B, t_B, allowed_BK)
            )
        held_RK = self.mixture.weights(x_B, filled(x_B, segment.times[0]), allowed_BK, held=True)
        return lambda x_B, t_B: self.mixture.velocity(x_B, t_B, held_RK)


def _selected(strategy: Strategy, w_BK: Tensor) -> Tensor:
    if not isinstance(strategy, TopK | Nucleus | Threshold):
        raise TypeError(f"expected a strategy with a method select, got {type(strategy).__name__}")
    return strategy.select(w_BK)


def ticking(on_progress: Callable[[int, int], None] | None, total: int) -> Tick:
    """Return a `Tick` that tells the caller how many steps of the total have been taken."""
    done = 0

    def tick(samples: int) -> None:
        nonlocal done
        done += samples
        if on_progress:
            on_progress(done, total)

    return tick


def seed_of(seed: int, generator: torch.Generator | None) -> int:
    """Return the seed of samples: the caller's, or one that the caller's generator draws.

    Raises:
        MathError: both, or a negative seed.
    """
    if seed < 0:
        raise MathError("seed", expected="at least 0", got=str(seed))
    if generator is None:
        return seed
    if seed:
        raise MathError("seed", expected="a seed or a generator", got=f"both, seed={seed}")
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def draw_noise(
    samples: Sequence[int], shape: Sequence[int], seed: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the noise of some samples and one uniform number per step, each sample from its own random stream."""
    noise, uniform_BS = (
        np.empty((len(samples), *shape), np.float32),
        np.empty((len(samples), steps)),
    )
    for row, i in enumerate(samples):
        own = stream("sample", seed, i)
        noise[row], uniform_BS[row] = (
            own.standard_normal(tuple(shape), dtype=np.float32),
            own.random(steps),
        )
    return torch.from_numpy(noise), torch.from_numpy(uniform_BS)
