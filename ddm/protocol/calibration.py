"""How well a published router's probabilities hold, by noise level: the figures in a manifest's evaluation."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ddm.protocol.base import Model
from ddm.protocol.manifest import PublishedFigure

Interval = tuple[float, float, float]
"""A figure with the ends of its 95% interval."""

_AFTER = "router_calibration_error"
_BEFORE = "router_calibration_error_at_temperature_1"
# A manifest lists figures by name alone, so that the band of t is read back from the name.
_METRIC = re.compile(
    rf"{_AFTER}(?P<before>_at_temperature_1)?_t_(?P<low>\d\.\d\d)_(?P<high>\d\.\d\d)"
)


class ReliabilityBin(Model):
    """Images to whose most probable expert a router gives about the same probability, and how often it is right.

    Attributes:
        share: the share of all images.
        confidence: mean probability of the most probable expert.
        accuracy: share of these images that are that expert's.
    """

    share: float
    confidence: float
    accuracy: Interval


class CalibrationBand(Model):
    """Expected calibration error of the published router for t in [low, high), before and after its temperature.

    `bins` are those of the published temperature, by confidence; a manifest does not list them.
    """

    low: float
    high: float
    before: Interval
    after: Interval
    bins: tuple[ReliabilityBin, ...] = ()

    def evaluations(self) -> Iterator[PublishedFigure]:
        """Yield the figures as a manifest lists them."""
        for name, (value, low, high) in ((_AFTER, self.after), (_BEFORE, self.before)):
            metric = f"{name}_t_{self.low:.2f}_{self.high:.2f}"
            yield PublishedFigure(metric=metric, value=value, low=low, high=high)


def calibration_bands(evaluation: Iterable[PublishedFigure]) -> list[CalibrationBand]:
    """Read the bands back from a manifest's evaluation, by noise level; those without both figures are left out."""
    before: dict[tuple[float, float], Interval] = {}
    after: dict[tuple[float, float], Interval] = {}
    for figure in evaluation:
        match = _METRIC.fullmatch(figure.metric)
        if match is None:
            continue
        figures = after if match["before"] is None else before
        times = (float(match["low"]), float(match["high"]))
        figures[times] = (figure.value, figure.low, figure.high)
    bands = []
    for low, high in sorted(before.keys() & after.keys()):
        times = (low, high)
        bands.append(CalibrationBand(low=low, high=high, before=before[times], after=after[times]))
    return bands


def calibration_rows(bands: Sequence[CalibrationBand]) -> list[tuple[str, str, str]]:
    """Return rows to show: the band, the error as published, and at temperature 1, with 95% intervals."""
    rows = []
    for band in bands:
        times = f"t {band.low:g} to {band.high:g}"
        rows.append((times, _interval_in_words(band.after), _interval_in_words(band.before)))
    return rows


def _interval_in_words(figure: Interval) -> str:
    value, low, high = figure
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"
