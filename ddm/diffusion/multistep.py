"""Solvers of second order with one evaluation a step: they remember what the steps before found of each sample.

All three solve the linear part of ``dx/dt = u(x, t)`` exactly, ``x' = (sigma' / sigma) x + (alpha' - alpha sigma' /
sigma) D``, where D stands for x_0 during the step. Nothing is singular at t = 1 or t = 0, and a velocity whose x_0
never changes is followed exactly. They differ in D, and UniPC corrects x when the next evaluation shows how x_0 went
on.
"""

# Shape legend: B batch, ... all data dimensions.
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import expm1, inf, isfinite, log

import torch
from torch import Tensor

from ddm.diffusion.path import Path, Velocity, expand_time, x_0_and_eps

_MOST = 2  # steps before that a solver of second order looks back at


@dataclass(frozen=True)
class Past:
    """A step that was taken.

    Args:
        x_B: where it began, shape (B, ...).
        x_0_B: the estimate of x_0 there.
        t: the time at which it began.
    """

    x_B: Tensor
    x_0_B: Tensor
    t: float


@dataclass(frozen=True)
class Memory:
    """What a multistep solver remembers of each sample; one-step solvers pass it on unchanged.

    Args:
        known_B: how many of the steps before may be used; 0 at the start, and after a sample changed its expert.
        past: the steps before, latest first.
    """

    known_B: Tensor
    past: tuple[Past, ...] = ()

    @classmethod
    def none(cls, x_B: Tensor) -> "Memory":
        """Return an empty memory for these samples."""
        return cls(torch.zeros(len(x_B), dtype=torch.int64, device=x_B.device))

    @classmethod
    def joined(cls, parts: "Sequence[Memory]") -> "Memory":
        """Return the memory of groups of samples that took the same steps, one after the other."""
        past = [
            Past(
                torch.cat([each.x_B for each in same]),
                torch.cat([each.x_0_B for each in same]),
                same[0].t,
            )
            for same in zip(*(part.past for part in parts), strict=True)
        ]
        return cls(torch.cat([part.known_B for part in parts]), tuple(past))

    def of(self, rows: Tensor) -> "Memory":
        """Return the memory of some of the samples."""
        past = tuple(Past(each.x_B[rows], each.x_0_B[rows], each.t) for each in self.past)
        return Memory(self.known_B[rows], past)

    def forget(self, changed_B: Tensor) -> "Memory":
        """Return the memory without the steps of the samples that changed."""
        return replace(self, known_B=self.known_B.masked_fill(changed_B, 0))

    def after(self, step: Past) -> "Memory":
        """Return the memory after one more step."""
        return Memory((self.known_B + 1).clamp(max=_MOST), (step, *self.past)[:_MOST])


def exponential_step(
    velocity: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory, *, path: Path
) -> tuple[Tensor, Memory]:
    """Hold x_0 constant at its extrapolation to the middle of the step, along t.

    ``D = x_0 + (t' - t) / (2 (t - t_before)) (x_0 - x_0_before)``, and ``D = x_0`` without a step before.

    DPM-Solver++(2M) extrapolates x_0 along ``log(alpha / sigma)``. Steps that are even in t are far from even there:
    next to both ends, where it is infinite. Along t the same order has a smaller error
    (``tests/ddm/diffusion/test_solver.py`` measures both). On such steps the error falls as ``S^-2 log S``.

    Source:
        Lu et al. 2022, DPM-Solver++(2M), arXiv 2211.01095, except for the extrapolation.
    """
    return _predict(
        x_B, _denoised(velocity, x_B, t, path), t, t_next, memory, path, clock=lambda t: t
    )


def dpm_step(
    velocity: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory, *, path: Path
) -> tuple[Tensor, Memory]:
    """Hold x_0 constant at its extrapolation to the middle of the step, along ``log(alpha / sigma)``.

    A step that begins or ends where that is infinite is of first order, as at the ends of the trajectory.

    Source:
        Lu et al. 2022, DPM-Solver++(2M), arXiv 2211.01095, algorithm 2.
    """
    return _predict(
        x_B, _denoised(velocity, x_B, t, path), t, t_next, memory, path, clock=_log_snr(path)
    )


