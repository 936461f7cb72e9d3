"""Where trajectories begin: in noise, at given samples of some time, or at data that are noised first."""

# Shape legend: N samples, B batch, S steps, ... all data dimensions.
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ddm.diffusion.multistep import filled
from ddm.diffusion.path import Path, expand_time, x_t
from ddm.diffusion.solver import check_times, uniform_times
from ddm.errors import MathError, NumericalError, ShapeError
from ddm.io.array_input import real_number, real_tensor, whole_number
from ddm.sampling.options import SamplingOptions


@dataclass(frozen=True)
class InitialState:
    """Where samples begin, and the times of their steps.

    At most one of the three tensors that a caller gives decides where they begin; without any, they begin in noise of
    their own.

    Args:
        num_samples: N.
        times: S + 1 times, descending.
        numbers: the numbers of the samples, which name their random streams; 0 to N - 1 when empty.
        x: samples at the first time, shape (N, ...).
        x_0: samples at t = 0, which are noised to the first time.
        noise: standard normal, in place of the samples' own.
    """

    num_samples: int
    times: tuple[float, ...]
    numbers: Sequence[int] = ()
    x: Tensor | None = None
    x_0: Tensor | None = None
    noise: Tensor | None = None

    def numbers_of(self, rows: range) -> Sequence[int]:
        """Return the numbers of the samples in these rows, which name their random streams."""
        if not self.numbers:
            return rows
        return self.numbers[rows.start : rows.stop]

    def x_of_rows(self, rows: range, own_noise: Tensor, path: Path) -> Tensor:
        """Return where some samples begin; `own_noise` decides the dtype and the device."""
        own_rows = slice(rows.start, rows.stop)
        if self.x is not None:
            return self.x[own_rows].to(own_noise)
        noise = own_noise
        if self.noise is not None:
            noise = self.noise[own_rows].to(own_noise)
        if self.x_0 is not None:
            t = filled(noise, self.times[0])
            x_0 = self.x_0[own_rows].to(noise)
            return x_t(path, x_0, noise, t)
        # On the schedules of diffusion models sigma is not quite 1 at t = 1.
        sigma = path.sigma(torch.ones(()))
        return noise * sigma


