"""How well a published router's probabilities hold, by noise level: the figures in a manifest's evaluation."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ddm.protocol.base import Model
from ddm.protocol.manifest import Evaluation

Interval = tuple[float, float, float]
"""A figure with the ends of its 95% interval."""

_AFTER, _BEFORE = "router_calibration_error", "router_calibration_error_at_temperature_1"
_METRIC = re.compile(
    rf"{_AFTER}(?P<before>_at_temperature_1)?_t_(?P<low>\d\.\d\d)_(?P<high>\d\.\d\d)"
)


class ReliabilityBin(Model):
    """Images to whose most probable expert a router gives about the same probability, and how often it is right.

    Attributes:
        share: of all images.
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

    def evaluations(self) -> Iterator[Evaluation]:
        """Yield the figures as a manifest lists them."""
        for name, (value, low, high) in ((_AFTER, self.after), (_BEFORE, self.before)):
            metric = f"{name}_t_{self.low:.2f}_{self.high:.2f}"
            yield Evaluation(metric=metric, value=value, low=low, high=high)


def calibration_bands(evaluation: Iterable[Evaluation]) -> list[CalibrationBand]:
    """Read the bands back from a manifest's evaluation, by noise level; those without both figures are left out."""
    found: dict[tuple[float, float], dict[bool, Interval]] = {}
    for each in evaluation:
        if named := _METRIC.fullmatch(each.metric):
            band = found.setdefault((float(named["low"]), float(named["high"])), {})
            band[named["before"] is None] = (each.value, each.low, each.high)
    return [
        CalibrationBand(low=low, high=high, before=band[False], after=band[True])
        for (low, high), band in sorted(found.items())
        if len(band) == 2
    ]


def calibration_rows(bands: Sequence[CalibrationBand]) -> list[tuple[str, str, str]]:
    """Return rows to show: the band, the error as published, and at temperature 1, with 95% intervals."""
    return [
        (f"t {band.low:g} to {band.high:g}", _shown(band.after), _shown(band.before))
        for band in bands
    ]


def _shown(figure: Interval) -> str:
    value, low, high = figure
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"
