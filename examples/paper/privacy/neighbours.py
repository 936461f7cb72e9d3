"""Draws statistics of two neighbouring data sets, the input of a membership attack; `attacks` evaluates it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.privacy.accounting import (
    GaussianMechanism,
    gaussian_mu,
    total_epsilon,
)
from ddm.protocol.base import Unit
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind
from ddm.routers.sketch import Sketch
from ddm.statistics.base import StatisticSource
from examples.paper.privacy.drawing import (
    MAX_GROUPS,
    Released,
    images_of,
    make_plan,
    make_source,
    noise_of,
    public_sketch,
    release,
)

# Shape legend: N experiments, U units, R sketch dimensions.

Scores = NDArray[np.float64]
CLASSES = 8
CLASS_GROUPS = 1024


@dataclass(frozen=True)
class Neighbours:
    """Two neighbouring data sets, and the test that best tells from which of them a statistic was drawn.

    One statistic holds many experiments: each unit is exchanged in cells, rows or directions of its own, and no two of
    them share noise. So each shows what an attacker sees who knows all other units.

    Attributes:
        kinds: the statistics that are looked at together.
        worlds: both data sets, every unit exchanged between them.
        score: each experiment's log-likelihood ratio of the first world over the second, up to a constant.
    """

    kinds: tuple[StatisticKind, ...]
    worlds: tuple[StatisticSource, StatisticSource]
    score: Callable[[Released], Scores]

    def scores(self, num: int) -> tuple[Scores, Scores]:
        """Draw statistics of both worlds until there are `num` scores of each."""
        first, second = (self._scores(source, num) for source in self.worlds)
        return first, second

    def _scores(self, source: StatisticSource, num: int) -> Scores:
        scores = [self.score(release(source, self.kinds))]
        while len(scores) * len(scores[0]) < num:
            scores.append(self.score(release(source, self.kinds)))
        return np.concatenate(scores)[:num]


def with_quarter_noise(epsilon: float, delta: float = 0.0) -> float:
    """Return the epsilon whose statistic has a quarter of the noise: the control that an attack must tell apart."""
    if delta == 0.0:
        return 4 * epsilon
    return total_epsilon([GaussianMechanism(mu=4 * gaussian_mu(epsilon, delta))], delta)


def counts(epsilon: float, *, unit: Unit = "image", images_each: int = 1) -> Neighbours:
    """Move each unit's images from one group to another.

    Args:
        epsilon: of the counts.
        unit: of the plan.
        images_each: how many images a patient has; with the image as the unit they all count.
    """
    plan = make_plan({"counts": {"epsilon": epsilon, "num_groups": MAX_GROUPS}}, unit=unit)
    group_U = torch.arange(0, MAX_GROUPS, 2)
    images_U = torch.zeros(len(group_U), 1, 2, 2)
    first, second = (
        make_source(plan, public_sketch(1), images_U, group_U + world, images_each)
        for world in (0, 1)
    )
    moved = 1 if unit == "patient" else images_each
    return Neighbours(
        ("counts",),
        (first, second),
        lambda found: moved_score(found["counts"]["counts"], moved, epsilon),
    )


def class_counts(epsilon: float) -> Neighbours:
    """Exchange each unit for one of the next class in the same group."""
    terms = {"epsilon": epsilon, "num_classes": CLASSES}
    plan = make_plan(
        {"counts": {"epsilon": 1.0, "num_groups": CLASS_GROUPS}, "class_counts": terms}
    )
    label_U, group_U = torch.cartesian_prod(
        torch.arange(0, CLASSES, 2), torch.arange(CLASS_GROUPS)
    ).T
    source = make_source(plan, public_sketch(1), torch.zeros(len(group_U), 1, 2, 2), group_U)
    first, second = (replace(source, label_N=label_U + world) for world in (0, 1))

    def score(found: Released) -> Scores:
        by_class = found["class_counts"]["counts"]
        return moved_score(torch.stack([by_class[0::2], by_class[1::2]], dim=-1), 1, epsilon)

    return Neighbours(("class_counts",), (first, second), score)


def sketches(
    epsilon: float,
    delta: float,
    *,
    rank: int = 12,
    scale: float = 1.0,
    unit: Unit = "image",
    images_each: int = 1,
    num: int = 20_000,
) -> Neighbours:
    """Exchange each unit's images for their opposites, which lie outside the unit ball on the other side.

    Args:
        epsilon: of the sketches.
        delta: likewise.
        rank: dimensions of a sketch.
        scale: C of the public sketch.
        unit: of the plan.
        images_each: how many images a patient has; with the image as the unit each has a row.
        num: units of one statistic.
    """
    plan = make_plan(
        {"sketch": {"epsilon": epsilon, "delta": delta, "rank": rank}}, rank=rank, unit=unit
    )
    sketch = public_sketch(rank, scale)
    first, second = (
        _opposites(plan, sketch, num, side, torch.zeros(num).long(), images_each)
        for side in (1, -1)
    )
    rows = 1 if unit == "patient" else images_each
    return Neighbours(
        ("sketch",),
        (first, second),
        lambda found: _along(found, plan, sketch).reshape(num, rows).sum(1),
    )


def counts_and_sketches(counts_epsilon: float, epsilon: float, delta: float) -> Neighbours:
    """Exchange each unit in two statistics of one plan: for its opposite, which lies in another group."""
    terms = {"epsilon": epsilon, "delta": delta, "rank": 2}
    counted = {"epsilon": counts_epsilon, "num_groups": MAX_GROUPS}
    plan = make_plan(
        {"counts": counted, "sketch": terms, "total": {"epsilon": 1000.0, "delta": delta}}, rank=2
    )
    sketch = public_sketch(2, num_groups=MAX_GROUPS)
    group_U = torch.arange(0, MAX_GROUPS, 2)
    first, second = (
        _opposites(plan, sketch, len(group_U), side, group_U + world)
        for world, side in ((0, 1), (1, -1))
    )

    def score(found: Released) -> Scores:
        # Any row may stand for any unit: given the world they are all drawn alike, and apart from the counts.
        return moved_score(found["counts"]["counts"], 1, counts_epsilon) + _along(
            found, plan, sketch
        )

    return Neighbours(("counts", "sketch"), (first, second), score)


def moved_score(pairs: Tensor, num: int, epsilon: float) -> Scores:
    """Log-likelihood ratio of `num` images in the even cell of each pair over as many in the odd one."""
    even, odd = pairs.reshape(-1, 2).double().numpy().T
    return np.asarray(epsilon / 2 * (abs(even) - abs(even - num) - abs(odd) + abs(odd - num)))


def _along(found: Released, plan: Plan, sketch: Sketch) -> Scores:
    """Log-likelihood ratio of each released sketch for `_opposites`."""
    alpha, sigma_over_scale = noise_of(plan, sketch)
    direction_R = torch.ones(sketch.rank, dtype=torch.float64) / sqrt(sketch.rank)
    along_N = found["sketch"]["sketch"].double() @ direction_R
    return np.asarray(2 * alpha * along_N.numpy() / sigma_over_scale**2)


def _opposites(
    plan: Plan, sketch: Sketch, num: int, side: int, group_U: Tensor, images_each: int = 1
) -> StatisticSource:
    s_UR = torch.full((num, sketch.rank), side * 1.5 / sqrt(sketch.rank), dtype=torch.float64)
    return make_source(plan, sketch, images_of(s_UR, sketch), group_U, images_each)
