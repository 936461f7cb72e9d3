"""The figures of a release's report: images that its ensemble draws, its router along t, and shares by strategy.

This computes the geometry; the template parts in `ddm/pages/templates` add colours and text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddm.ensemble import Ensemble
from ddm.evaluation.intervals import wilson
from ddm.models import training_flops
from ddm.pages.pictures import Scale, inline
from ddm.protocol.architecture import learns_null
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.publishing.drawing import (
    Drawing,
    DrawnImages,
    affordable_effort,
    draw,
    largest_silos,
)
from ddm.system.progress import ProgressCallback

CHART_WIDTH = 240.0
CHART_HEIGHT = 150.0
NUM_SHOWN_OWN = 8
NUM_SHOWN_MIXED = 32
STRATEGY_TITLES = {
    "lock": "lock (t_lock = 1): draw one of the {word}s by its share, follow its expert throughout",
    "sample": "sample: draw one of the {word}s again at every step",
    "full": "full: follow the mixture of all experts",
    "top-1": "top-1: follow the most probable expert; biased, shown as the control",
}


@dataclass(frozen=True)
class ReleasePicture:
    """One image, inlined, and the index of its silo."""

    source: str
    silo: int


@dataclass(frozen=True)
class PictureSheet:
    """Images shown together.

    Attributes:
        title: their origin.
        silo: the silo's index; None for images of the ensemble.
        pictures: the images.
    """

    title: str
    silo: int | None
    pictures: tuple[ReleasePicture, ...]


@dataclass(frozen=True)
class PosteriorArea:
    """One silo's band in a stack of posteriors, as the points of a polygon; None for all that are not listed."""

    silo: int | None
    points: str


@dataclass(frozen=True)
class PosteriorChart:
    """The router's posterior along t on one silo's images.

    Attributes:
        silo: the silo's index.
        areas: the band of every listed silo, its own at the bottom, and one of all others.
        own: the probability of the right silo, as pairs (t, value).
    """

    silo: int
    areas: tuple[PosteriorArea, ...]
    own: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SiloShare:
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
class ShareChart:
    """The silos' shares under one strategy."""

    strategy: str
    title: str
    num: int
    rows: tuple[SiloShare, ...]


@dataclass(frozen=True)
class ReportFigures:
    """What a report shows.

    Attributes:
        word: what those are called whose experts are published, silo or island.
        listed: the indices of those whom legends and tables name: all, or those with the largest shares.
        drawing: the drawn images with their seed; None if the experts are too large to draw from here, or never
            learned to draw without a condition.
        sheets: images.
        posteriors: the router along t.
        shares: the shares by strategy.
    """

    word: str
    listed: tuple[int, ...]
    drawing: Drawing | None
    sheets: tuple[PictureSheet, ...] = ()
    posteriors: tuple[PosteriorChart, ...] = ()
    shares: tuple[ShareChart, ...] = ()

    @classmethod
    def of(
        cls,
        drawing: Drawing | None,
        manifest: Manifest,
        value_range: tuple[float, float],
        word: str,
    ) -> "ReportFigures":
        """Lay out what was drawn."""
        priors = list(manifest.silo_priors().values())
        listed = tuple(largest_silos(priors, range(len(priors))))
        if drawing is None:
            return cls(word, listed, drawing=None)
        names = [silo.silo_id for silo in manifest.silos]
        return cls(
            word,
            listed,
            drawing,
            sheets=_picture_sheets(drawing, names, value_range, word),
            posteriors=_posterior_charts(drawing, listed),
            shares=_share_charts(drawing, priors, word),
        )

    def template_values(self, manifest: Manifest, plan: Plan) -> Mapping[str, Any]:
        """Return what the template parts name, besides `members`, `router` and `root_file`."""
        return {
            "figures": self,
            "word": self.word,
            "shape": plan.data.shape,
            "num_experts": len(manifest.experts),
            "shown_mixed": self._num_shown_mixed(),
            "Scale": Scale,
            "width": CHART_WIDTH,
            "height": CHART_HEIGHT,
        }

    def _num_shown_mixed(self) -> int:
        """The number of images of the ensemble by one strategy: of expensive experts fewer are drawn."""
        for sheet in self.sheets:
            if sheet.silo is None:
                return len(sheet.pictures)
        return 0


def draw_for_report(
    plan: Plan, manifest: Manifest, ensemble: Ensemble, on_progress: ProgressCallback | None = None
) -> Drawing | None:
    """Draw as many images as the budget of a report allows; None if it allows none, or experts need a condition.

    Args:
        plan: the plan.
        manifest: the manifest of the release.
        ensemble: its experts and router, in the manifest's order.
        on_progress: called with the batches done and the batches in all.
    """
    if not learns_null(plan.condition):
        return None
    index_of = {silo.silo_id: index for index, silo in enumerate(manifest.silos)}
    silo_E = [index_of[expert.silo_id] for expert in manifest.experts]
    # Training evaluates an expert and its gradient, which costs three times as much as the evaluation alone.
    architecture = plan.expert.architecture
    flops = training_flops(architecture, plan.expert_shape, 1, plan.condition) / 3
    effort = affordable_effort(flops, len(index_of), len(silo_E))
    if effort is None:
        return None
    return draw(ensemble, silo_E, effort, on_progress=on_progress)


