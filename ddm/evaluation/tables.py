"""The figures of an evaluation as tables for a terminal."""

from collections.abc import Callable, Sequence

from ddm.evaluation.features import Features
from ddm.evaluation.intervals import Estimate
from ddm.evaluation.measuring import Evaluation

Lay = Callable[[Sequence[Sequence[str]], Sequence[str]], str]
"""Lays out rows under a header."""

LIMITS = (  # for readers of the figures
    "They say how alike images look in these features. They say nothing about diagnostic performance.",
    "Figures of other features, another reference or other numbers of images cannot be compared with these.",
)


def number(value: float) -> str:
    """Write a figure with about four significant digits."""
    size = abs(value)
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{0 if size >= 1000 else 2 if size >= 10 else 4}f}"


def interval(each: Estimate) -> str:
    """Write the interval of a figure."""
    return f"{number(each.low)} to {number(each.high)}"


def tables(results: Sequence[tuple[str, Evaluation]], features: Features, lay: Lay) -> str:
    """Return the tables of one or several sets of samples."""
    first = results[0][1]
    parts = [
        f"{first.num} samples against {first.num_reference} reference images, features: {features.name}.\n"
    ]
    names = list(dict.fromkeys(name for _, found in results for name in found.metrics))
    header = ["metric", *(text for name, _ in results for text in (name, "95% interval"))]
    if first.floor:
        header.append("floor")
    rows = [_row(name, [found for _, found in results]) for name in names]
    parts.append(lay([row if first.floor else row[: len(header)] for row in rows], header))
    for name, found in results:
        parts.append(_details(name, found, lay))
    notes = dict.fromkeys(note for _, found in results for note in found.notes)
    return "\n".join([*parts, "", *notes, *LIMITS])


def _row(name: str, found: Sequence[Evaluation]) -> list[str]:
    cells = [name]
    for each in found:
        has = each.metrics.get(name)
        cells += [number(has.value), interval(has)] if has else ["-", "-"]
    halves = found[0].floor
    return [*cells, number(halves[0][name].value) if halves and name in halves[0] else "-"]


def _details(name: str, found: Evaluation, lay: Lay) -> str:
    """Return the silos, the groups and the nearest copies of one set of samples."""
    parts = [f"\n{name}"]
    if found.per_silo:
        rows = [
            [
                silo,
                str(each.num),
                f"{each.share:.3f}",
                "-" if each.prior is None else f"{each.prior:.3f}",
            ]
            + [
                number(each.metrics[key].value) if key in each.metrics else "-"
                for key in ("fid", "precision", "recall")
            ]
            for silo, each in found.per_silo.items()
        ]
        parts.append(lay(rows, ["silo", "samples", "share", "prior", "fid", "precision", "recall"]))
    if found.share_error:
        error = found.share_error
        parts.append(
            f"share error {number(error.error.value)} ({interval(error.error)}); "
            f"by chance up to {number(error.by_chance)}"
        )
    if found.recall_by:
        rows = [
            [group, number(each.value), interval(each)] for group, each in found.recall_by.items()
        ]
        parts.append(lay(rows, ["reference", "recall", "95% interval"]))
    for space, each in found.copies.items():
        parts.append(
            f"near copies by {space}: {each.near.value:.2%} ({each.near.low:.2%} to {each.near.high:.2%}), "
            f"1% by chance; nearest at {number(float(each.ratio_N.min()))} of the usual distance"
        )
    return "\n".join(parts)
