"""The figure: cross-entropy, accuracy and share error against epsilon, one line a family."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from examples.paper.privacy.results import FamilyRecord, SeedResult
from examples.paper.privacy.targets import BOTH, REFERENCES, interval

COLOURS = {
    "counts": "#1b6ca8",
    "counts, hog": "#3f7fb5",
    "counts, pca": "#7fb2d6",
    "learned": "#2e8b57",
    "samples": "#7b5ea7",
}
PANELS: tuple[tuple[str, Callable[[FamilyRecord], float]], ...] = (
    ("cross-entropy, nats", lambda record: float(np.mean(record.loss_T))),
    ("accuracy", lambda record: float(np.mean(record.accuracy_T))),
    ("share error", lambda record: float(np.mean(record.share_error_T))),
)


def draw_figure(results: Sequence[SeedResult], path: Path, dataset: str) -> None:
    """Draw every family with error bars, the prior, and the references, averaged over t."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), constrained_layout=True)
    for axis, (label, value) in zip(axes, PANELS, strict=True):
        _panel(axis, results, value)
        axis.set(
            xlabel="total epsilon per image (replace-one, delta 1e-5)",
            ylabel=f"{label}, mean over t",
            xscale="log",
        )
        axis.grid(alpha=0.25)
    axes[2].set_yscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=4)
    seeds = f"{len(results)} seeds, bars: 95% of the mean" if len(results) > 1 else "one seed"
    figure.suptitle(f"Routers at a privacy budget: {dataset}, {seeds}")
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _panel(
    axis: Axes, results: Sequence[SeedResult], value: Callable[[FamilyRecord], float]
) -> None:
    records = [record for result in results for record in result.records]
    epsilons = sorted({record.epsilon for record in records if record.epsilon is not None})
    for family in dict.fromkeys(record.family for record in records if record.epsilon is not None):
        points = [(epsilon, *_bar(results, family, epsilon, value)) for epsilon in epsilons]
        x, mean, half = np.array([point for point in points if np.isfinite(point[1])]).T
        axis.errorbar(
            x,
            mean,
            yerr=half,
            label=family,
            color=COLOURS[family],
            marker="o",
            ms=4,
            capsize=2.5,
            lw=1.5,
        )
    infinite = epsilons[-1] * 2.2
    mean, half = _bar(results, "samples", None, value)
    axis.errorbar(
        [infinite],
        [mean],
        yerr=[half],
        fmt="D",
        ms=5,
        capsize=2.5,
        color=COLOURS["samples"],
        label="samples",
    )
    styles = {
        "prior": ("0.4", ":"),
        REFERENCES[0]: ("black", "--"),
        REFERENCES[1]: ("black", "-."),
        BOTH: ("0.4", (0, (1, 1, 4, 1))),
    }
    for family, (colour, style) in styles.items():
        values = [value(record) for record in records if record.family == family]
        axis.axhline(float(np.mean(values)), color=colour, ls=style, lw=1, label=family)


def _bar(
    results: Sequence[SeedResult],
    family: str,
    epsilon: float | None,
    value: Callable[[FamilyRecord], float],
) -> tuple[float, float]:
    """Return the mean over seeds, and half the length of its bar; not a number where there is nothing."""
    by_seed = []
    for result in results:
        values = [
            value(record)
            for record in result.records
            if (record.family, record.epsilon) == (family, epsilon)
        ]
        by_seed += [float(np.mean(values))] if values else []
    if not by_seed:
        return float("nan"), float("nan")
    mean, low, _ = interval(by_seed)
    return mean, mean - low if np.isfinite(low) else 0.0
