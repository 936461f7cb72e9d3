"""Where trajectories begin: in noise, at given samples of some time, or at data that are noised first."""

# Shape legend: N samples, B batch, S steps, ... all data dimensions.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ddm.diffusion.multistep import filled
from ddm.diffusion.path import Path, expand_time, x_t
from ddm.diffusion.solver import check_times, uniform_times
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.io.array_input import real_tensor


@dataclass(frozen=True)
class Start:
    """Where samples begin, and the times of their steps.

    At most one of the three tensors that a caller gives decides where they begin; without any, they begin in noise of
    their own.

    Args:
        num: N.
        times: S + 1 times, descending.
        own: the numbers of the samples, which name their random streams; 0 to N - 1 when empty.
        x: samples at the first time, shape (N, ...).
        x_0: samples at t = 0, which are noised to the first time.
        noise: standard normal, in place of the samples' own.
    """

    num: int
    times: tuple[float, ...]
    own: Sequence[int] = ()
    x: Tensor | None = None
    x_0: Tensor | None = None
    noise: Tensor | None = None

    def numbers(self, rows: range) -> Sequence[int]:
        """Return the numbers of the samples in these rows, which name their random streams."""
        return self.own[rows.start : rows.stop] if self.own else rows

    def at(self, samples: range, noise: Tensor, path: Path) -> Tensor:
        """Return where some samples begin; `noise` is their own, and decides the dtype and the device."""
        given = None if self.noise is None else self.noise[samples.start : samples.stop].to(noise)
        noise = noise if given is None else given
        if self.x is not None:
            return self.x[samples.start : samples.stop].to(noise)
        if self.x_0 is not None:
            return x_t(
                path,
                self.x_0[samples.start : samples.stop].to(noise),
                noise,
                filled(noise, self.times[0]),
            )
        return noise * path.sigma(torch.ones(()))


def at_times(x_B: Any, t_B: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return samples and their times, arrays or tensors, as tensors that fit each other.

    Args:
        x_B: samples, shape (B, ...).
        t_B: times, shape (B,).
        shape: of one sample.

    Raises:
        DataError: arrays that hold no real numbers.
        ShapeError: samples of another shape, or not one time for each.
    """
    samples_B = real_tensor(x_B, "x")
    times_B = real_tensor(t_B, "t")
    if tuple(samples_B.shape[1:]) != tuple(shape):
        expected = f"shape (B, {', '.join(map(str, shape))})"
        raise ShapeError("x", expected=expected, got=str(tuple(samples_B.shape)))
    expand_time(times_B, samples_B)
    return samples_B, times_B


def start(
    nums: Mapping[str, int | None],
    shape: Sequence[int],
    given: Mapping[str, Any],
    t_start: float | None,
    times: Sequence[float] | None,
    steps: int,
    numbers: Sequence[int] | None = None,
) -> Start:
    """Check what a caller says about the start of samples.

    Args:
        nums: N, by the argument that tells it; None where one does not.
        shape: of one sample.
        given: x, x_0 and noise of `Start`, of which x stands alone; arrays or tensors.
        t_start: the first time; 1 when omitted, unless `times` say otherwise.
        times: in place of `t_start` and `steps`.
        steps: evenly spaced in t.
        numbers: of the samples, N of them; 0 to N - 1 when omitted.

    Raises:
        MathError: arguments that do not go together, or times out of range.
        DataError: arrays that hold no real numbers.
        ShapeError: tensors of another shape, or of another number of samples.
        NumericalError: tensors that are not finite.
    """
    given = {
        name: None if values is None else real_tensor(values, name)
        for name, values in given.items()
    }
    x, x_0, noise = given["x"], given["x_0"], given["noise"]
    if x is not None and (x_0 is not None or noise is not None):
        raise MathError(
            "x", expected="x alone", got="x together with x_0 or noise, which would not be used"
        )
    if times is not None and t_start is not None:
        raise MathError(
            "times",
            expected="times, which begin at t_start, or t_start",
            got="both times and t_start",
        )
    grid = tuple(float(t) for t in times) if times is not None else _even(t_start, steps)
    check_times(grid)
    if times is None and t_start is None and (x is not None or x_0 is not None):
        what = "x" if x is not None else "x_0"
        raise MathError(
            what,
            expected="t_start or times as well",
            got=f"{what} without the time at which it begins",
        )
    if x is None and x_0 is None and grid[0] < 1:
        remedy = "Give x, samples at t_start, or x_0, samples at t = 0 that are noised to it."
        raise MathError(
            "t_start",
            expected="1 for samples that begin in noise",
            got=f"{grid[0]:g}",
            remedy=remedy,
        )
    for name, tensor in given.items():
        if tensor is not None:
            _check(name, tensor, shape)
    lengths = dict(nums) | {
        name: len(tensor) for name, tensor in given.items() if tensor is not None
    }
    found = {name: length for name, length in lengths.items() if length is not None}
    if not found:
        raise MathError(
            "num", expected="the number of samples", got="no number, and no tensor that tells it"
        )
    if len(set(found.values())) > 1:
        got = ", ".join(f"{length} in {name}" for name, length in found.items())
        raise ShapeError("samples", expected="the same number everywhere", got=got)
    num = next(iter(found.values()))
    if num < 1:
        raise MathError("sample", expected="num >= 1", got=f"num={num}")
    numbers = None if numbers is None else [int(number) for number in numbers]
    if numbers is not None and (len(numbers) != num or min(numbers) < 0):
        expected = f"{num} numbers of samples, each at least 0"
        raise MathError(
            "numbers", expected=expected, got=f"{len(numbers)}, from {min(numbers, default=0)}"
        )
    return Start(num, grid, numbers or (), x, x_0, noise)


def _even(t_start: float | None, steps: int) -> tuple[float, ...]:
    if t_start is not None and not 0 < t_start <= 1:
        raise MathError("t_start", expected="a time above 0, at most 1", got=str(t_start))
    return tuple((1.0 if t_start is None else t_start) * t for t in uniform_times(steps))


def _check(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    got = tuple(tensor.shape)
    if (
        tensor.dim() != len(shape) + 1
        or got[1:] != tuple(shape)
        or not prod(got)
        or not tensor.is_floating_point()
    ):
        expected = f"floating point, shape (N, {', '.join(map(str, shape))})"
        raise ShapeError(
            name, expected=expected, got=f"{tensor.dtype} of shape {got}".removeprefix("torch.")
        )
    if not bool(tensor.isfinite().all()):
        raise NumericalError(name, expected="finite numbers", got="NaN or infinity")
