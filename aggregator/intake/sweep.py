"""Tests an expert at single times: those of the usual solvers, and some that only the aggregator knows.

Losses averaged over a band of t hide an expert that answers wildly at one time, such as t = 1, where every sample
begins. Here one loss at one time decides.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from aggregator.intake.conditions import (
    Answer,
    ExpertCondition,
    answer_by_condition,
    choose_conditions,
)
from ddm.diffusion.path import Path, Prediction, target_of, x_t
from ddm.diffusion.solver import uniform_times
from ddm.protocol.architecture import Condition
from ddm.protocol.base import Model

# Shape legend: N public images, R rows, each one noised public image at one time under one condition.

# Of the teacher of `ddm distill`; the 25 midpoint steps of `ddm sample` evaluate an expert at the same times.
DEFAULT_STEPS = 50
# Of the report's pictures, and of the samples router.
OTHER_STEPS = (24, 16)
MIN_ROWS = 64
MAX_SECRET_ROWS = 64
MIN_CLASSES = 8
ROWS_OF_CONDITION = 4
# The time from which on another image is the worst plausible answer.
NEAR_NOISE = 0.8
# Replaces a loss that is not finite.
_ENDLESS = 1e30


class WorstRow(Model):
    """The row on which an expert is worst.

    Attributes:
        t: its time.
        condition: the condition of the expert there, in words.
        times: its loss, as a multiple of the limit there.
        num_over: the number of rows above their limits.
        num_rows: the number of all rows.
    """

    t: float
    condition: str
    times: float
    num_over: int
    num_rows: int


@dataclass(frozen=True)
class SweepSize:
    """How many rows a sweep has.

    Attributes:
        num_rows: rows without a condition.
        max_conditions: most conditions, each of which gets some rows more.
    """

    num_rows: int
    max_conditions: int


@dataclass(frozen=True)
class LossLimits:
    """The largest plausible loss of a row.

    Attributes:
        near_noise: from t = 0.8 on, times the loss of the farthest public image, or of answering 0.
        below: times the loss of answering 0.
    """

    near_noise: float
    below: float


@dataclass(frozen=True)
class Sweep:
    """Public images, each noised to one time, with what an expert should answer and how far off it may be.

    Attributes:
        x: noised images, shape (R, ...).
        t: their times.
        target: the prediction that an expert learns there.
        limit: the largest plausible loss of each row.
        conditions: the conditions of the rows.
    """

    x: Tensor
    t: Tensor
    target: Tensor
    limit: Tensor
    conditions: list[ExpertCondition]

    @classmethod
    def of(
        cls,
        images: Tensor,
        path: Path,
        prediction: Prediction,
        condition: Condition,
        rng: np.random.Generator,
        size: SweepSize,
        limits: LossLimits,
    ) -> "Sweep":
        """Choose times, noise, images and conditions.

        Near t = 1 an honest expert answers at worst with another image: its loss is at most that of the public image
        that is farthest from the one that was noised. At smaller t that bound grows without limit, and a multiple of
        the loss of answering 0 takes its place.

        Args:
            images: public images, shape (N, ...).
            path: the path of the noising.
            prediction: the quantity that an expert predicts.
            condition: the kind of condition that it takes.
            rng: chooses.
            size: how many rows.
            limits: how far off an expert may be.
        """
        times = choose_times(rng, size.num_rows)
        conditions = [ExpertCondition()] * len(times)
        for chosen in choose_conditions(condition, rng, max_conditions=size.max_conditions):
            # t = 1, and a secret time in each third.
            num_parts = ROWS_OF_CONDITION - 1
            secret_times = (np.arange(num_parts) + rng.random(num_parts)) / num_parts
            times += [1.0, *secret_times]
            conditions += [chosen] * ROWS_OF_CONDITION
        t = torch.tensor(times, dtype=torch.float32)
        # A secret choice: an expert that is honest about known images alone is found out.
        number_R = rng.integers(len(images), size=len(times))
        x_0 = images[torch.from_numpy(number_R)]
        noise = rng.standard_normal(tuple(x_0.shape), dtype=np.float32)
        eps = torch.from_numpy(noise)
        target = target_of(path, prediction, x_0, eps, t)
        # The loss of another image in place of the one that was noised.
        another_R = _farthest_loss(images, x_0, t, path, prediction)
        silent_R = target.double().square().flatten(1).mean(1)
        limit_near_noise_R = limits.near_noise * torch.maximum(silent_R, another_R)
        limit_below_R = limits.below * silent_R
        limit = torch.where(t.double() >= NEAR_NOISE, limit_near_noise_R, limit_below_R)
        return cls(x_t(path, x_0, eps, t), t, target, limit, conditions)

    def worst(self, answer: Answer) -> WorstRow:
        """Return the row on which an expert exceeds its limit the most."""
        times_R = self.multiples(answer)
        row = int(times_R.argmax())
        num_over = int((times_R > 1).sum())
        return WorstRow(
            t=_rounded(self.t[row]),
            condition=self.conditions[row].words,
            times=_rounded(times_R[row]),
            num_over=num_over,
            num_rows=len(times_R),
        )

    def multiples(self, answer: Answer) -> Tensor:
        """Return each row's loss as a multiple of its limit, shape (R,); a loss that is not finite is very large."""
        answers = answer_by_condition(answer, self.x, self.t, self.conditions)
        error = (answers - self.target).double()
        loss_R = error.square().flatten(1).mean(1)
        multiple_R = loss_R / self.limit
        finite_R = torch.nan_to_num(multiple_R, nan=_ENDLESS, posinf=_ENDLESS)
        return finite_R.clamp(max=_ENDLESS)


