"""Solvers of ``dx/dt = u(x, t)`` from noise at t = 1 to data at t = 0, for any velocity.

| solver | order | evaluations a step |
| --- | --- | --- |
| euler | 1 | 1 |
| midpoint, heun | 2 | 2 |
| rk4 | 4 | 4 |
| dpm | 2 | 1, with a memory of the step before |
"""

# Shape legend: B batch, S steps, ... all data dimensions.
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from ddm.diffusion.multistep import SolverMemory, dpm_step, filled
from ddm.diffusion.path import LinearPath, Path, Velocity, expand_time
from ddm.errors import MathError, ShapeError

SolverName = Literal["euler", "heun", "midpoint", "rk4", "dpm"]


class Solver(Protocol):
    """One step of a solver: a function of a caller's own in the place of a name."""

    def __call__(self, velocity: Velocity, x_B: Tensor, t: float, t_next: float) -> Tensor:
        """Return x at `t_next`.

        Args:
            velocity: called as ``velocity(x_B, t_B)``.
            x_B: samples at `t`, shape (B, ...).
            t: where the step begins.
            t_next: where it ends, below `t`.
        """
        ...


Step = Callable[[Velocity, Tensor, float, float, SolverMemory], tuple[Tensor, SolverMemory]]
"""Called as ``step(velocity, x_B, t, t_next, memory)``; returns x at `t_next` and the memory then."""


def integrate(
    velocity: Velocity,
    x_1: Tensor,
    times: Sequence[float],
    solver: SolverName | Solver = "heun",
    path: Path | None = None,
) -> Tensor:
    """Integrate a velocity along a grid of times.

    Args:
        velocity: called as ``velocity(x_B, t_B)``.
        x_1: where the trajectory starts, shape (B, ...).
        times: S + 1 times, strictly descending, usually from 1 to 0.
        solver: see the table above; or a step of your own.
        path: the velocity's path, linear when omitted; only `dpm` uses it.

    Returns:
        The end of the trajectory, shape (B, ...).

    Raises:
        MathError: times that do not descend, or an unknown solver.
    """
    check_times(times)
    step = solver_step(solver, path or LinearPath())
    memory = SolverMemory.empty(x_1)
    x_0, _ = follow(velocity, x_1, times, step, memory)
    return x_0


def follow(
    velocity: Velocity,
    x_B: Tensor,
    times: Sequence[float],
    step: Step,
    memory: SolverMemory,
) -> tuple[Tensor, SolverMemory]:
    """Take every step along `times`; return x at the end, and the memory."""
    for t, t_next in pairwise(times):
        x_B, memory = step(velocity, x_B, t, t_next, memory)
    return x_B, memory


def euler_step(
    velocity: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
) -> Tensor:
    """``x + (t_next - t) u(x, t)``."""
    u_B = velocity(x_B, filled(x_B, t))
    return x_B + (t_next - t) * u_B


def midpoint_step(
    velocity: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
) -> Tensor:
    """Take the velocity halfway, where half of Euler's step ends."""
    t_half = (t + t_next) / 2
    x_half = euler_step(velocity, x_B, t, t_half)
    u_half = velocity(x_half, filled(x_B, t_half))
    return x_B + (t_next - t) * u_half


def heun_step(
    velocity: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
) -> Tensor:
    """Average the velocity here and where Euler's step ends.

    Source:
        Karras et al. 2022, algorithm 1.
    """
    # Euler's step is the prediction, the average its correction.
    u_here = velocity(x_B, filled(x_B, t))
    x_there = x_B + (t_next - t) * u_here
    u_there = velocity(x_there, filled(x_B, t_next))
    return x_B + (t_next - t) / 2 * (u_here + u_there)


def rk4_step(
    velocity: Velocity,
    x_B: Tensor,
    t: float,
    t_next: float,
) -> Tensor:
    """The classical Runge-Kutta step: one velocity here, two halfway, one at the end, weighted 1, 2, 2, 1."""
    length = t_next - t
    halfway = filled(x_B, (t + t_next) / 2)
    u_1 = velocity(x_B, filled(x_B, t))
    u_2 = velocity(x_B + length / 2 * u_1, halfway)
    u_3 = velocity(x_B + length / 2 * u_2, halfway)
    u_4 = velocity(x_B + length * u_3, filled(x_B, t_next))
    weighted_sum = u_1 + 2 * (u_2 + u_3) + u_4
    return x_B + length / 6 * weighted_sum


def solver_step(solver: SolverName | Solver, path: Path) -> Step:
    """Return the step of a solver that is given itself or by its name, for velocities on `path`.

    Raises:
        MathError: there is no such solver.
    """
    match solver:
        case "euler":
            return _without_memory(euler_step)
        case "heun":
            return _without_memory(heun_step)
        case "midpoint":
            return _without_memory(midpoint_step)
        case "rk4":
            return _without_memory(rk4_step)
        case "dpm":
            return partial(dpm_step, path=path)
        case _ if callable(solver):
            return _without_memory(_checked(solver))
        case _:
            names = ", ".join(get_args(SolverName))
            raise MathError("solver", expected=f"{names}, or a function", got=repr(solver))


def _checked(step: Solver) -> Solver:
    """Return a caller's step; what it passes to the velocity, and what it returns, must fit the samples."""

    def checked_step(velocity: Velocity, x_B: Tensor, t: float, t_next: float) -> Tensor:
        def checked_velocity(x_B: Tensor, t_B: Tensor) -> Tensor:
            # Refuses one time for all samples.
            expand_time(t_B, x_B)
            return velocity(x_B, t_B)

        moved_B: Any = step(checked_velocity, x_B, t, t_next)
        if not isinstance(moved_B, Tensor) or moved_B.shape != x_B.shape:
            got = type(moved_B).__name__
            if isinstance(moved_B, Tensor):
                got = f"shape {tuple(moved_B.shape)}"
            expected = f"x at t_next, a tensor of shape {tuple(x_B.shape)}"
            raise ShapeError("what the solver returned", expected=expected, got=got)
        return moved_B.to(x_B)

    return checked_step


def _without_memory(step: Solver) -> Step:
    def step_and_pass_memory(
        velocity: Velocity,
        x_B: Tensor,
        t: float,
        t_next: float,
        memory: SolverMemory,
    ) -> tuple[Tensor, SolverMemory]:
        return step(velocity, x_B, t, t_next), memory

    return step_and_pass_memory


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
        MathError: times that do not, or fewer than two.
    """
    # The number first: without any times there is no first one to compare.
    is_valid = len(times) >= 2
    is_valid = is_valid and times[0] <= 1 and times[-1] >= 0
    is_valid = is_valid and all(earlier > later for earlier, later in pairwise(times))
    if not is_valid:
        listed = [f"{t:g}" for t in times[:8]]
        if len(times) > 8:
            listed.append("...")
        raise MathError(
            "times",
            expected="at least 2 times, strictly descending, within [0, 1]",
            got=", ".join(listed) or "no times",
        )
