"""Draws images of an expert and compares them with the public images: finite, not too far from them, not all alike.

The public images set every limit: how far two of them are from each other, and how alike the most alike of them are.
"""

# Shape legend: N public images, M drawn images under one condition, D values of an image.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from aggregator.intake.conditions import Answer, ExpertCondition, answer_by_condition
from ddm.diffusion.path import Path, x_t
from ddm.diffusion.solver import integrate
from ddm.errors import NumericalError
from ddm.protocol.base import Model

# Public images that stay in memory, and the bytes that they may take.
MIN_PUBLIC = 32
MAX_PUBLIC = 256
PUBLIC_BYTES = 64 << 20
# Images drawn without a condition.
MIN_DRAWN = 8
MAX_DRAWN = 16
# Images drawn under one condition, and how many conditions.
DRAWN_BY_CONDITION = 4
MAX_CONDITIONS = 8
DRAWING_STEPS = 16
# Nearer to t = 1, eps-prediction divides an honest expert's error by almost 0.
EPS_START = 0.8
# Replaces a distance where none can be measured.
_ENDLESS = 1e30
_MIN_DISTANCE = 1e-9
_FLOAT_BYTES = 4


def num_gallery_images(num_values: int) -> int:
    """Return the number of public images that stay in memory: fewer where one has more values."""
    return int(np.clip(PUBLIC_BYTES // (_FLOAT_BYTES * num_values), MIN_PUBLIC, MAX_PUBLIC))


class DrawnFigures(Model):
    """What the images drawn under one condition are like.

    Attributes:
        condition: in words.
        num: images.
        num_broken: the number of images that are not finite.
        far: median over the images of the distance to the nearest public image, as a multiple of the median distance
            of two public images.
        farthest: the largest, as a multiple of the distance of the two public images that differ the most.
        alike: mean distance of two drawn images, as a multiple of that of the most alike public images, as many.
    """

    condition: str
    num: int
    num_broken: int
    far: float
    farthest: float
    alike: float


@dataclass(frozen=True)
class PublicSet:
    """Public images in one space, and what their distances say about plausible images.

    Attributes:
        points: shape (N, D), at least two that differ.
    """

    points: Tensor

    @cached_property
    def _distances(self) -> Tensor:
        return torch.cdist(self.points.double(), self.points.double())

    @cached_property
    def typical(self) -> float:
        """The median distance of two public images."""
        num = len(self.points)
        return float(self._distances[~torch.eye(num, dtype=torch.bool)].median())

    @cached_property
    def widest(self) -> float:
        """The largest distance of two public images."""
        return float(self._distances.max())

    def closest(self, num: int) -> float:
        """Return the mean distance of two among the `num` most alike: an image and its nearest neighbours."""
        order = self._distances.argsort(1)[:, :num]
        num_near = order.shape[1]
        within = self._distances[order[:, :, None], order[:, None, :]]
        return float(within.sum((1, 2)).min()) / (num_near * (num_near - 1))

    def nearest(self, points: Tensor) -> Tensor:
        """Return each point's distance to the nearest public image, shape (M,)."""
        # In float64: a broken expert's images may have values whose squares float32 does not hold.
        return torch.cdist(points.double(), self.points.double()).min(1).values


@dataclass(frozen=True)
class _Comparison:
    """How drawn images compare with public ones in one space; see `DrawnFigures`."""

    far: float
    farthest: float
    alike: float

    @classmethod
    def of(cls, public: PublicSet, points: Tensor) -> "_Comparison":
        """Compare points of drawn images, shape (M, D), with the public set in the same space."""
        num = len(points)
        nearest_M = public.nearest(points)
        alike = _ENDLESS
        if num > 1:
            distances = torch.cdist(points.double(), points.double())
            mean_distance = float(distances.sum()) / (num * (num - 1))
            alike = mean_distance / max(public.closest(num), _MIN_DISTANCE)
        return cls(
            far=float(nearest_M.median()) / public.typical,
            farthest=float(nearest_M.max()) / public.widest,
            alike=alike,
        )


@dataclass(frozen=True)
class Gallery:
    """The public images in the experts' space and in the features of the plan's encoder.

    Attributes:
        samples: in the experts' space.
        features: as the encoder describes them.
        encode: from the experts' space to features.
    """

    samples: PublicSet
    features: PublicSet
    encode: Callable[[Tensor], Tensor]

    def figures(self, condition: str, images: Tensor) -> DrawnFigures:
        """Describe images drawn under one condition.

        Args:
            condition: in words.
            images: in the experts' space, shape (M, ...).
        """
        finite_M = images.flatten(1).isfinite().all(1)
        finite_images = images[finite_M]
        points = finite_images.flatten(1)
        num_broken = len(images) - len(finite_images)
        comparisons = []
        if len(points):
            comparisons.append(_Comparison.of(self.samples, points))
        # A decoder need not cope with anything else than images near the public ones.
        near_images = finite_images[self.samples.nearest(points) <= self.samples.widest]
        if len(near_images):
            try:
                features = self.encode(near_images)
            except NumericalError:
                num_broken += len(near_images)
            else:
                comparisons.append(_Comparison.of(self.features, features))
        # The worst of both spaces counts; without any, nothing of these images is plausible.
        return DrawnFigures(
            condition=condition,
            num=len(images),
            num_broken=num_broken,
            far=_short(max((space.far for space in comparisons), default=_ENDLESS)),
            farthest=_short(max((space.farthest for space in comparisons), default=_ENDLESS)),
            alike=_short(min((space.alike for space in comparisons), default=0.0)),
        )


def _short(value: float) -> float:
    return float(f"{min(value, _ENDLESS):.4g}")


def drawn_images(
    velocity: Answer,
    conditions: Sequence[ExpertCondition],
    shape: Sequence[int],
    path: Path,
    rng: np.random.Generator,
    *,
    mean: Tensor,
    start: float = 1.0,
) -> Tensor:
    """Draw one image under each condition listed, by the solver with one evaluation a step, at secret times.

    Args:
        velocity: the expert, on `path`.
        conditions: the conditions of the images; those without one come first.
        shape: one image in the experts' space.
        path: the path of the ensemble.
        rng: draws noise and times.
        mean: the mean of the public images; a sample that starts below t = 1 starts from it with noise.
        start: the t at which samples start.
    """
    # Secret times within the steps, so that an expert cannot be honest at those of the usual solvers alone.
    inner = (np.arange(1, DRAWING_STEPS) + rng.random(DRAWING_STEPS - 1) - 0.5) / DRAWING_STEPS
    times = [start * t for t in (1.0, *inner[::-1].tolist(), 0.0)]
    num = len(conditions)
    noise = torch.from_numpy(rng.standard_normal((num, *shape), dtype=np.float32))
    x_B = x_t(path, mean.expand_as(noise), noise, torch.full((num,), start))
    return integrate(
        lambda x_B, t_B: answer_by_condition(velocity, x_B, t_B, conditions),
        x_B,
        times,
        "dpm",
        path,
    )
