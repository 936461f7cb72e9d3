"""Describes a router's report in tables for a terminal."""

from ddm.protocol.calibration import calibration_rows
from ddm.protocol.router_report import BandComparison, RouterReport
from ddm.system.console import table

_JUDGED_ON = {
    "public_images": "public held-out images",
    "held_out_images": "images held out",
}


def describe_router(report: RouterReport) -> str:
    """Compare the routers in a table, cross-entropy in nats, lower is better; then the calibration."""
    parts = []
    if report.bands:
        parts.append(_comparison_table(report))
    parts.append(_calibration_table(report))
    parts.append(f"Published router: {report.published}, because {report.reason}.")
    return "\n".join(parts)


def _comparison_table(report: RouterReport) -> str:
    rows = [_comparison_row(f"t {band.low:g}-{band.high:g}", band) for band in report.bands]
    if report.sketches is not None:
        name = f"held-out sketches, t >= {report.sketches.low:.2f}"
        rows.append(_comparison_row(name, report.sketches))
    header = (
        _JUDGED_ON[report.judged_on],
        "prior",
        "counts",
        report.candidate,
        f"{report.candidate} - counts, 95%",
    )
    return table(rows, header)


def _comparison_row(name: str, band: BandComparison) -> tuple[str, ...]:
    difference, low, high = band.interval
    return (
        name,
        f"{band.prior:.4f}",
        f"{band.counts:.4f}",
        f"{band.candidate:.4f}",
        f"{difference:+.4f} [{low:+.4f}, {high:+.4f}]",
    )


def _calibration_table(report: RouterReport) -> str:
    header = (
        "calibration error, 95%",
        f"published, at temperature {report.temperature:.3g}",
        "at temperature 1",
    )
    return table(calibration_rows(report.calibration), header)
