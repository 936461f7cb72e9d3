"""The figures of an evaluation as tables for a terminal."""

from collections.abc import Callable, Sequence

from ddm.evaluation.copies import NearestCopies
from ddm.evaluation.features import Features
from ddm.evaluation.intervals import Estimate
from ddm.evaluation.measuring import Evaluation, SiloResult
from ddm.evaluation.metrics import Floor

TableLayout = Callable[[Sequence[Sequence[str]], Sequence[str]], str]
"""Makes a table of rows under a header."""

# Printed under the figures of every evaluation.
LIMITS = (
    "They say how alike images look in these features. They say nothing about diagnostic performance.",
    "Figures of other features, another reference or other numbers of images cannot be compared with these.",
)
_MISSING = "-"


def number(value: float) -> str:
    """Write a figure with about four significant digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.2f}"
    if size >= 1e-3 or size == 0:
        return f"{value:.4f}"
    return f"{value:.1e}"


def interval(estimate: Estimate) -> str:
    """Write the interval of a figure."""
    return f"{number(estimate.low)} to {number(estimate.high)}"


def tables(
    results: Sequence[tuple[str, Evaluation]],
    features: Features,
    layout: TableLayout,
) -> str:
    """Return the tables of one or several sets of samples."""
    _, first = results[0]
    heading = (
        f"{first.num} samples against {first.num_reference} reference images, "
        f"features: {features.name}.\n"
    )
    parts = [heading, _metrics_table(results, layout)]
    if first.floor is not None:
        parts.append(_floor_heading(first.floor))
        parts.append(_floor_table(results, layout))
    notes: list[str] = []
    for name, evaluation in results:
        parts.append(_details(name, evaluation, layout))
        notes.extend(evaluation.notes)
    # Several sets of samples share most notes: each is printed once.
    different_notes = dict.fromkeys(notes)
    return "\n".join([*parts, "", *different_notes, *LIMITS])


def _metrics_table(results: Sequence[tuple[str, Evaluation]], layout: TableLayout) -> str:
    header = ["metric"]
    # A metric may be missing in one set of samples, and be there in another.
    rows: dict[str, list[str]] = {}
    for name, evaluation in results:
        header += [name, "95% interval"]
        for metric in evaluation.metrics:
            rows[metric] = [metric]
    for _, evaluation in results:
        for metric, row in rows.items():
            estimate = evaluation.metrics.get(metric)
            if estimate is None:
                row += [_MISSING, _MISSING]
            else:
                row += [number(estimate.value), interval(estimate)]
    return layout(list(rows.values()), header)


def _floor_heading(floor: Floor) -> str:
    return (
        f"\nAt equal numbers: {floor.num} samples, or as many reference images in their place (the floor), "
        f"against {floor.num_reference} other reference images.\n"
    )


def _floor_table(results: Sequence[tuple[str, Evaluation]], layout: TableLayout) -> str:
    """Return the floor beside the figures that can be compared with it."""
    _, first = results[0]
    if first.floor is None:
        return ""
    header = ["metric", "floor", "95% interval"]
    rows = {
        metric: [metric, number(estimate.value), interval(estimate)]
        for metric, estimate in first.floor.metrics.items()
    }
    for name, evaluation in results:
        header += [name, "95% interval"]
        for metric, row in rows.items():
            estimate = None
            if evaluation.floor is not None:
                estimate = evaluation.floor.samples.get(metric)
            if estimate is None:
                row += [_MISSING, _MISSING]
            else:
                row += [number(estimate.value), interval(estimate)]
    return layout(list(rows.values()), header)


def _value(estimate: Estimate | None) -> str:
    if estimate is None:
        return _MISSING
    return number(estimate.value)


def _details(
    name: str,
    evaluation: Evaluation,
    layout: TableLayout,
) -> str:
    """Return the silos, the groups and the nearest copies of one set of samples."""
    parts = [f"\n{name}"]
    if evaluation.per_silo:
        header = ["silo", "samples", "share", "prior", "fid", "precision", "recall"]
        rows = [_silo_row(silo, result) for silo, result in evaluation.per_silo.items()]
        parts.append(layout(rows, header))
    if evaluation.share_error:
        error = evaluation.share_error
        parts.append(
            f"share error {number(error.error.value)} ({interval(error.error)}); "
            f"by chance up to {number(error.by_chance)}"
        )
    if evaluation.recall_by:
        rows = [
            [group, number(recall.value), interval(recall)]
            for group, recall in evaluation.recall_by.items()
        ]
        parts.append(layout(rows, ["reference", "recall", "95% interval"]))
    for space, copies in evaluation.copies.items():
        parts.append(_copies_line(space, copies))
    return "\n".join(parts)


def _silo_row(silo: str, result: SiloResult) -> list[str]:
    prior = _MISSING
    if result.prior is not None:
        prior = f"{result.prior:.3f}"
    row = [silo, str(result.num), f"{result.share:.3f}", prior]
    for metric in ("fid", "precision", "recall"):
        row.append(_value(result.metrics.get(metric)))
    return row


def _copies_line(space: str, copies: NearestCopies) -> str:
    near = copies.near
    least_ratio = number(float(copies.ratio_N.min()))
    return (
        f"near copies by {space}: {near.value:.2%} ({near.low:.2%} to {near.high:.2%}), "
        f"1% by chance; nearest at {least_ratio} of the usual distance"
    )
