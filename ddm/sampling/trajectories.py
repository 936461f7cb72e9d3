"""Integrates samples from noise to data, in segments between changes of experts, grouped by the expert they follow.

Within a segment each sample follows the same experts, so samples of one expert are integrated as a group: for one step
under `sample`, and from noise to data under `lock` with t_lock = 1, which loads each expert only once.
"""

# Shape legend: K experts, B batch, R = rows of all branches, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddm.diffusion.multistep import SolverMemory, filled
from ddm.diffusion.path import Velocity
from ddm.diffusion.rng import streams
from ddm.diffusion.solver import Step, follow
from ddm.errors import MathError, ShapeError
from ddm.io.array_input import whole_number
from ddm.sampling.mixture import Mixture
from ddm.sampling.provenance import ProvenanceLog
from ddm.sampling.strategies import Segment, StepRule, Strategy, draw_expert, segments
from ddm.system.progress import ProgressCallback

# Of random numbers of samples that begin at data, or beside data.
EDIT_PURPOSE = "edit"

StepReporter = Callable[[int], None]
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
    memory: SolverMemory

    def of(self, rows: Tensor | slice) -> "SolverState":
        """Return the state of some of the samples."""
        return SolverState(self.x_B[rows], self.memory.of(rows))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrajectoryState:
    """Samples somewhere between noise and data.

    Args:
        solver_state: where they are.
        allowed_BK: the experts that they followed last.
        expert_B: the last expert that was drawn for each.
        t_before: where their last step began; infinite before the first one.
        num_steps: how many steps they have taken.
    """

    solver_state: SolverState
    allowed_BK: Tensor
    expert_B: Tensor
    t_before: float = inf
    num_steps: int = 0

    @property
    def x_B(self) -> Tensor:
        """Where the samples are."""
        return self.solver_state.x_B

    def moved_to(self, x_B: Tensor) -> "TrajectoryState":
        """Return the samples moved elsewhere, where a multistep solver knows nothing of them."""
        return replace(self, solver_state=SolverState(x_B, SolverMemory.empty(x_B)))


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of samples through a mixture under one strategy, solver and time grid.

    Args:
        mixture: the experts and their posteriors.
        strategy: selects the experts that a sample follows.
        times: S + 1 times, descending.
        step: the solver's step.
        router_every: see `segments`.
        report_step: reports progress.
        callback: see `Callback`; samples are brought together after every step for it.
        log: notes which experts samples follow.
    """

    mixture: Mixture
    strategy: Strategy
    times: Sequence[float]
    step: Step
    router_every: int
    report_step: StepReporter
    callback: Callback | None = None
    log: ProvenanceLog | None = None

    def __post_init__(self) -> None:
        # Samples that begin below t = 1 are no pure noise, so that their posterior is not the prior.
        needs_router = self.strategy.needs_router or self.times[0] < 1
        if not needs_router or self.mixture.num_active == 1:
            return
        if any(branch.router is None for branch in self.mixture.branches):
            raise MathError(
                f"strategy {type(self.strategy).__name__}",
                expected="a router",
                got="an ensemble without a router",
                remedy="Use the strategy lock with t_lock = 1, from pure noise on, or an ensemble that has a router.",
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of samples."""
        return self.mixture.experts.dtype

    def of(self, samples: range) -> "Trajectories":
        """Return the trajectories of the samples with these numbers."""
        rows = slice(samples.start, samples.stop)
        return replace(self, mixture=self.mixture.of(rows))

    def start(self, x_B: Tensor) -> TrajectoryState:
        """Return samples that have not moved yet."""
        num_samples = len(x_B)
        num_experts = len(self.mixture.experts)
        all_BK = torch.ones(num_samples, num_experts, dtype=torch.bool, device=x_B.device)
        expert_B = torch.zeros(num_samples, dtype=torch.int64, device=x_B.device)
        solver_state = SolverState(x_B, SolverMemory.empty(x_B))
        return TrajectoryState(solver_state, all_BK, expert_B)

    def integrate(
        self,
        x_B: Tensor,
        uniform_BS: Tensor,
        first: int = 0,
    ) -> TrajectoryState:
        """Integrate samples along all times.

        Args:
            x_B: where they start, shape (B, ...).
            uniform_BS: in [0, 1), one number per step; draws the experts.
            first: the number of the first sample.

        Returns:
            The samples at the last time, with the last expert that each followed; for a mixture, one drawn from its
            last weights.
        """
        samples = self.start(x_B)
        return self.move(samples, self.times, uniform_BS, first)

    def move(
        self,
        samples: TrajectoryState,
        times: Sequence[float],
        uniform_BS: Tensor,
        first: int = 0,
    ) -> TrajectoryState:
        """Integrate samples along some of the times; see `integrate`."""
        cut = segments(self.strategy, times, self.router_every, samples.t_before)
        for number, segment in enumerate(cut):
            reaches_end = segment.times[-1] == self.times[-1]
            uniform_B = uniform_BS[:, segment.first_step]
            allowed_BK, expert_B = self._experts_to_follow(segment, samples, uniform_B, reaches_end)
            changed_B = (allowed_BK != samples.allowed_BK).any(1)
            if self.log:
                # The first entry of a sample is noted even where it follows all experts, as `start` says.
                noted_B = changed_B
                if samples.num_steps == 0:
                    noted_B = torch.ones_like(changed_B)
                self.log.note(first, segment.times[0], allowed_BK, noted_B)
            # A multistep solver must not extrapolate from the velocity of another expert.
            memory = samples.solver_state.memory.forget(changed_B)
            state = SolverState(samples.x_B, memory)
            # Alternating the order starts a segment with the expert that the last one left in memory.
            in_reverse = number % 2 == 1
            state = self._integrate_segment(
                segment, state, allowed_BK, samples.num_steps, in_reverse=in_reverse
            )
            samples = TrajectoryState(
                solver_state=state,
                allowed_BK=allowed_BK,
                expert_B=expert_B,
                t_before=segment.times[-2],
                num_steps=samples.num_steps + len(segment.times) - 1,
            )
        return samples

    def _experts_to_follow(
        self,
        segment: Segment,
        samples: TrajectoryState,
        uniform_B: Tensor,
        reaches_end: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the experts that samples follow during a segment (B, K), and one drawn from among them (B,)."""
        rule = segment.rule
        if rule is StepRule.KEEP:
            return samples.allowed_BK, samples.expert_B
        allowed_BK = torch.ones_like(samples.allowed_BK)
        if rule is StepRule.MIXTURE and not reaches_end:
            # The posterior at the segment's start would draw an expert that nobody reads.
            return allowed_BK, samples.expert_B
        t_B = filled(samples.x_B, segment.times[0])
        w_BK = self.mixture.posterior(samples.x_B, t_B)
        if rule is StepRule.SELECT:
            allowed_BK = _selected_experts(self.strategy, w_BK)
        expert_B = draw_expert(w_BK * allowed_BK, uniform_B)
        if rule in (StepRule.DRAW, StepRule.LOCK):
            num_experts = allowed_BK.shape[1]
            allowed_BK = one_hot(expert_B, num_experts).bool()
        return allowed_BK, expert_B

    def _integrate_segment(
        self,
        segment: Segment,
        state: SolverState,
        allowed_BK: Tensor,
        num_steps: int,
        *,
        in_reverse: bool,
    ) -> SolverState:
        """Take a segment's steps; where each sample is allowed one expert, integrate the samples of each as a group."""
        groups = self._groups(segment, state.x_B, allowed_BK, in_reverse=in_reverse)
        if self.callback is None:
            return self._integrate_groups(groups, segment.times, state)
        for step, (t, t_next) in enumerate(pairwise(segment.times), start=num_steps):
            state = self._integrate_groups(groups, (t, t_next), state)
            moved_B: Any = self.callback(step, t_next, state.x_B, allowed_BK)
            if moved_B is None:
                continue
            if not isinstance(moved_B, Tensor) or moved_B.shape != state.x_B.shape:
                expected = f"a tensor of shape {tuple(state.x_B.shape)}, or None"
                got = type(moved_B).__name__
                if isinstance(moved_B, Tensor):
                    got = f"shape {tuple(moved_B.shape)}"
                raise ShapeError("what the callback returned", expected=expected, got=got)
            state = SolverState(moved_B.to(state.x_B), state.memory)
        return state

    def _groups(
        self,
        segment: Segment,
        x_B: Tensor,
        allowed_BK: Tensor,
        *,
        in_reverse: bool,
    ) -> list[tuple[Tensor | slice, Velocity]]:
        """Return the rows that are integrated together, each with its velocity."""
        num_allowed_B = allowed_BK.sum(1)
        if bool((num_allowed_B > 1).any()):
            mixture_velocity = self._mixture_velocity(segment, x_B, allowed_BK)
            return [(slice(None), mixture_velocity)]
        groups: list[tuple[Tensor | slice, Velocity]] = []
        followed_experts = allowed_BK.any(0).nonzero()[:, 0].tolist()
        if in_reverse:
            followed_experts.reverse()
        for expert in followed_experts:
            rows_of_expert = allowed_BK[:, expert].nonzero()[:, 0]
            # A chunk goes through the whole segment before the next one, so that memory is needed for one chunk alone.
            for rows in torch.split(rows_of_expert, self.mixture.chunk_size):
                mixture = self.mixture.of(rows)
                velocity = self._expert_velocity(allowed_BK[rows], mixture)
                groups.append((rows, velocity))
        return groups

    def _integrate_groups(
        self,
        groups: list[tuple[Tensor | slice, Velocity]],
        times: Sequence[float],
        state: SolverState,
    ) -> SolverState:
        """Integrate groups of samples one after the other, and return all of them in their order."""
        parts = [self._integrate(velocity, times, state.of(rows)) for rows, velocity in groups]
        # A mixture moves all samples as one group.
        if isinstance(groups[0][0], slice):
            return parts[0]
        x_B = torch.cat([part.x_B for part in parts])
        memory = SolverMemory.joined([part.memory for part in parts])
        order_B = torch.cat([rows for rows, _ in groups]).argsort()  # type: ignore[misc]
        return SolverState(x_B, memory).of(order_B)

    def _integrate(
        self,
        velocity: Velocity,
        times: Sequence[float],
        state: SolverState,
    ) -> SolverState:
        """Integrate one group of samples."""

        def step(
            u: Velocity,
            x_B: Tensor,
            t: float,
            t_next: float,
            memory: SolverMemory,
        ) -> tuple[Tensor, SolverMemory]:
            result = self.step(u, x_B, t, t_next, memory)
            self.report_step(len(x_B))
            return result

        x_B, memory = follow(velocity, state.x_B, times, step, state.memory)
        return SolverState(x_B, memory)

    @staticmethod
    def _expert_velocity(allowed_BK: Tensor, mixture: Mixture) -> Velocity:
        """Return the velocity of samples that follow one expert each, for which no router is needed."""

        def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            # The weight of the one expert is 1 in the conditional branch, and in the unconditional one.
            weight_RK = allowed_BK.to(x_B).repeat(2, 1)
            return mixture.velocity(x_B, t_B, weight_RK)

        return velocity

    def _mixture_velocity(self, segment: Segment, x_B: Tensor, allowed_BK: Tensor) -> Velocity:
        """Return the velocity of mixtures, with weights of every evaluation, or of the segment's start."""
        mixture = self.mixture
        if self.router_every == 1:

            def velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
                weight_RK = mixture.weights(x_B, t_B, allowed_BK)
                return mixture.velocity(x_B, t_B, weight_RK)

            return velocity

        t_B = filled(x_B, segment.times[0])
        fixed_RK = mixture.weights(x_B, t_B, allowed_BK, of_all_branches=True)
        return lambda x_B, t_B: mixture.velocity(x_B, t_B, fixed_RK)


def _selected_experts(strategy: Strategy, w_BK: Tensor) -> Tensor:
    """Return the experts that a strategy selects, which may be a caller's own.

    Raises:
        ShapeError: no bool of the shape of the weights.
        MathError: a sample without an expert.
    """
    selected_BK: Any = strategy.select(w_BK)
    subject = f"select of the strategy {type(strategy).__name__}"
    is_mask = isinstance(selected_BK, Tensor) and selected_BK.dtype is torch.bool
    if not is_mask or selected_BK.shape != w_BK.shape:
        got = type(selected_BK).__name__
        if isinstance(selected_BK, Tensor):
            got = f"{selected_BK.dtype} {tuple(selected_BK.shape)}".removeprefix("torch.")
        raise ShapeError(subject, expected=f"bool, shape {tuple(w_BK.shape)}", got=got)
    # An expert without a weight cannot be followed.
    num_followed_B = (selected_BK & (w_BK > 0)).sum(1)
    if not bool(num_followed_B.all()):
        got = f"none for {int((num_followed_B == 0).sum())} of {len(w_BK)} samples"
        raise MathError(subject, expected="at least one expert with a weight above 0", got=got)
    checked_BK: Tensor = selected_BK
    return checked_BK


def step_reporter(on_progress: ProgressCallback | None, total_steps: int) -> StepReporter:
    """Return a `StepReporter` that passes on how many steps of the total have been taken."""
    num_taken = 0

    def report(num_samples: int) -> None:
        nonlocal num_taken
        num_taken += num_samples
        if on_progress:
            on_progress(num_taken, total_steps)

    return report


def resolve_seed(
    seed: int, generator: torch.Generator | None, seeds: Sequence[int] | None, num_samples: int
) -> int | list[int]:
    """Return the seed of all samples: the caller's, or one that the caller's generator draws; or one for each sample.

    Raises:
        MathError: more than one of the three, another number of seeds, or no whole number from 0 on.
    """
    seed = whole_number(seed, "seed", least=0)
    if seeds is not None:
        if seed or generator is not None:
            raise MathError(
                "seeds", expected="seeds alone", got="seeds beside a seed or a generator"
            )
        if len(seeds) != num_samples:
            raise MathError(
                "seeds", expected=f"one for each of {num_samples} samples", got=f"{len(seeds)}"
            )
        return [whole_number(own_seed, "seeds", least=0) for own_seed in seeds]
    if generator is None:
        return seed
    if seed:
        raise MathError("seed", expected="a seed or a generator", got=f"both, seed={seed}")
    # Of a CUDA generator the number has to be drawn on its device.
    drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
    return int(drawn)


def draw_noise(
    samples: Sequence[int],
    shape: Sequence[int],
    seed: int | Sequence[int],
    steps: int,
    *,
    purpose: str = "sample",
) -> tuple[Tensor, Tensor]:
    """Return the noise of some samples and one uniform number per step, each sample from its own random stream.

    Args:
        samples: their numbers.
        shape: the shape of one sample.
        seed: the seed of all of them, or one for each.
        steps: how many uniform numbers.
        purpose: what the numbers are for; those of different purposes are independent.
    """
    noise = np.empty((len(samples), *shape), np.float32)
    uniform_BS = np.empty((len(samples), steps))
    for row, generator in enumerate(streams(purpose, seed, samples)):
        # The noise comes first, so that a sample begins in the same noise whatever the number of steps.
        noise[row] = generator.standard_normal(tuple(shape), dtype=np.float32)
        uniform_BS[row] = generator.random(steps)
    return torch.from_numpy(noise), torch.from_numpy(uniform_BS)