def unipc_step(
    velocity: Velocity, x_B: Tensor, t: float, t_next: float, memory: Memory, *, path: Path
) -> tuple[Tensor, Memory]:
    """Correct x by the estimate of x_0 at it, then go on as `dpm_step` from there: order 2, B(h) = exp(h) - 1.

    The corrected x is not evaluated again, so a step costs one evaluation.

    Source:
        Zhao et al. 2023, UniPC, arXiv 2302.04867: UniPC-2, variant B_2 (bh2), predicting x_0.
    """
    x_0_B = _denoised(velocity, x_B, t, path)
    x_B = _corrected(x_B, x_0_B, t, memory, path)
    return _predict(x_B, x_0_B, t, t_next, memory, path, clock=_log_snr(path))


def _predict(
    x_B: Tensor,
    x_0_B: Tensor,
    t: float,
    t_next: float,
    memory: Memory,
    path: Path,
    *,
    clock: Callable[[float], float],
) -> tuple[Tensor, Memory]:
    """Take a step with x_0 extrapolated from the step before, in what `clock` makes of the time."""
    held_B = x_0_B
    if memory.past:
        now, ahead, before = clock(t), clock(t_next), memory.past[0]
        if all(map(isfinite, (now, ahead, clock(before.t)))):
            share = (ahead - now) / (2 * (now - clock(before.t)))
            held_B = x_0_B + expand_time((memory.known_B > 0).to(x_B) * share, x_B) * (
                x_0_B - before.x_0_B
            )
    kept, gained = _linear_part(path, t, t_next)
    return kept * x_B + gained * held_B, memory.after(Past(x_B, x_0_B, t))


def _corrected(x_B: Tensor, x_0_B: Tensor, t: float, memory: Memory, path: Path) -> Tensor:
    """Take the step before once more, with x_0 interpolated through its end; unchanged where no step is known."""
    if not memory.past:
        return x_B
    clock, before = _log_snr(path), memory.past[0]
    h = clock(t) - clock(before.t)
    held_B = before.x_0_B + (x_0_B - before.x_0_B) / 2
    if len(memory.past) == _MOST:
        earlier, (first, second) = memory.past[1], _weights(h)
        # minus infinity where the first step began at t = 1
        ratio = (clock(earlier.t) - clock(before.t)) / h
        curved = (first - second) / (1 - ratio)
        bend_B = (earlier.x_0_B - before.x_0_B) * (curved / ratio)
        second_B = before.x_0_B + bend_B + (first - curved) * (x_0_B - before.x_0_B)
        held_B = torch.where(expand_time(memory.known_B, x_B) >= _MOST, second_B, held_B)
    kept, gained = _linear_part(path, before.t, t)
    return torch.where(
        expand_time(memory.known_B, x_B) > 0, kept * before.x_B + gained * held_B, x_B
    )


def _weights(h: float) -> tuple[float, float]:
    """``b_1`` and ``b_2`` of UniPC's conditions of order for B(h) = exp(h) - 1, predicting x_0 over a step h."""
    scale = expm1(-h)
    first = scale / -h - 1
    return first / scale, (first / -h - 1 / 2) * 2 / scale


def _denoised(velocity: Velocity, x_B: Tensor, t: float, path: Path) -> Tensor:
    t_B = filled(x_B, t)
    return x_0_and_eps(path, x_B, velocity(x_B, t_B), t_B)[0]


def _linear_part(path: Path, t: float, t_next: float) -> tuple[float, float]:
    """Return the shares of x and of x_0 in x at `t_next`."""
    (alpha, sigma), (alpha_next, sigma_next) = _coefficients(path, t), _coefficients(path, t_next)
    kept = sigma_next / sigma
    return kept, alpha_next - alpha * kept


def _log_snr(path: Path) -> Callable[[float], float]:
    """Return ``log(alpha / sigma)`` of a time: minus infinity at t = 1, infinity at t = 0."""

    def clock(t: float) -> float:
        alpha, sigma = _coefficients(path, t)
        return -inf if alpha <= 0 else inf if sigma <= 0 else log(alpha / sigma)

    return clock


def _coefficients(path: Path, t: float) -> tuple[float, float]:
    at = torch.tensor(t, dtype=torch.float64)
    return float(path.alpha(at)), float(path.sigma(at))


def filled(x_B: Tensor, t: float) -> Tensor:
    """Return the time `t` once per sample of `x_B`, shape (B,)."""
    return torch.full(x_B.shape[:1], t, dtype=x_B.dtype, device=x_B.device)
