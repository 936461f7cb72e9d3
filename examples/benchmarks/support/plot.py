"""Draws all figures relative to their targets; right of the line, the target is met."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

_MET = "#0f766e"
_MISSED = "#b45309"
_LINE = "#334155"


def draw(rows: Sequence[Sequence[str]], path: Path) -> None:
    """Draw rows as `support.targets.COLUMNS` names them.

    A figure that must not exceed its target is drawn as target over value, so that right is better for all.
    """
    height = 0.9 + 0.34 * len(rows)
    figure, axes = plt.subplots(figsize=(9.5, height), layout="constrained")
    for place, row in enumerate(rows):
        target = row[1]
        numbers = row[2:5]
        met = row[5]
        how, _, bound = target.rpartition(" ")
        value, low, high = (_reached(float(number), float(bound), how) for number in numbers)
        colour = _MET if met == "yes" else _MISSED
        axes.plot(
            sorted((low, high)),
            (place, place),
            color=colour,
            lw=2,
            alpha=0.5,
            solid_capstyle="round",
        )
        axes.plot(value, place, "o", color=colour, ms=7)
        axes.annotate(
            numbers[0],
            (value, place),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=_LINE,
        )
        axes.annotate(
            target, (1.005, place), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    axes.axvline(1.0, color=_LINE, lw=1)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(
        "reached: right of the line is met; points are medians, bars quartiles of the rounds",
        fontsize=8,
    )
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _reached(value: float, bound: float, how: str) -> float:
    return value / bound if how == "at least" else bound / max(value, 1e-9)
