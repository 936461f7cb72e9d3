"""How noise becomes data: solvers of ``dx/dt = u(x, t)`` from t = 1 to t = 0, over any velocity."""

# Shape legend: B batch, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from ddm.errors import MathError
from ddm.schedule import Velocity

SolverName = Literal["euler", "heun"]
Step = Callable[[Velocity, Tensor, float, float], Tensor]
"""Called as ``step(velocity, x_B, t, t_next)``; keeps no memory of earlier steps."""


def integrate(velocity: Velocity, x_1: Tensor, times: Sequence[float], solver: SolverName = "heun") -> Tensor:
    """Follow a velocity along a grid of times.

    Args:
        velocity: called as ``velocity(x_B, t_B)``.
        x_1: where the trajectory starts, shape (B, ...).
        times: S + 1 times, strictly descending, usually from 1 to 0.
        solver: `euler` (order 1, one evaluation a step) or `heun` (order 2, two).

    Returns:
        The end of the trajectory, shape (B, ...).

    Raises:
        MathError: times that do not descend, or an unknown solver.
    """
    check_times(times)
    step = solver_named(solver)
    x = x_1
    for t, t_next in pairwise(times):
        x = step(velocity, x, t, t_next)
    return x


def euler_step(velocity: Velocity, x_B: Tensor, t: float, t_next: float) -> Tensor:
    """``x + (t_next - t) u(x, t)``."""
    return x_B + (t_next - t) * velocity(x_B, filled(x_B, t))


def heun_step(velocity: Velocity, x_B: Tensor, t: float, t_next: float) -> Tensor:
    """Average the velocity here and where Euler's step ends.

    Source:
        Karras et al. 2022, algorithm 1.
    """
    u_here = velocity(x_B, filled(x_B, t))
    u_there = velocity(x_B + (t_next - t) * u_here, filled(x_B, t_next))
    return x_B + (t_next - t) / 2 * (u_here + u_there)


def solver_named(name: SolverName) -> Step:
    """Return the step of the solver called `name`.

    Raises:
        MathError: there is no such solver.
    """
    match name:
        case "euler":
            return euler_step
        case "heun":
            return heun_step
        case _:
            raise MathError("solver", expected=" or ".join(get_args(SolverName)), got=repr(name))


def uniform_times(steps: int) -> tuple[float, ...]:
    """``1, 1 - 1/S, ..., 0``.

    Raises:
        MathError: fewer than one step.
    """
    if steps < 1:
        raise MathError("steps", expected="at least 1", got=str(steps))
    return tuple(1 - n / steps for n in range(steps + 1))


def check_times(times: Sequence[float]) -> None:
    """Refuse times that do not descend strictly within [0, 1].

    Raises:
        MathError: they do not.
    """
    descends = all(earlier > later for earlier, later in pairwise(times))
    if len(times) < 2 or not descends or times[0] > 1 or times[-1] < 0:
        raise MathError("times", expected="strictly descending within [0, 1]", got=f"{len(times)} that are not")


def filled(x_B: Tensor, t: float) -> Tensor:
    """Return the time `t` once per sample of `x_B`, shape (B,)."""
    return torch.full(x_B.shape[:1], t, dtype=x_B.dtype, device=x_B.device)
