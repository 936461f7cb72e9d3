"""Tests an expert at single times: all those at which a usual solver asks it, and some that only the aggregator knows.

Losses averaged over a band of t hide an expert that answers wildly at one time, such as t = 1, where every sample
begins. Here one loss at one time decides.
"""

# Shape legend: R rows, each one noised public image at one time under one condition.
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from aggregator.intake.conditions import (
    Answer,
    ExpertCondition,
    answer_by_condition,
    chosen_conditions,
)
from ddm.diffusion.path import Path, Prediction, target_of, x_t
from ddm.diffusion.solver import uniform_times
from ddm.protocol.architecture import Condition
from ddm.protocol.base import Model

DEFAULT_STEPS = 50  # of the teacher of `ddm distill`; the 25 midpoint steps of `ddm sample` ask at the same times
OTHER_STEPS = (24, 16)  # of the report's pictures; of the samples router
FEWEST_ROWS, MOST_SECRET_ROWS = 64, 64
FEWEST_CLASSES = 8
ROWS_OF_CONDITION = 4
NEAR_NOISE = 0.8


class WorstRow(Model):
    """The row on which an expert is worst.

    Attributes:
        t: its time.
        told: its condition, in words.
        times: its loss, as a multiple of the limit there.
        num_over: the number of rows above their limits.
        num_rows: of all.
    """

    t: float
    told: str
    times: float
    num_over: int
    num_rows: int


@dataclass(frozen=True)
class Sweep:
    """Public images, each noised to one time, with what an expert should answer and how far off it may be.

    Attributes:
        x: noised images, shape (R, ...).
        t: their times.
        target: the prediction that an expert learns there.
        limit: the largest plausible loss of each row.
        told: the condition of each row.
    """

    x: Tensor
    t: Tensor
    target: Tensor
    limit: Tensor
    told: list[ExpertCondition]

    @classmethod
    def of(
        cls,
        images: Tensor,
        path: Path,
        prediction: Prediction,
        condition: Condition,
        rng: np.random.Generator,
        *,
        num_rows: int,
        num_told: int,
        slack: tuple[float, float],
    ) -> "Sweep":
        """Choose times, noise, images and conditions.

        Near t = 1 an honest expert answers at worst with another image: its loss is at most that of the public image
        that is farthest from the one that was noised. At smaller t that bound grows without limit, and a multiple of
        the loss of answering 0 takes its place.

        Args:
            images: public images, shape (N, ...).
            path: of the noising.
            prediction: the quantity that an expert predicts.
            condition: the kind of condition that it takes.
            rng: chooses.
            num_rows: rows without a condition.
            num_told: most conditions, each of which gets some rows more.
            slack: the factors of the limit near t = 1 and below.
        """
        times = chosen_times(rng, num_rows)
        told = [ExpertCondition()] * len(times)
        # t = 1, and a secret time in each third
        for each in chosen_conditions(condition, rng, most=num_told):
            times += [
                1.0,
                *((np.arange(ROWS_OF_CONDITION - 1) + rng.random(3)) / (ROWS_OF_CONDITION - 1)),
            ]
            told += [each] * ROWS_OF_CONDITION
        t = torch.tensor(times, dtype=torch.float32)
        x_0 = images[torch.from_numpy(rng.integers(len(images), size=len(times)))]
        eps = torch.from_numpy(rng.standard_normal(tuple(x_0.shape), dtype=np.float32))
        target = target_of(path, prediction, x_0, eps, t)
        limit = _limits(images, x_0, target, t, path, prediction, slack)
        return cls(x_t(path, x_0, eps, t), t, target, limit, told)

    def worst(self, answer: Answer) -> WorstRow:
        """Return the row on which an expert exceeds its limit the most."""
        times_R = self.multiples(answer)
        row = int(times_R.argmax())
        return WorstRow(
            t=float(f"{float(self.t[row]):.4g}"),
            told=self.told[row].words,
            times=float(f"{float(times_R[row]):.4g}"),
            num_over=int((times_R > 1).sum()),
            num_rows=len(times_R),
        )

    def multiples(self, answer: Answer) -> Tensor:
        """Return each row's loss as a multiple of its limit, shape (R,); a loss that is not finite is very large."""
        loss_R = (
            (answer_by_condition(answer, self.x, self.t, self.told) - self.target)
            .double()
            .square()
            .flatten(1)
            .mean(1)
        )
        return torch.nan_to_num(loss_R / self.limit, nan=_ENDLESS, posinf=_ENDLESS).clamp(
            max=_ENDLESS
        )


_ENDLESS = 1e30


def chosen_times(rng: np.random.Generator, num_rows: int) -> list[float]:
    """Return the times of the rows: t = 1 and t = 0, the default grid, secret times, then halves of steps and others.

    Args:
        rng: draws the secret times, and chooses where not all fit.
        num_rows: how many.
    """
    ends, grid = [1.0, 0.0], uniform_times(DEFAULT_STEPS)[1:-1]
    halves = [(2 * n + 1) / (2 * DEFAULT_STEPS) for n in range(DEFAULT_STEPS)]
    more = sorted({t for steps in OTHER_STEPS for t in uniform_times(steps)} - {*ends, *grid})
    secret = rng.random(MOST_SECRET_ROWS).tolist()
    found = [*ends, *grid, *secret[: max(0, num_rows - len(grid) - 2) // 2 + 1]]
    rest = cast("list[float]", rng.permutation([*halves, *more]).tolist())
    return [*found, *rest, *secret[len(found) - len(grid) - 2 :]][:num_rows]


def all_times() -> int:
    """Return the number of rows that hold every time and every secret time."""
    others = {t for steps in OTHER_STEPS for t in uniform_times(steps)} - set(
        uniform_times(DEFAULT_STEPS)
    )
    return 2 * DEFAULT_STEPS + 1 + len(others) + MOST_SECRET_ROWS


def _limits(
    images: Tensor,
    x_0: Tensor,
    target: Tensor,
    t: Tensor,
    path: Path,
    prediction: Prediction,
    slack: tuple[float, float],
) -> Tensor:
    """Return the largest plausible loss of each row, shape (R,), float64."""
    silent_R = target.double().square().flatten(1).mean(1)
    farthest_R = torch.cdist(x_0.flatten(1).double(), images.flatten(1).double()).max(1).values
    t_R = t.double()
    alpha_R, sigma_R = path.alpha(t_R), path.sigma(t_R).clamp(min=1e-9)
    # x_t fixes eps once x_0 is chosen, eps_hat = (x_t - alpha x_0_hat) / sigma, and both fix the prediction.
    per_x_0_R = target_of(path, prediction, torch.ones_like(t_R), -alpha_R / sigma_R, t_R)
    another_R = farthest_R.square() / x_0[0].numel() * per_x_0_R.square()
    near, below = slack
    return torch.where(
        t_R >= NEAR_NOISE, near * torch.maximum(silent_R, another_R), below * silent_R
    )
