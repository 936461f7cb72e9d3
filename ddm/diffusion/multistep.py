"""DPM-Solver++(2M): of second order with one evaluation a step, since it remembers the estimate of x_0 before.

It solves the linear part of ``dx/dt = u(x, t)`` exactly, with D for x_0 during the step:
``x' = (sigma' / sigma) x + (alpha' - alpha sigma' / sigma) D``. Nothing is singular at t = 1 or t = 0, and a velocity
whose x_0 never changes is followed exactly.
"""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, log

import torch
from torch import Tensor

from ddm.diffusion.path import Path, Velocity, expand_time, x_0_and_eps


@dataclass(frozen=True)
class StepEstimate:
    """What a step of the solver learned.

    Args:
        x_0_B: the estimate of x_0 where the step began, shape (B, ...).
        t: the time at which it began.
    """

    x_0_B: Tensor
    t: float


@dataclass(frozen=True)
class SolverMemory:
    """What the multistep solver remembers of each sample; one-step solvers pass it on unchanged.

    Args:
        is_valid_B: whether the estimate may be used; not at the start, nor after a sample changed its expert.
        previous: the estimate of the step before; None at the start.
    """

    is_valid_B: Tensor
    previous: StepEstimate | None = None

    @classmethod
    def empty(cls, x_B: Tensor) -> "SolverMemory":
        """Return an empty memory for these samples."""
        is_valid_B = torch.zeros(len(x_B), dtype=torch.bool, device=x_B.device)
        return cls(is_valid_B)

    @classmethod
    def joined(cls, parts: "Sequence[SolverMemory]") -> "SolverMemory":
        """Return the memory of groups of samples that took the same steps, one after the other."""
        is_valid_B = torch.cat([part.is_valid_B for part in parts])
        estimates = [part.previous for part in parts if part.previous is not None]
        if not estimates:
            return cls(is_valid_B)
        x_0_B = torch.cat([estimate.x_0_B for estimate in estimates])
        return cls(is_valid_B, StepEstimate(x_0_B, estimates[0].t))

    def of(self, rows: Tensor) -> "SolverMemory":
        """Return the memory of some of the samples."""
        previous = self.previous
        if previous is not None:
            previous = StepEstimate(previous.x_0_B[rows], previous.t)
        return SolverMemory(self.is_valid_B[rows], previous)

    def forget(self, changed_B: Tensor) -> "SolverMemory":
        """Return the memory without the estimates of the samples that changed."""
        is_valid_B = self.is_valid_B & ~changed_B
        return replace(self, is_valid_B=is_valid_B)


def dpm_step(
    velocity: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
    memory: SolverMemory,
    *,
    path: Path,
) -> tuple[Tensor, SolverMemory]:
    """Hold x_0 constant at its extrapolation to the middle of the step, along ``lambda = log(alpha / sigma)``.

    ``D = x_0 + (lambda' - lambda) / (2 (lambda - lambda_before)) (x_0 - x_0_before)``. A step that begins or ends where
    lambda is infinite is of first order, ``D = x_0``, as at the ends of the trajectory.

    Source:
        Lu et al. 2022, DPM-Solver++(2M), arXiv 2211.01095, algorithm 2.
    """
    t_B = filled(x_B, t)
    u_B = velocity(x_B, t_B)
    x_0_B, _ = x_0_and_eps(path, x_B, u_B, t_B)
    # D, which is constant during the step.
    constant_x_0_B = x_0_B
    if memory.previous is not None:
        lambda_here = _log_snr(path, t)
        lambda_next = _log_snr(path, t_next)
        lambda_before = _log_snr(path, memory.previous.t)
        # Without these a step at t = 1 or to t = 0 would extrapolate over an infinite distance.
        if isfinite(lambda_here) and isfinite(lambda_next) and isfinite(lambda_before):
            step = lambda_next - lambda_here
            step_before = lambda_here - lambda_before
            share = step / (2 * step_before)
            # A sample that changed its expert has no estimate before: its share is 0, and its step of first order.
            share_B = memory.is_valid_B.to(x_B) * share
            change_B = x_0_B - memory.previous.x_0_B
            constant_x_0_B = x_0_B + expand_time(share_B, x_B) * change_B

    # The exact solution of the linear part, over the whole step; sigma is above 0 wherever a step begins.
    alpha, sigma = _coefficients(path, t)
    alpha_next, sigma_next = _coefficients(path, t_next)
    shrink = sigma_next / sigma
    weight_of_x_0 = alpha_next - alpha * shrink
    x_next_B = shrink * x_B + weight_of_x_0 * constant_x_0_B
    next_memory = SolverMemory(
        is_valid_B=torch.ones_like(memory.is_valid_B),
        previous=StepEstimate(x_0_B, t),
    )
    return x_next_B, next_memory


def _log_snr(path: Path, t: float) -> float:
    """Return ``log(alpha / sigma)`` of a time: minus infinity at t = 1, infinity at t = 0."""
    alpha, sigma = _coefficients(path, t)
    if alpha <= 0:
        return -inf
    if sigma <= 0:
        return inf
    return log(alpha / sigma)


def _coefficients(path: Path, t: float) -> tuple[float, float]:
    # In double precision, since alpha / sigma is extreme near both ends.
    time = torch.tensor(t, dtype=torch.float64)
    alpha = float(path.alpha(time))
    sigma = float(path.sigma(time))
    return alpha, sigma


def filled(x_B: Tensor, t: float) -> Tensor:
    """Return the time `t` once per sample of `x_B`, shape (B,)."""
    num_samples = len(x_B)
    return torch.full((num_samples,), t, dtype=x_B.dtype, device=x_B.device)
