"""Computes the geometry of a report's charts; the template adds colours and text."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddm.evaluation.intervals import wilson
from ddm.pages.pictures import inline
from ddm.publishing.drawing import Drawn

WIDTH, HEIGHT = 240.0, 150.0


@dataclass(frozen=True)
class Picture:
    """One image, inlined, and the index of its silo."""

    source: str
    silo: int


@dataclass(frozen=True)
class Area:
    """One silo's band in a stack of posteriors, as the points of a polygon."""

    silo: int
    points: str


@dataclass(frozen=True)
class Share:
    """A silo's share of drawn images with its 95% interval, beside the share that it should have."""

    silo: int
    prior: float
    value: float
    low: float
    high: float

    @property
    def fits(self) -> bool:
        """Whether the interval contains the prior."""
        return self.low <= self.prior <= self.high


def pictures(drawn: Drawn, num: int, value_range: tuple[float, float]) -> tuple[Picture, ...]:
    """Inline the first `num` images as small PNGs; empty if they are neither grey nor colour."""
    return tuple(
        Picture(source, silo)
        for source, silo in zip(inline(drawn.images[:num], value_range), drawn.silo_N, strict=False)
    )


def stack(posterior: Sequence[Sequence[float]], first: int) -> tuple[Area, ...]:
    """Stack the silos' probabilities over time, the `first` silo at the bottom; t = 0 is on the left."""
    last = len(posterior) - 1
    base, areas = [0.0] * len(posterior), []
    for silo in [first, *(k for k in range(len(posterior[0])) if k != first)]:
        top = [below + row[silo] for below, row in zip(base, posterior, strict=True)]
        edges = [*enumerate(top), *reversed([*enumerate(base)])]
        points = " ".join(
            f"{n / last * WIDTH:.1f},{(1 - min(y, 1.0)) * HEIGHT:.1f}" for n, y in edges
        )
        areas.append(Area(silo, points))
        base = top
    return tuple(areas)


def shares(drawn: Drawn, priors: Sequence[float]) -> tuple[Share, ...]:
    """Count the silos among drawn images, with Wilson's intervals."""
    num = len(drawn.silo_N)
    counts = [sum(silo == k for silo in drawn.silo_N) for k in range(len(priors))]
    return tuple(
        Share(k, priors[k], counts[k] / num, *wilson(counts[k], num)) for k in range(len(priors))
    )
