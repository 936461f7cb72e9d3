"""Draws images of an expert and holds them to the public images: finite, not too far from them, not all alike.

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

FEWEST_PUBLIC, MOST_PUBLIC, PUBLIC_BYTES = 32, 256, 64 << 20
FEWEST_DRAWN, MOST_DRAWN = 8, 16  # without a condition
DRAWN_TOLD, MOST_TOLD = 4, 8  # under one condition, and how many conditions
STEPS = 16
EPS_START = 0.8  # nearer to t = 1, eps-prediction divides an honest expert's error by almost 0
_ENDLESS = 1e30


def most_public(num_values: int) -> int:
    """Return the number of public images that stay in memory: fewer where one has more values."""
    return int(np.clip(PUBLIC_BYTES // (4 * num_values), FEWEST_PUBLIC, MOST_PUBLIC))


class DrawnFigures(Model):
    """What the images drawn under one condition are like.

    Attributes:
        told: the condition, in words.
        num: images.
        num_broken: of them not finite.
        far: median over the images of the distance to the nearest public image, as a multiple of the median distance
            of two public images.
        farthest: the largest, as a multiple of the distance of the two public images that differ the most.
        alike: mean distance of two drawn images, as a multiple of that of the most alike public images, as many.
    """

    told: str
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
        within = self._distances[order[:, :, None], order[:, None, :]]
        return float(within.sum((1, 2)).min()) / (order.shape[1] * (order.shape[1] - 1))

    def nearest(self, points: Tensor) -> Tensor:
        """Return each point's distance to the nearest public image, shape (M,)."""
        return torch.cdist(points.double(), self.points.double()).min(1).values


@dataclass(frozen=True)
class Gallery:
    """The public images in the experts' space and in the features of the plan's encoder.

    Attributes:
        seen: in the experts' space.
        features: as the encoder describes them.
        encode: from the experts' space to features.
    """

    seen: PublicSet
    features: PublicSet
    encode: Callable[[Tensor], Tensor]

    def figures(self, told: str, images: Tensor) -> DrawnFigures:
        """Describe images drawn under one condition.

        Args:
            told: the condition, in words.
            images: in the experts' space, shape (M, ...).
        """
        whole_M = images.flatten(1).isfinite().all(1)
        near_M = self.seen.nearest(images.flatten(1)[whole_M])
        spaces = [(self.seen, images.flatten(1)[whole_M])]
        # a decoder need not cope with anything else
        inside = images[whole_M][near_M <= self.seen.widest]
        num_broken = int((~whole_M).sum())
        if len(inside):
            try:
                spaces.append((self.features, self.encode(inside)))
            except NumericalError:
                num_broken += len(inside)
        described = [_described(public, points) for public, points in spaces if len(points)]
        far, farthest, alike = (
            zip(*described, strict=True) if described else ((_ENDLESS,), (_ENDLESS,), (0.0,))
        )
        return DrawnFigures(
            told=told,
            num=len(images),
            num_broken=num_broken,
            far=_short(max(far)),
            farthest=_short(max(farthest)),
            alike=_short(min(alike)),
        )


def _described(public: PublicSet, points: Tensor) -> tuple[float, float, float]:
    nearest_M, num = public.nearest(points), len(points)
    apart = float(torch.cdist(points.double(), points.double()).sum()) / max(num * (num - 1), 1)
    alike = apart / max(public.closest(num), 1e-9) if num > 1 else _ENDLESS
    return float(nearest_M.median()) / public.typical, float(nearest_M.max()) / public.widest, alike


def _short(value: float) -> float:
    return float(f"{min(value, _ENDLESS):.4g}")


def drawn_images(
    velocity: Answer,
    told: Sequence[ExpertCondition],
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
        told: the condition of each image; those without one come first.
        shape: one image in the experts' space.
        path: of the ensemble.
        rng: draws noise and times.
        mean: of the public images; a sample that starts below t = 1 starts from it with noise.
        start: the t at which samples start.
    """
    inner = (np.arange(1, STEPS) + rng.random(STEPS - 1) - 0.5) / STEPS
    times = [start * t for t in (1.0, *inner[::-1].tolist(), 0.0)]
    noise = torch.from_numpy(rng.standard_normal((len(told), *shape), dtype=np.float32))
    x_B = x_t(path, mean.expand_as(noise), noise, torch.full((len(told),), start))
    return integrate(
        lambda x_B, t_B: answer_by_condition(velocity, x_B, t_B, told),
        x_B,
        times,
        "dpm",
        path,
    )
