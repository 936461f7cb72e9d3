"""The running average of the weights, which is what leaves; and any other average of the same run, afterwards.

The average of a run of T steps is a weighted mean of the weights after each step. With `ema_decay` and `ema_half_life`
a step counts for half of one a half-life later. With `ema_width` step t counts as ``t^gamma``: the average widens with
the run, and its relative width, the standard deviation of t over T, is

    width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))

Averages of two widths, kept at a few steps of the run, hold nearly all that averages of other widths need: `average_of`
finds the mean of the stored ones whose weights over the steps are closest, by least squares.

Source:
    Karras et al. 2024, Analyzing and improving the training dynamics of diffusion models, arXiv 2312.02696, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import MathError
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors, spec_of
from ddm.protocol.learning import Training

KEPT_WIDTHS = (0.05, 0.10)
_FOLDER = "averages"
_MAX_HEADER_BYTES = 1 << 20
# The width of gamma = 0, the plain mean.
WIDEST = sqrt(1 / 12)


def averaging_weight(decay: float, n: int) -> float:
    """Return the weight of the n-th value, n >= 1, with which a running average is the exact decayed mean of n values.

    ``mean_n = sum_i decay^(n-i) v_i / sum_i decay^(n-i)``: the first value has the weight 1, so the
    initial value of the average does not count.
    """
    return float((1 - decay) / (1 - decay**n))


def newest_weight(settings: Training, step: int) -> float:
    """Return how much the weights after a step, counted from 1, weigh in the recipe's average of all steps so far."""
    if settings.ema_width is not None:
        return power_weight(exponent_of(settings.ema_width), step)
    if settings.ema_half_life is not None:
        half_lives = settings.batch_size / settings.ema_half_life
        return averaging_weight(0.5**half_lives, step)
    return averaging_weight(settings.ema_decay or 0.0, step)


def power_weight(exponent: float, n: int) -> float:
    """Return the weight of the n-th value, n >= 1, in an average in which the i-th counts about as ``i^exponent``."""
    share_of_before = (1 - 1 / n) ** (exponent + 1)
    return float(1 - share_of_before)


def exponent_of(width: float) -> float:
    """Return the exponent gamma of an average of a relative width.

    Raises:
        MathError: a width that no average has.
    """
    if not 0 < width < WIDEST:
        raise MathError(
            "width of an average", expected=f"above 0 and below {WIDEST:.4f}", got=f"{width:g}"
        )
    # width^2 (g + 2)^2 (g + 3) = g + 1 has one root g > 0: the left side grows faster.
    # (g + 2)^2 (g + 3) = g^3 + 7 g^2 + 16 g + 12, from which (g + 1) / width^2 is taken.
    of_width = 1 / width**2
    roots = np.roots([1.0, 7.0, 16.0 - of_width, 12.0 - of_width])
    return float(roots.real.max())


@dataclass(frozen=True)
class Profile:
    """How much each step counts in an average: as ``t^exponent`` until `step`, and not at all afterwards.

    Args:
        exponent: gamma.
        step: the last step that counts.
    """

    exponent: float
    step: float


def average_of(stored: Sequence[Profile], target: Profile) -> NDArray[np.float64]:
    """Return the factors with which the sum of stored averages is closest to the target, one for each stored.

    Closest in the square of the difference of their profiles over the run, which has a closed form.
    """
    num = len(stored)
    products = np.empty((num, num))
    products_with_target = np.empty(num)
    for row, profile in enumerate(stored):
        products_with_target[row] = _product(profile, target)
        for column, other in enumerate(stored):
            products[row, column] = _product(profile, other)
    # Averages of neighbouring steps are nearly alike, so that the matrix is nearly singular. Directions below the
    # rounding of float64 are left out, whose factors would be huge and cancel each other.
    factors, *_ = np.linalg.lstsq(products, products_with_target, rcond=1e-12)
    return np.asarray(factors, dtype=np.float64)


def _product(a: Profile, b: Profile) -> float:
    """Integrate the product of two profiles, each of integral 1."""
    # A profile is (gamma + 1) t^gamma / step^(gamma + 1) up to its last step and 0 afterwards, so that the product ends
    # with the shorter one.
    first, last = sorted((a, b), key=lambda profile: profile.step)
    ratio = (first.step / last.step) ** last.exponent
    numerator = (a.exponent + 1) * (b.exponent + 1) * ratio
    denominator = (a.exponent + b.exponent + 1) * last.step
    return float(numerator / denominator)


def kept_steps(settings: Training) -> tuple[int, ...]:
    """Return the steps after which averages of `KEPT_WIDTHS` are kept, evenly spaced, the last of the run included."""
    num = settings.ema_snapshots
    return tuple(settings.num_steps * number // num for number in range(1, num + 1))


def keep(
    folder: Path,
    step: int,
    averages: Sequence[Mapping[str, Tensor]],
) -> None:
    """Keep the averages of `KEPT_WIDTHS` after a step, beside the run's checkpoints.

    Raises:
        OSError: the disk is full or the folder not writable.
    """
    for number, average in enumerate(averages):
        path = _kept_path(folder, step, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, average)


def average_of_width(
    folder: Path,
    settings: Training,
    width: float,
    like: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the average of a finished run with another width than the recipe's, from the averages that it kept.

    Args:
        folder: the folder of the run's checkpoints.
        settings: the run's recipe.
        width: relative, usually between 0.02 and 0.2.
        like: the expert's tensors, for names, dtypes and shapes.

    Raises:
        MathError: a width that no average has, or a recipe without `ema_snapshots`.
        MissingFileError: an average is not there; the run has not ended.
        TensorFileError: a file is not one of this expert.
    """
    steps = kept_steps(settings)
    if not steps:
        raise MathError(
            "ema_snapshots",
            expected="a run that kept averages",
            got="a recipe with 0 ema_snapshots",
        )
    stored: list[Profile] = []
    paths: list[Path] = []
    for step in steps:
        for number, stored_width in enumerate(KEPT_WIDTHS):
            stored.append(Profile(exponent_of(stored_width), float(step)))
            paths.append(_kept_path(folder, step, number))
    target = Profile(exponent_of(width), float(settings.num_steps))
    factors = average_of(stored, target).tolist()
    specs: dict[str, TensorSpec] = {}
    total: dict[str, Tensor] = {}
    for name, value in like.items():
        specs[name] = spec_of(value)
        # In float64, since the factors may be large and of both signs.
        total[name] = torch.zeros(value.shape, dtype=torch.float64)
    for path, factor in zip(paths, factors, strict=True):
        average = load_tensors(path, specs, max_bytes=_max_bytes(specs))
        for name, value in average.items():
            total[name] += factor * value.double()
    return {name: value.to(like[name].dtype) for name, value in total.items()}


def _max_bytes(specs: Mapping[str, TensorSpec]) -> int:
    return sum(spec.bytes for spec in specs.values()) + _MAX_HEADER_BYTES


def _kept_path(folder: Path, step: int, number: int) -> Path:
    return folder / _FOLDER / f"step-{step:010d}-{number}.safetensors"