def choose_times(rng: np.random.Generator, num_rows: int) -> list[float]:
    """Return the times of the rows: t = 1 and t = 0, the default grid, secret times, then halves of steps and others.

    Args:
        rng: draws the secret times, and chooses where not all fit.
        num_rows: the number of rows.
    """
    ends = [1.0, 0.0]
    grid = uniform_times(DEFAULT_STEPS)[1:-1]
    # The midpoint solver evaluates an expert between two steps as well.
    halves = [(2 * n + 1) / (2 * DEFAULT_STEPS) for n in range(DEFAULT_STEPS)]
    other_grids = sorted(_times_of_other_grids() - {*ends, *grid})
    secret = rng.random(MAX_SECRET_ROWS).tolist()
    # Half of the rows that the default grid leaves are at secret times, so that an expert cannot be honest at all those
    # that it knows and wild elsewhere.
    num_left = max(0, num_rows - len(grid) - len(ends))
    num_secret = num_left // 2 + 1
    rest = cast("list[float]", rng.permutation([*halves, *other_grids]).tolist())
    times = [*ends, *grid, *secret[:num_secret], *rest, *secret[num_secret:]]
    return times[:num_rows]


def _times_of_other_grids() -> set[float]:
    times: set[float] = set()
    for num_steps in OTHER_STEPS:
        times.update(uniform_times(num_steps))
    return times


def num_rows_of_all_times() -> int:
    """Return the number of rows that hold every time and every secret time."""
    default_times = set(uniform_times(DEFAULT_STEPS))
    other_times = _times_of_other_grids() - default_times
    return 2 * DEFAULT_STEPS + 1 + len(other_times) + MAX_SECRET_ROWS


def _farthest_loss(
    images: Tensor, x_0: Tensor, t: Tensor, path: Path, prediction: Prediction
) -> Tensor:
    """Return the loss of answering with the public image that is farthest from the noised one, shape (R,), float64."""
    noised_RD = x_0.flatten(1).double()
    public_ND = images.flatten(1).double()
    farthest_R = torch.cdist(noised_RD, public_ND).max(1).values
    t_R = t.double()
    alpha_R = path.alpha(t_R)
    sigma_R = path.sigma(t_R).clamp(min=1e-9)
    # x_t fixes eps once x_0 is chosen, eps_hat = (x_t - alpha x_0_hat) / sigma, and both fix the prediction.
    # By how much the prediction changes with x_0_hat: the prediction of x_0 = 1 and eps = -alpha / sigma.
    per_x_0_R = target_of(path, prediction, torch.ones_like(t_R), -alpha_R / sigma_R, t_R)
    num_values = x_0[0].numel()
    return farthest_R.square() / num_values * per_x_0_R.square()


def _rounded(value: Tensor) -> float:
    """Return a figure with four significant digits, as documents hold it."""
    return float(f"{float(value):.4g}")