def at_times(x_B: Any, t_B: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return samples and their times, arrays or tensors, as tensors that fit each other.

    Args:
        x_B: samples, shape (B, ...).
        t_B: times, shape (B,).
        shape: the shape of one sample.

    Raises:
        DataError: arrays that hold no real numbers.
        ShapeError: samples of another shape, of whole numbers, or not one time for each.
        MathError: times below 0 or above 1.
    """
    samples_B = real_tensor(x_B, "x")
    if isinstance(x_B, Tensor):
        # With its gradient, for a caller who differentiates the velocity or the posterior in x.
        samples_B = x_B
    times_B = real_tensor(t_B, "t")
    if tuple(samples_B.shape[1:]) != tuple(shape):
        sides = ", ".join(map(str, shape))
        got = str(tuple(samples_B.shape))
        raise ShapeError("x", expected=f"shape (B, {sides})", got=got)
    if not samples_B.is_floating_point():
        got = f"{samples_B.dtype}".removeprefix("torch.")
        raise ShapeError("x", expected="floating point", got=got)
    # Refuses another number of times.
    expand_time(times_B, samples_B)
    if not bool(((times_B >= 0) & (times_B <= 1)).all()):
        got = f"{float(times_B.min()):g} to {float(times_B.max()):g}"
        raise MathError("t", expected="times in [0, 1]", got=got)
    return samples_B, times_B


def make_initial_state(
    options: SamplingOptions,
    shape: Sequence[int],
    steps: int,
    lengths: Mapping[str, int | None],
) -> InitialState:
    """Check what a caller says about the start of samples.

    Args:
        options: the caller's.
        shape: the shape of one sample.
        steps: evenly spaced in t, where the options state no times.
        lengths: N, by the argument that states it; None where one does not.

    Raises:
        MathError: arguments that do not go together, or times out of range.
        DataError: arrays that hold no real numbers.
        ShapeError: tensors of another shape, or of another number of samples.
        NumericalError: tensors that are not finite.
    """
    tensors: dict[str, Tensor] = {}
    for name in ("x", "x_0", "noise"):
        values = getattr(options, name)
        if values is not None:
            tensors[name] = real_tensor(values, name)
    times = _times(options, steps, tensors)
    for name, tensor in tensors.items():
        check_tensor(name, tensor, shape)
    num_samples = _num_samples(lengths, tensors, options)
    return InitialState(
        num_samples=num_samples,
        times=times,
        numbers=sample_numbers(options.numbers, num_samples),
        x=tensors.get("x"),
        x_0=tensors.get("x_0"),
        noise=tensors.get("noise"),
    )


def _times(
    options: SamplingOptions,
    steps: int,
    tensors: Mapping[str, Tensor],
) -> tuple[float, ...]:
    """Return the times of the steps, which must fit what samples begin at."""
    # Samples that are at their first time already need neither data nor noise.
    if "x" in tensors and len(tensors) > 1:
        got = "x together with x_0 or noise, which would not be used"
        raise MathError("x", expected="x alone", got=got)
    if options.times is not None and options.t_start is not None:
        expected = "times, which begin at t_start, or t_start"
        raise MathError("times", expected=expected, got="both times and t_start")
    times = _time_grid(options, steps)
    check_times(times)
    begins_at = "x_0"
    if "x" in tensors:
        begins_at = "x"
    is_given = begins_at in tensors
    if is_given and options.times is None and options.t_start is None:
        got = f"{begins_at} without the time at which it begins"
        raise MathError(begins_at, expected="t_start or times as well", got=got)
    if not is_given and times[0] < 1:
        raise MathError(
            "t_start",
            expected="1 for samples that begin in noise",
            got=f"{times[0]:g}",
            remedy="Give x, samples at t_start, or x_0, samples at t = 0 that are noised to it.",
        )
    return times


def _time_grid(options: SamplingOptions, steps: int) -> tuple[float, ...]:
    """Return the caller's times, or times that are evenly spaced between t_start, or 1, and 0."""
    if options.times is not None:
        times_S = real_tensor(options.times, "times")
        if times_S.dim() != 1:
            got = f"shape {tuple(times_S.shape)}"
            raise ShapeError("times", expected="a list of times", got=got)
        return tuple(float(t) for t in times_S.tolist())
    t_start = 1.0
    if options.t_start is not None:
        t_start = real_number(options.t_start, "t_start")
    if not 0 < t_start <= 1:
        raise MathError("t_start", expected="a time above 0, at most 1", got=str(t_start))
    return tuple(t_start * t for t in uniform_times(whole_number(steps, "steps", least=1)))


def _num_samples(
    lengths: Mapping[str, int | None],
    tensors: Mapping[str, Tensor],
    options: SamplingOptions,
) -> int:
    """Return N, on which all arguments that state it must agree."""
    stated = {}
    for name, length in lengths.items():
        if length is not None:
            stated[name] = length
    for name, tensor in tensors.items():
        stated[name] = len(tensor)
    if not stated:
        # Beside another number they are compared with it later.
        for values in (options.numbers, options.seeds):
            if isinstance(values, Sized):
                stated["numbers or seeds"] = len(values)
    if not stated:
        got = "no number, and no tensor that implies it"
        raise MathError("num", expected="the number of samples", got=got)
    if len(set(stated.values())) > 1:
        got = ", ".join(f"{length} in {name}" for name, length in stated.items())
        raise ShapeError("samples", expected="the same number everywhere", got=got)
    num_samples = next(iter(stated.values()))
    return whole_number(num_samples, "num", least=1)


def sample_numbers(numbers: Sequence[int] | None, num_samples: int) -> Sequence[int]:
    """Return the numbers of the samples, empty for 0 to N - 1.

    Raises:
        MathError: another number of them, or a number below 0.
    """
    if numbers is None:
        return ()
    if not isinstance(numbers, Iterable):
        expected = f"{num_samples} numbers of samples, such as range({num_samples})"
        raise MathError("numbers", expected=expected, got=repr(numbers))
    checked_numbers = [whole_number(number, "numbers", least=0) for number in numbers]
    if len(checked_numbers) != num_samples:
        expected = f"{num_samples} numbers of samples"
        raise MathError("numbers", expected=expected, got=str(len(checked_numbers)))
    return checked_numbers


def check_tensor(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Refuse a caller's tensor that does not hold finite samples.

    Args:
        name: the name of the argument.
        tensor: the caller's.
        shape: the shape of one sample.

    Raises:
        ShapeError: another shape, no samples, or no floating point.
        NumericalError: NaN or infinity.
    """
    tensor_shape = tuple(tensor.shape)
    fits = tensor.dim() == len(shape) + 1 and tensor_shape[1:] == tuple(shape)
    is_empty = prod(tensor_shape) == 0
    if not fits or is_empty or not tensor.is_floating_point():
        sides = ", ".join(map(str, shape))
        expected = f"floating point, shape (N, {sides})"
        got = f"{tensor.dtype} of shape {tensor_shape}".removeprefix("torch.")
        raise ShapeError(name, expected=expected, got=got)
    if not bool(tensor.isfinite().all()):
        raise NumericalError(
            name,
            expected="finite numbers",
            got="NaN or infinity",
            remedy="Correct the images that were given: they hold NaN or infinity.",
        )
