"""The pictures of a release's report: images that its ensemble draws, its router along t, and shares by strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddm.ensemble import Ensemble
from ddm.models import training_flops
from ddm.pages.pictures import Scale
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.publishing import charts
from ddm.publishing.drawing import Drawing, Progress, affordable, draw, largest

SHOWN_OWN, SHOWN_MIXED = 8, 32
STRATEGY_TITLES = {
    "lock": "lock (t_lock = 1): draw one of the {word}s by its share, follow its expert throughout",
    "sample": "sample: draw one of the {word}s again at every step",
    "full": "full: follow the mixture of all experts",
    "top-1": "top-1: follow the most probable expert; biased, shown as the control",
}


@dataclass(frozen=True)
class Sheet:
    """Images shown together.

    Attributes:
        title: their origin.
        silo: the silo's index; None for images of the ensemble.
        pictures: the images.
    """

    title: str
    silo: int | None
    pictures: tuple[charts.Picture, ...]


@dataclass(frozen=True)
class PosteriorChart:
    """The router's posterior along t on one silo's images.

    Attributes:
        silo: the silo's index.
        areas: every silo's band, its own at the bottom.
        own: the probability of the right silo, as pairs (t, value).
    """

    silo: int
    areas: tuple[charts.Area, ...]
    own: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ShareChart:
    """The silos' shares under one strategy."""

    strategy: str
    title: str
    num: int
    rows: tuple[charts.Share, ...]


@dataclass(frozen=True)
class Pictured:
    """What a report shows; the template parts of `ddm/pages` lay it out.

    Attributes:
        word: what those are called whose experts are published, silo or island.
        listed: the indices of those whom legends and tables name: all, or those with the largest shares.
        drawing: the drawn images with their seed; None if the experts are too large to draw from here.
        sheets: images.
        posteriors: the router along t.
        shares: the shares by strategy.
    """

    word: str
    listed: tuple[int, ...]
    drawing: Drawing | None
    sheets: tuple[Sheet, ...]
    posteriors: tuple[PosteriorChart, ...]
    shares: tuple[ShareChart, ...]

    @classmethod
    def of(
        cls,
        drawing: Drawing | None,
        manifest: Manifest,
        value_range: tuple[float, float],
        word: str,
    ) -> "Pictured":
        """Lay out what was drawn."""
        priors = priors_of(manifest)
        listed = tuple(largest(priors, range(len(priors))))
        if drawing is None:
            return cls(word, listed, None, (), (), ())
        names = [silo.silo_id for silo in manifest.silos]
        return cls(
            word,
            listed,
            drawing,
            _sheets(drawing, names, value_range, word),
            _posteriors(drawing),
            _share_charts(drawing, priors, word),
        )

    def values(self, manifest: Manifest, plan: Plan) -> Mapping[str, Any]:
        """Return what the template parts name, besides `members`, `router` and `root_file`."""
        return {
            "pictured": self,
            "word": self.word,
            "shape": plan.data.shape,
            "num_experts": len(manifest.experts),
            "shown_mixed": SHOWN_MIXED,
            "Scale": Scale,
            "width": charts.WIDTH,
            "height": charts.HEIGHT,
        }


def priors_of(manifest: Manifest) -> list[float]:
    """Return each silo's share, in the manifest's order."""
    order = {silo.silo_id: index for index, silo in enumerate(manifest.silos)}
    shares = [0.0] * len(order)
    for expert in manifest.experts:
        shares[order[expert.silo_id]] += expert.prior
    return shares


def draw_for(
    plan: Plan, manifest: Manifest, ensemble: Ensemble, on_progress: Progress | None = None
) -> Drawing | None:
    """Draw as many images as the budget of a report allows; None if it allows none.

    Args:
        plan: the plan.
        manifest: of the release.
        ensemble: its experts and router, in the manifest's order.
        on_progress: called with the batches done and the batches in all.
    """
    order = {silo.silo_id: index for index, silo in enumerate(manifest.silos)}
    silo_E = [order[expert.silo_id] for expert in manifest.experts]
    flops = training_flops(plan.expert.architecture, plan.expert_shape, 1, plan.condition) / 3
    effort = affordable(flops, len(order), len(silo_E))
    return draw(ensemble, silo_E, effort, on_progress=on_progress) if effort else None


def _sheets(
    drawing: Drawing, names: Sequence[str], value_range: tuple[float, float], word: str
) -> tuple[Sheet, ...]:
    """Return the images to show: first of the ensemble, then of every silo alone."""
    mixed = [
        Sheet(
            STRATEGY_TITLES[name].format(word=word),
            None,
            charts.pictures(drawn, SHOWN_MIXED, value_range),
        )
        for name, drawn in drawing.mixed.items()
        if name in ("lock", "full")
    ]
    own = [
        Sheet(names[k], k, charts.pictures(drawn, SHOWN_OWN, value_range))
        for k, drawn in drawing.own.items()
    ]
    return tuple(sheet for sheet in (*mixed, *own) if sheet.pictures)


def _posteriors(drawing: Drawing) -> tuple[PosteriorChart, ...]:
    """Return a chart of the router's posterior for every silo with images of its own."""
    return tuple(
        PosteriorChart(
            silo=k,
            areas=charts.stack(rows, k),
            own=tuple((n / (len(rows) - 1), row[k]) for n, row in enumerate(rows)),
        )
        for k, rows in drawing.posterior.items()
        if rows
    )


def _share_charts(drawing: Drawing, priors: Sequence[float], word: str) -> tuple[ShareChart, ...]:
    """Return the silos' shares under each strategy."""
    return tuple(
        ShareChart(
            name,
            STRATEGY_TITLES[name].format(word=word),
            len(drawn.silo_N),
            charts.shares(drawn, priors),
        )
        for name, drawn in drawing.mixed.items()
    )
