"""The report on training the router, stored beside router.safetensors, for the manifest and for people."""

from typing import Annotated, Literal

from pydantic import Field

from ddm.protocol.base import Digest, Document, File, Model, PlanId, PositiveInt
from ddm.protocol.calibration import CalibrationBand, Interval, calibration_rows
from ddm.protocol.manifest import Evaluation
from ddm.system.console import table

Family = Literal["counts", "learned", "samples"]


class Band(Model):
    """The plan's family, counts and the prior for t in [low, high), nats; the difference is candidate minus counts."""

    low: float
    high: float
    prior: float
    counts: float
    candidate: float
    difference: float
    difference_low: float
    difference_high: float


class RouterReport(Document):
    """The trained router, its evaluation, and which router is published."""

    format: Literal["archipelago/router-report/1"] = "archipelago/router-report/1"
    plan_id: PlanId
    submissions: dict[str, Digest]
    units: dict[str, PositiveInt]
    router: File
    candidate: Family
    published: Family
    reason: str
    t_release: Annotated[float, Field(gt=0.0, lt=1.0)] | None
    expert_priors: tuple[float, ...]
    training_prior: tuple[float, ...]
    temperature: float
    minus_prior: Interval
    bands: tuple[Band, ...]
    sketches: Band | None
    calibration: tuple[CalibrationBand, ...]

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return the evaluations for a manifest: on public images, and on held-out sketches."""
        versus = f"router_cross_entropy_{self.candidate}_minus_counts"
        found = [
            _evaluation(
                f"router_cross_entropy_{self.published}_minus_prior_public_images", self.minus_prior
            )
        ]
        for source, band in [("public_images", band) for band in self.bands] + [
            ("held_out_sketches", self.sketches)
        ]:
            if band:
                figure = (band.difference, band.difference_low, band.difference_high)
                found.append(
                    _evaluation(f"{versus}_{source}_t_{band.low:.2f}_{band.high:.2f}", figure)
                )
        return (*found, *(figure for band in self.calibration for figure in band.evaluations()))


def describe(report: RouterReport) -> str:
    """Compare the routers in a table, cross-entropy in nats, lower is better; then the calibration."""
    named = [(f"t {band.low:g}-{band.high:g}", band) for band in report.bands]
    if report.sketches:
        named.append((f"held-out sketches, t >= {report.sketches.low:.2f}", report.sketches))
    rows = [
        (
            name,
            f"{band.prior:.4f}",
            f"{band.counts:.4f}",
            f"{band.candidate:.4f}",
            f"{band.difference:+.4f} [{band.difference_low:+.4f}, {band.difference_high:+.4f}]",
        )
        for name, band in named
    ]
    header = (
        "public held-out images",
        "prior",
        "counts",
        report.candidate,
        f"{report.candidate} - counts, 95%",
    )
    heads = (
        "calibration error, 95%",
        f"published, at temperature {report.temperature:.3g}",
        "at temperature 1",
    )
    errors = table(calibration_rows(report.calibration), heads)
    lines = [table(rows, header)] if rows else []
    return "\n".join(
        [*lines, errors, f"Published router: {report.published}, because {report.reason}."]
    )


def _evaluation(metric: str, figure: Interval) -> Evaluation:
    value, low, high = figure
    return Evaluation(metric=metric, strategy=None, value=value, low=low, high=high)