def inline_pictures(
    drawn: DrawnImages, num: int, value_range: tuple[float, float]
) -> tuple[ReleasePicture, ...]:
    """Inline the first `num` images as small PNGs; empty if they are neither grey nor colour."""
    # Images of other channels than grey and colour have no pictures.
    sources = inline(drawn.images[:num], value_range)
    return tuple(
        ReleasePicture(source, silo) for source, silo in zip(sources, drawn.silo_N, strict=False)
    )


def stack_areas(posterior: Sequence[Sequence[float]], first: int) -> tuple[PosteriorArea, ...]:
    """Stack the silos' probabilities over time, the `first` silo at the bottom; t = 0 is on the left."""
    num_silos = len(posterior[0])
    order = [first, *(silo for silo in range(num_silos) if silo != first)]
    lower_edge = [0.0] * len(posterior)
    areas = []
    for silo in order:
        upper_edge = [below + row[silo] for below, row in zip(lower_edge, posterior, strict=True)]
        # The polygon runs along the upper edge to the right, and back along the lower one.
        outline = [*enumerate(upper_edge), *reversed([*enumerate(lower_edge)])]
        points = " ".join(_chart_point(index, y, len(posterior)) for index, y in outline)
        areas.append(PosteriorArea(silo, points))
        lower_edge = upper_edge
    return tuple(areas)


def _chart_point(index: int, probability: float, num_times: int) -> str:
    x = index / (num_times - 1) * CHART_WIDTH
    # A sum of probabilities may be above 1 by rounding. The y axis of SVG points down.
    y = (1 - min(probability, 1.0)) * CHART_HEIGHT
    return f"{x:.1f},{y:.1f}"


def silo_shares(drawn: DrawnImages, priors: Sequence[float]) -> tuple[SiloShare, ...]:
    """Count the silos among drawn images, with Wilson's intervals."""
    num_images = len(drawn.silo_N)
    shares = []
    for silo, prior in enumerate(priors):
        count = drawn.silo_N.count(silo)
        low, high = wilson(count, num_images)
        shares.append(SiloShare(silo, prior, count / num_images, low, high))
    return tuple(shares)


def _picture_sheets(
    drawing: Drawing, names: Sequence[str], value_range: tuple[float, float], word: str
) -> tuple[PictureSheet, ...]:
    """Return the images to show: first of the ensemble, then of every silo alone."""
    sheets = []
    # Of the strategies that were drawn, pictures of these two are shown; the others appear in the shares.
    for strategy in ("lock", "full"):
        if strategy in drawing.mixed:
            title = STRATEGY_TITLES[strategy].format(word=word)
            pictures = inline_pictures(drawing.mixed[strategy], NUM_SHOWN_MIXED, value_range)
            sheets.append(PictureSheet(title, None, pictures))
    for silo, drawn in drawing.own.items():
        pictures = inline_pictures(drawn, NUM_SHOWN_OWN, value_range)
        sheets.append(PictureSheet(names[silo], silo, pictures))
    return tuple(sheet for sheet in sheets if sheet.pictures)


def _posterior_charts(drawing: Drawing, listed: Sequence[int]) -> tuple[PosteriorChart, ...]:
    """Return a chart of the router's posterior for every silo with images of its own, all of which are listed."""
    charts = []
    for silo, rows in drawing.posterior.items():
        if rows:
            own = tuple((index / (len(rows) - 1), row[silo]) for index, row in enumerate(rows))
            charts.append(PosteriorChart(silo, _listed_areas(rows, silo, listed), own))
    return tuple(charts)


def _listed_areas(
    posterior: Sequence[Sequence[float]], silo: int, listed: Sequence[int]
) -> tuple[PosteriorArea, ...]:
    """Stack the probabilities of the listed silos, `silo` at the bottom, and those of all others together."""
    if len(listed) == len(posterior[0]):
        return stack_areas(posterior, silo)
    # Bands of a thousand silos would be thinner than a pixel, and megabytes of points.
    shown_rows = []
    for row in posterior:
        listed_values = [row[index] for index in listed]
        shown_rows.append([*listed_values, max(sum(row) - sum(listed_values), 0.0)])
    silo_of_column = dict(enumerate(listed))
    areas = stack_areas(shown_rows, listed.index(silo))
    return tuple(
        PosteriorArea(silo_of_column.get(area.silo), area.points)
        for area in areas
        if area.silo is not None
    )


def _share_charts(drawing: Drawing, priors: Sequence[float], word: str) -> tuple[ShareChart, ...]:
    """Return the silos' shares under each strategy."""
    charts = []
    for strategy, drawn in drawing.mixed.items():
        title = STRATEGY_TITLES[strategy].format(word=word)
        rows = silo_shares(drawn, priors)
        charts.append(ShareChart(strategy, title, len(drawn.silo_N), rows))
    return tuple(charts)
