"""Draws a learning curve: as one line of text for a terminal, and as the geometry of a picture for a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from ddm.training.metrics import StepMetrics

CURVE_WIDTH = 32
CHART_WIDTH = 240.0
CHART_HEIGHT = 100.0
# Points of a curve in JSON, and corners of its line on a page.
MAX_POINTS = 50
_BARS = "▁▂▃▄▅▆▇█"
# Losses below it are drawn at the bottom, since a logarithm has no value at 0.
_LEAST_LOSS = 1e-12


@dataclass(frozen=True)
class CurveChart:
    """The geometry of a picture of a learning curve, whose vertical axis is the logarithm of the loss.

    Attributes:
        smoothed: the smoothed loss, as the points of a polyline.
        means: the mean losses between the lines of the curve, in the same way.
        highest, lowest: the losses at the upper and the lower edge.
        last: the last line of the curve.
    """

    smoothed: str
    means: str
    highest: float
    lowest: float
    last: StepMetrics


def thin(curve: Sequence[StepMetrics], num: int) -> list[StepMetrics]:
    """Return at most `num` lines of a curve, evenly spaced, the first and the last among them."""
    if len(curve) <= num:
        return list(curve)
    return [curve[round(index * (len(curve) - 1) / (num - 1))] for index in range(num)]


def sparkline(curve: Sequence[StepMetrics]) -> str:
    """Return a curve as a line of bars, higher for a higher logarithm of the smoothed loss."""
    logs = [_log(metrics.loss) for metrics in thin(curve, CURVE_WIDTH)]
    lowest = min(logs)
    # A constant curve is a line at the bottom.
    height = max(logs) - lowest or 1.0
    return "".join(_BARS[round((value - lowest) / height * (len(_BARS) - 1))] for value in logs)


def describe_curve(curve: Sequence[StepMetrics], *, draws_bars: bool) -> str:
    """Describe a curve in one line.

    Args:
        curve: at least one line.
        draws_bars: whether a picture of bars comes first, for a person at a terminal.
    """
    first = curve[0]
    last = curve[-1]
    text = f"loss {last.loss:.4g} at step {last.step}"
    if len(curve) > 1:
        text += f", {first.loss:.4g} at step {first.step}"
    if draws_bars:
        text = f"{sparkline(curve)} {text}"
    return text


def curve_points(curve: Sequence[StepMetrics]) -> list[tuple[int, float]]:
    """Return steps and smoothed losses of a curve, at most `MAX_POINTS`, for scripts."""
    return [(metrics.step, metrics.loss) for metrics in thin(curve, MAX_POINTS)]


def draw_chart(curve: Sequence[StepMetrics]) -> CurveChart:
    """Compute the picture of a curve, which has at least one line."""
    points = thin(curve, MAX_POINTS)
    losses = [metrics.loss for metrics in points] + [metrics.interval_loss for metrics in points]
    highest = max(losses)
    lowest = min(losses)
    height = _log(highest) - _log(lowest) or 1.0

    def polyline(values: Sequence[float]) -> str:
        corners = []
        for metrics, loss in zip(points, values, strict=True):
            x = metrics.step / points[-1].step * CHART_WIDTH
            y = (_log(highest) - _log(loss)) / height * CHART_HEIGHT
            corners.append(f"{x:.1f},{y:.1f}")
        return " ".join(corners)

    return CurveChart(
        smoothed=polyline(losses[: len(points)]),
        means=polyline(losses[len(points) :]),
        highest=highest,
        lowest=lowest,
        last=points[-1],
    )


def _log(loss: float) -> float:
    return log(max(loss, _LEAST_LOSS))
