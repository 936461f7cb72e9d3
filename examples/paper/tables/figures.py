"""One picture for each table."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from ddm.system.console import human_flops
from examples.paper.tables.data import UNEQUAL
from examples.paper.tables.published import Cells
from examples.paper.tables.results import RATIOS, Cell, over_seeds
from examples.paper.tables.rows import BEST_BATCH, Table

_BLUE = "#1b6ca8"
_RED = "#c8553d"
_GREY = "0.45"
_ERRORS = "0.3"
_FID = ("fid", "FID (small classifier)", 1.0)
_BARS = {  # figure, title and unit of each panel of a table's picture
    1: (_FID, ("share_error", "share error", 1.0)),
    3: (_FID,),
    5: (_FID, ("images_per_s", "images a second", 1.0)),
    6: (_FID, ("cross_entropy", "cross-entropy, nats", 1.0)),
    7: (
        ("smallest_drawn", "samples in the smallest silo's region", 1.0),
        ("smallest_recall", "recall of its test images", 1.0),
    ),
    8: (_FID, ("bytes", "megabytes on the wire", 1e6)),
    9: (_FID, ("agreement", "agreement with the class", 1.0)),
    11: (_FID, ("own_fid", "FID against a silo's own images", 1.0)),
}
# Beyond this ratio of its ends, an axis has no room for three numbers in each decade.
_LONG_AXIS = 500.0
_LINES = (_BLUE, "#2e8b57", "#7b5ea7", "#d98e04", "#4a4a4a", "#5ab4ac", "#b0307a")


def draw_table(table: Table, cells: Cells, path: Path, origin: str) -> None:
    """Draw a table's figure.

    Args:
        table: which.
        cells: by label and seed; rows that were not measured are left out.
        path: a PNG.
        origin: data set, preset and seeds, for the title.
    """
    bars = [
        panel
        for panel in _BARS.get(table.number, ())
        if any(_point(by_seed, panel[0]) is not None for by_seed in cells.values())
    ]
    height = 0.3 * len(cells) + 1.4 if bars else 4.2
    # Long labels need room beside the panels.
    width = max(9.0, max(map(len, cells), default=0) / 8.0) if bars else 9.0
    figure, axes = plt.subplots(
        1, len(bars) or 1, figsize=(width, height), constrained_layout=True, squeeze=False
    )
    axis = axes[0, 0]
    for place, (name, title, unit) in enumerate(bars):
        _bars(axes[0, place], cells, name, title, names=place == 0, unit=unit)
    match table.number:
        case 7:
            axis.axvline(UNEQUAL[-1], color=_GREY, ls=":", lw=1)
        case 2:
            _lines(axis, cells, lambda label: float(label.split(",")[0].split(" ")[0]), "experts")
            axis.set_xscale("log", base=2)
            plain_ticks(axis.xaxis, (1,), "{:g}".format)
        case 4:
            _lines(axis, cells, None, "training FLOPs, router included")
            axis.set(xscale="log", yscale="log")
            plain_ticks(axis.xaxis, (1, 2, 5), human_flops)
            plain_ticks(axis.yaxis, (1, 2, 5), "{:g}".format)
        case 10:
            _lines(
                axis, cells, lambda label: float(label.rsplit(",", 1)[1]), "evaluations a sample"
            )
            axis.set(xscale="log", yscale="log")
            plain_ticks(axis.xaxis, (1, 2, 5), "{:g}".format)
            plain_ticks(axis.yaxis, (1, 2, 5), "{:g}".format)
    figure.suptitle(f"{table.title}: {origin}", fontsize=10)
    figure.savefig(path, metadata={"Software": None})
    # A chart has few colours; a palette takes a third of the bytes.
    with Image.open(path) as picture:
        few_colours = picture.convert("RGB").quantize(64)
    few_colours.save(path, optimize=True)
    plt.close(figure)


def _point(cells: Mapping[int, Cell], name: str) -> tuple[float, float, float] | None:
    """Return a figure and how far its interval reaches down and up."""
    interval = over_seeds(cells, name)
    if interval is None:
        return None
    mean, low, high = interval
    return (
        mean,
        max(mean - (mean if low is None else low), 0.0),
        max((mean if high is None else high) - mean, 0.0),
    )


def _bars(axis: Axes, cells: Cells, name: str, title: str, *, names: bool, unit: float) -> None:
    labels = list(cells)
    as_ratios = name in RATIOS
    for row, label in enumerate(labels):
        point_in_units = _point(cells[label], name)
        if point_in_units is None:
            continue
        point = tuple(number / unit for number in point_in_units)
        if as_ratios and "floor" in label:  # far below all others
            axis.text(
                0.0,
                row,
                f" {point[0]:.3g}",
                va="center",
                fontsize=7,
                transform=axis.get_yaxis_transform(),
            )
            continue
        colour = _colour_of(label)
        if as_ratios:
            axis.plot(point[0], row, marker="o", ms=5, color=colour, zorder=3)
        else:
            axis.barh(row, point[0], color=colour, height=0.7, alpha=0.85)
        axis.errorbar(point[0], row, xerr=[[point[1]], [point[2]]], color=_ERRORS, capsize=2, lw=1)
        axis.text(point[0] + point[2], row, f"  {_number(point[0])}", va="center", fontsize=7)
    axis.set_yticks(range(len(labels)), labels if names else [""] * len(labels), fontsize=8)
    # rows without a bar take their place too, beside the other panel's
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.margins(x=0.2)
    if as_ratios:
        axis.set_xscale("log")
        plain_ticks(axis.xaxis, (1, 2, 5), "{:g}".format)
    if not as_ratios:
        axis.set_xlim(left=0.0)
    axis.set_title(title, fontsize=9)
    axis.grid(axis="x", alpha=0.25)


def _colour_of(label: str) -> str:
    """Return the colour of a row's bar."""
    if "monolith" in label:
        return _RED
    if "floor" in label or "oracle" in label:
        return _GREY
    return _BLUE


