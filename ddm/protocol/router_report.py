"""The report on a router: how it was trained, compared and calibrated, and which family is published.

It is stored beside the router's tensors. A manifest takes its figures from here, and so do the pages of a release.
"""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Digest, Document, File, Model, PlanId, PositiveInt, ShortText, SiloId
from ddm.protocol.calibration import CalibrationBand, Interval
from ddm.protocol.manifest import PublishedFigure, PublishedRouter
from ddm.protocol.routers import RouterKind

# Two routers that answer the same differ by rounding, with an interval that is as narrow.
_TIE = 1e-9


class BandComparison(Model):
    """A candidate, the counts router and the prior compared for t in [low, high), in nats.

    Attributes:
        low: where the band begins.
        high: where it ends.
        prior: cross-entropy of always predicting the prior.
        counts: cross-entropy of the counts router.
        candidate: cross-entropy of the candidate.
        difference: paired difference, candidate minus counts.
        difference_low: lower end of its interval; the intervals of one comparison hold jointly at 95% (Bonferroni).
        difference_high: upper end.
    """

    low: float
    high: float
    prior: float
    counts: float
    candidate: float
    difference: float
    difference_low: float
    difference_high: float

    @property
    def worse(self) -> bool:
        """Whether the candidate is worse than counts by its whole interval."""
        return self.difference > _TIE and self.difference_low > 0.0

    @property
    def interval(self) -> Interval:
        """The difference with the ends of its interval."""
        return self.difference, self.difference_low, self.difference_high


class RouterReport(Document):
    """The trained router, its evaluation, and which family is published.

    Attributes:
        plan_id: the plan.
        submissions: the digest of each silo's document that it was trained for, by silo id.
        units: the number of units that each silo counts as.
        router: its file.
        candidate: the family that the plan asks for.
        published: the family that is published: the candidate, or counts where the candidate is worse.
        reason: why it is this one.
        judged_on: public images, whose silos are unknown and weighed by counts; or, of one owner, images held out
            whose islands are known.
        t_release: the noise level of the sketches that a learned router was trained on.
        expert_priors: each expert's share, in the manifest's order.
        training_prior: the prior that the router's answers include.
        temperature: the temperature of the published router.
        minus_prior: its cross-entropy less that of the prior, nats.
        bands: the candidate against counts, by noise level; none where the plan asks for counts.
        sketches: the same on silos' held-out sketches; null where there are none.
        calibration: its expected calibration error, by noise level.
    """

    format: Literal["archipelago/router-report/1"] = "archipelago/router-report/1"
    plan_id: PlanId
    submissions: dict[SiloId, Digest]
    units: dict[SiloId, PositiveInt]
    router: File
    candidate: RouterKind
    published: RouterKind
    reason: ShortText
    judged_on: Literal["public_images", "held_out_images"]
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    expert_priors: tuple[float, ...]
    training_prior: tuple[float, ...]
    temperature: float
    minus_prior: Interval
    bands: tuple[BandComparison, ...]
    sketches: BandComparison | None
    calibration: tuple[CalibrationBand, ...]

    @property
    def published_router(self) -> PublishedRouter:
        """The router's entry in a manifest."""
        return PublishedRouter(
            kind=self.published,
            t_release=self.t_release,
            training_prior=self.training_prior,
            temperature=self.temperature,
            file=self.router,
        )

    def evaluations(self) -> tuple[PublishedFigure, ...]:
        """Return the figures for a manifest."""
        gain_metric = f"router_cross_entropy_{self.published}_minus_prior_{self.judged_on}"
        evaluations = [_evaluation(gain_metric, self.minus_prior)]

        compared_bands: list[tuple[str, BandComparison]]
        compared_bands = [(self.judged_on, band) for band in self.bands]
        if self.sketches is not None:
            compared_bands.append(("held_out_sketches", self.sketches))
        for source, band in compared_bands:
            metric = (
                f"router_cross_entropy_{self.candidate}_minus_counts_{source}"
                f"_t_{band.low:.2f}_{band.high:.2f}"
            )
            evaluations.append(_evaluation(metric, band.interval))

        for calibration_band in self.calibration:
            evaluations.extend(calibration_band.evaluations())
        return tuple(evaluations)


def _evaluation(metric: str, figure: Interval) -> PublishedFigure:
    value, low, high = figure
    return PublishedFigure(metric=metric, value=value, low=low, high=high)
