"""Computes the geometry of a report's charts; the template adds colours and text."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import sqrt

from PIL import Image

from aggregator.pages.drawing import Drawn
from ddm.io.pictures import to_pixels

WIDTH, HEIGHT = 240.0, 150.0
MAX_PIXELS = 160
_Z95 = 1.959964


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


@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions on a bar."""

    low: float
    high: float
    width: float = 120.0

    def x(self, value: float) -> str:
        """Return the position of `value`."""
        part = (value - self.low) / ((self.high - self.low) or 1.0)
        return f"{min(max(part, 0.0), 1.0) * self.width:.1f}"

    @classmethod
    def over(cls, values: Sequence[float]) -> "Scale":
        """Return the scale from the smallest to the largest value that also contains zero."""
        return cls(min(0.0, *values), max(0.0, *values))


def pictures(drawn: Drawn, num: int, value_range: tuple[float, float]) -> tuple[Picture, ...]:
    """Inline the first `num` images as small PNGs; empty if they are neither grey nor colour."""
    if drawn.images.shape[1] not in (1, 3):
        return ()
    low, high = value_range
    pixels = to_pixels((drawn.images[:num] - low) / (high - low) * 2 - 1)
    return tuple(Picture(_png(image), silo) for image, silo in zip(pixels, drawn.silo_N, strict=False))


def _png(pixels: object) -> str:
    image, encoded = Image.fromarray(pixels), BytesIO()  # type: ignore[arg-type]
    image.thumbnail((MAX_PIXELS, MAX_PIXELS))
    image.save(encoded, format="PNG", optimize=True)
    return "data:image/png;base64," + b64encode(encoded.getvalue()).decode("ascii")


def stack(posterior: Sequence[Sequence[float]], first: int) -> tuple[Area, ...]:
    """Stack the silos' probabilities over time, the `first` silo at the bottom; t = 0 is on the left."""
    last = len(posterior) - 1
    base, areas = [0.0] * len(posterior), []
    for silo in [first, *(k for k in range(len(posterior[0])) if k != first)]:
        top = [below + row[silo] for below, row in zip(base, posterior, strict=True)]
        edges = [*enumerate(top), *reversed([*enumerate(base)])]
        points = " ".join(f"{n / last * WIDTH:.1f},{(1 - min(y, 1.0)) * HEIGHT:.1f}" for n, y in edges)
        areas.append(Area(silo, points))
        base = top
    return tuple(areas)


def shares(drawn: Drawn, priors: Sequence[float]) -> tuple[Share, ...]:
    """Count the silos among drawn images, with Wilson's intervals."""
    num = len(drawn.silo_N)
    counts = [sum(silo == k for silo in drawn.silo_N) for k in range(len(priors))]
    return tuple(Share(k, priors[k], counts[k] / num, *_wilson(counts[k], num)) for k in range(len(priors)))


def _wilson(count: int, num: int) -> tuple[float, float]:
    part, z2 = count / num, _Z95**2 / num
    middle, half = part + z2 / 2, _Z95 * sqrt(part * (1 - part) / num + z2 / (4 * num))
    return max((middle - half) / (1 + z2), 0.0), min((middle + half) / (1 + z2), 1.0)