def _number(value: float) -> str:
    """Write a number with three digits, or whole where it has more."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _lines(axis: Axes, cells: Cells, at: Callable[[str], float] | None, title: str) -> None:
    lines: dict[str, list[tuple[float, tuple[float, float, float]]]] = {}
    for label, by_seed in cells.items():
        point = _point(by_seed, "fid")
        if point is None:
            continue
        if at is not None:
            x = float(at(label))
            name = _series(label)
        else:
            flops = over_seeds(by_seed, "flops")
            x = flops[0] if flops else 0.0
            name = label.rsplit(", budget", 1)[0]
        lines.setdefault(name, []).append((x, point))
    colours: dict[str, str] = {}
    for name, points in lines.items():
        points.sort()
        at_x = [x for x, _ in points]
        y, down, up = zip(*(point for _, point in points), strict=True)
        best = name.endswith(BEST_BATCH)
        kind = name.removesuffix(BEST_BATCH).split(", ")[-1]
        colours.setdefault(kind, _RED if kind == "monolith" else _LINES[len(colours) % len(_LINES)])
        style = "--" if best or name.startswith("sample") else "-"
        colour = colours[kind]
        axis.errorbar(
            at_x,
            y,
            yerr=[down, up],
            label=name,
            marker="o",
            ms=4,
            capsize=2.5,
            lw=1.4,
            ls=style,
            color=colour,
        )
    axis.set_xlabel(title)
    axis.set_ylabel("FID (small classifier)")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.grid(alpha=0.25)


def plain_ticks(axis: Axis, multiples: Sequence[int], write: Callable[[float], str]) -> None:
    """Write the ticks of a logarithmic axis as numbers rather than powers.

    Args:
        axis: with everything drawn.
        multiples: of the powers of its base, where a tick stands; of a long axis the powers alone.
        write: writes a tick's number.
    """
    low, high = axis.get_view_interval()
    if high > _LONG_AXIS * low:
        multiples = (1,)
    base = axis.get_transform().base  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(base, multiples))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def _series(label: str) -> str:
    """Return the name of a line from the label of one of its points."""
    first, *rest = (part.strip() for part in label.split(","))
    if rest and not first[0].isdigit():
        return ", ".join([first, *rest[:-1]])
    return rest[0] if rest else "monolith"
