"""The figures that the tables are held against, from one run: value, interval over seeds, met or not."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any, Literal, Protocol

from examples.paper.tables.data import CONCENTRATION
from examples.paper.tables.further import (
    FEDAVG,
    FROM_EXPERT,
    ONE_SHOT,
    STRATEGIES_OF_ROUTERS,
    STUDENT,
)
from examples.paper.tables.joining import (
    BEST_POOLED,
    JOINING,
    LARGEST,
    LONGER,
    PUBLIC,
    RANDOM,
    SEEDED,
    SMALLER,
    averaging,
    ensemble,
    pooled,
)
from examples.paper.tables.published import Cells
from examples.paper.tables.results import Cell, spread
from examples.paper.tables.rows import BEST_BATCH, FORMER, UNTUNED

Met = Literal["yes", "no", "undecided", ""]
_NEUTRAL = 0.02
_CURVES = ("monolith", "lock(1)")
_BOUND = "upper bound: the smallest budget reaches it"
_SEEDS = 3  # the fewest that a target is met with
_PAPER = 0.72  # FID of the paper's ensemble over its monolith's, 28% lower


class Measured(Protocol):
    """Something measured, and by what."""

    @property
    def commit(self) -> str:
        """The code."""
        ...

    @property
    def hardware(self) -> str:
        """The machine, in words."""
        ...

    @property
    def utc(self) -> str:
        """When."""
        ...


@dataclass(frozen=True)
class TableTarget:
    """A figure to reach.

    Attributes:
        figure: what is measured.
        target: what it should be.
        value: its geometric mean over seeds; None where it was not measured.
        low: lower end of its 95% interval over seeds, by logarithms; None for one seed.
        high: upper end.
        seeds: how many.
        met: whether the value reaches the target, see `_met`; nothing where it was not measured.
        note: which row it is of.
        commit: of the code.
        hardware: in words.
        utc: of the last of its cells.
    """

    figure: str
    target: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    met: Met = ""
    note: str = ""
    commit: str = ""
    hardware: str = ""
    utc: str = ""


def targets(found: Mapping[int, Cells]) -> list[TableTarget]:
    """Return every target; those whose tables were not measured without a value.

    Args:
        found: the cells by table.
    """
    first = found.get(1, {})
    budgets = found.get(4, {})
    students = found.get(5, {})
    paper = "FID of lock(1) over that of a monolith of as many steps, to reach the paper's gain"
    rows = [
        _neutral(first),
        _ratio(paper, _PAPER, first, "lock(1)", "monolith"),
        _flops(budgets),
        _ratio("FID of sample over that of lock(1)", 1.1, first, "sample", "lock(1)"),
        _ratio("FID of lock(.5) over that of top-1", 1.0, first, "lock(.5)", "top-1"),
        _ratio(
            "share error of lock(.5) over that of top-1",
            0.2,
            first,
            "lock(.5)",
            "top-1",
            name="share_error",
        ),
    ]
    former = "FID of the default recipe over that of the former one, monoliths of the same FLOPs"
    rows += [
        _private_routers(found.get(6, {})),
        _student(students),
        _one_shot(found.get(8, {})),
        _ratio(former, 0.6, first, UNTUNED, FORMER),
    ]
    return rows + _joining(found.get(JOINING, {}))


def _joining(cells: Cells) -> list[TableTarget]:
    """What joining and a shared base bring; see `examples.paper.tables.joining`."""
    by_start = {
        start: ensemble(CONCENTRATION, start) for start in (RANDOM, PUBLIC, LONGER, SMALLER)
    }
    whole = {start: ensemble(CONCENTRATION, start, whole=True) for start in (RANDOM, LARGEST)}
    many_rounds = averaging(CONCENTRATION, 100, PUBLIC)
    silos = "FID of Dirichlet(.5) silos from a public base over that of"
    alone = "FID of the ensemble over that of the mean silo alone, whole budgets"
    joint = "FID of the ensemble against a silo's own images over that of the silo's expert, whole budgets"
    own = "FID of a silo's expert against its own images over that without a base, whole budgets"
    return [
        _ratio(
            f"{silos} pooled training from random weights",
            1.1,
            cells,
            by_start[PUBLIC],
            pooled(RANDOM),
        ),
        _ratio(
            f"{silos} pooled training from the same base",
            1.3,
            cells,
            by_start[PUBLIC],
            pooled(PUBLIC),
        ),
        _ratio(
            f"{silos} 100 rounds of FedAvg from the same base",
            1.0,
            cells,
            by_start[PUBLIC],
            many_rounds,
        ),
        _bytes_of_base(cells, by_start[PUBLIC], many_rounds),
        _ratio(
            "FID of silos from one silo's expert, trained longer, over that from random weights, equal FLOPs in all",
            0.5,
            cells,
            by_start[LONGER],
            by_start[RANDOM],
        ),
        _ratio(
            "FID of silos from one silo's expert, trained longer, over that from random weights in smaller batches",
            0.5,
            cells,
            by_start[LONGER],
            by_start[SMALLER],
        ),
        _ratio(
            "FID of one owner's islands from a seed inside the budget over that of pooled training, best batch",
            0.8,
            cells,
            SEEDED,
            BEST_POOLED,
        ),
        _ratio(alone, 0.1, cells, whole[RANDOM], whole[RANDOM], name="fid", name_under="alone_fid"),
        _ratio(
            f"{alone}, the ensemble from one silo's expert",
            0.1,
            cells,
            whole[LARGEST],
            whole[RANDOM],
            name="fid",
            name_under="alone_fid",
        ),
        _ratio(
            f"{joint}, mean of the silos",
            1.0,
            cells,
            whole[RANDOM],
            whole[RANDOM],
            name="joint_own_fid",
            name_under="own_fid",
        ),
        _ratio(
            f"{joint}, the smallest silo",
            0.8,
            cells,
            whole[RANDOM],
            whole[RANDOM],
            name="smallest_joint_own_fid",
            name_under="smallest_own_fid",
        ),
        _ratio(
            f"{own}, mean of the silos", 1.0, cells, whole[LARGEST], whole[RANDOM], name="own_fid"
        ),
        _ratio(
            f"{own}, the smallest silo",
            0.8,
            cells,
            whole[LARGEST],
            whole[RANDOM],
            name="smallest_own_fid",
        ),
    ]


def _bytes_of_base(cells: Cells, one_round: str, many_rounds: str) -> TableTarget:
    """What an ensemble from a base sends, over federated averaging from the same base."""
    most = 0.01
    figure = "bytes of these silos, with those of the base, over those of 100 rounds of FedAvg"
    target = _ratio(figure, most, cells, one_round, many_rounds, name="bytes")
    if target.value is not None:
        target = replace(target, met="yes" if target.value < most else "no")
    return replace(target, target=f"under {most:g}")


def _neutral(cells: Cells) -> TableTarget:
    figure = "FID of the best neutral strategy over the tuned monolith's, the best batch of each"
    most = 0.5
    best = best_neutral(cells)
    monolith = best_monolith(cells)
    target = _ratio(figure, most, cells, best, monolith)
    num_seeds = [len(seeds) for label, seeds in cells.items() if _shares(label, seeds)]
    if num_seeds and best is None:
        return replace(
            target,
            met="no" if max(num_seeds) >= _SEEDS else "undecided",
            note="no strategy is neutral",
        )
    return replace(target, note=f"{best}, over {monolith}") if target.value is not None else target


def _student(cells: Cells) -> TableTarget:
    label = (
        FROM_EXPERT if len(cells.get(FROM_EXPERT, {})) >= len(cells.get(STUDENT, {})) else STUDENT
    )
    figure = "FID of the student, by a quarter of the monolith's batch, over the monolith's"
    return _ratio(figure, 1.0, cells, label, "monolith")


def best_monolith(cells: Cells) -> str:
    """Return the monolith with the lowest mean FID, whatever its batch: chosen by what is measured, in its favour."""
    dense = "monolith"
    return _lowest_fid(
        cells, lambda label: label.startswith(dense) and label not in (UNTUNED, FORMER), dense
    )


def _lowest_fid(cells: Cells, wanted: Callable[[str], bool], otherwise: str) -> str:
    mean = {label: _fid(seeds.values()) for label, seeds in cells.items() if wanted(label)}
    return min(mean, key=lambda label: mean[label], default=otherwise)


def _fid(cells: Iterable[Cell]) -> float:
    """Return the mean FID that the page shows."""
    return spread([cell.figures["fid"].value for cell in cells], as_ratios=True)[0]


def _shares(label: str, seeds: Mapping[int, Cell]) -> list[Cell]:
    """Return the cells that say how far from the priors a strategy draws; none of the oracle's."""
    return [
        cell for cell in seeds.values() if "share_error" in cell.figures and "oracle" not in label
    ]


def best_neutral(cells: Cells) -> str | None:
    """Return the strategy with the lowest mean FID among those whose mean share error is under .02, or by chance.

    Where each of S runs draws its experts exactly by the priors, their mean error lies around that of one such run, and
    its upper limit comes closer with the square root of S.
    """
    mean: dict[str, float] = {}
    for label, seeds in cells.items():
        if not (each := _shares(label, seeds)):
            continue
        names = ("share_error", "share_by_chance", "share_mean_by_chance")
        error, limit, expected = (
            sum(cell.figures[name].value for cell in each) / len(each) for name in names
        )
        if error < max(_NEUTRAL, expected + (limit - expected) / sqrt(len(each))):
            mean[label] = _fid(each)
    return min(mean, key=lambda label: mean[label]) if mean else None


def _ratio(
    figure: str,
    most: float,
    cells: Cells,
    over: str | None,
    under: str,
    *,
    name: str = "fid",
    name_under: str | None = None,
) -> TableTarget:
    target = f"at most {most:g}"
    if over is None or over not in cells or under not in cells:
        return TableTarget(figure, target)
    seeds = sorted(cells[over].keys() & cells[under].keys())
    name_under = name_under or name
    # Small silos have no FID against their own images.
    pairs = [
        (cells[over][seed], cells[under][seed])
        for seed in seeds
        if name in cells[over][seed].figures and name_under in cells[under][seed].figures
    ]
    values = [
        a.figures[name].value / b.figures[name_under].value
        for a, b in pairs
        if b.figures[name_under].value
    ]
    return target_of(figure, target, values, most, [cell for pair in pairs for cell in pair], over)


def _private_routers(cells: Cells) -> TableTarget:
    """The larger of two ratios, with full and with lock(.5): the best router of epsilon 1 over the best exact one.

    Best is who has the lowest cross-entropy on validation images, so that nothing is chosen by what is measured.
    """
    figure = "FID with a router of epsilon 1 over the exact one's, full and lock(.5), the larger"
    most = 1.02
    private = _lowest(cells, [f"{family}, epsilon 1" for family in ("counts", "learned")])
    exact = _lowest(cells, ["exact counts", "the ensemble's own", "labelled training images"])
    names = [
        (f"{private}, {strategy}", f"{exact}, {strategy}") for strategy in STRATEGIES_OF_ROUTERS
    ]
    if not all(name in cells for pair in names for name in pair):
        return TableTarget(figure, f"at most {most:g}")
    rows = [(cells[over], cells[under]) for over, under in names]
    seeds = sorted(set.intersection(*(set(by_seed) for pair in rows for by_seed in pair)))
    values = [
        max(over[n].figures["fid"].value / under[n].figures["fid"].value for over, under in rows)
        for n in seeds
    ]
    used = [by_seed[seed] for pair in rows for by_seed in pair for seed in seeds]
    return target_of(figure, f"at most {most:g}", values, most, used, f"{private}, over {exact}")


def _one_shot(cells: Cells) -> TableTarget:
    """Bytes of the ensemble over FedAvg's; met only where its FID is no worse than that of any FedAvg as well."""
    figure = "bytes of the one-shot ensemble over those of FedAvg; FID no worse"
    most = 0.01
    target = _ratio(figure, most, cells, ONE_SHOT, FEDAVG, name="bytes")
    fid = _ratio(
        figure,
        1.0,
        cells,
        ONE_SHOT,
        _lowest_fid(cells, lambda label: label.startswith(FEDAVG), FEDAVG),
    )
    if target.value is None or fid.value is None:
        return replace(target, target="under 0.01")
    met: Met = "no" if target.value >= most else fid.met
    return replace(
        target,
        target="under 0.01",
        met=met,
        note=f"{ONE_SHOT}; its FID is {fid.value:.3g} of that of the best {FEDAVG}",
    )


def _lowest(cells: Cells, names: Sequence[str]) -> str | None:
    """Return the router with the lowest mean cross-entropy over both strategies."""
    mean: dict[str, float] = {}
    for name in names:
        cells_of_router = [
            cell
            for strategy in STRATEGIES_OF_ROUTERS
            for cell in cells.get(f"{name}, {strategy}", {}).values()
        ]
        if cells_of_router:
            mean[name] = sum(
                cell.figures["validation_cross_entropy"].value for cell in cells_of_router
            ) / len(cells_of_router)
    return min(mean, key=lambda name: mean[name], default=None)


def _flops(cells: Cells) -> TableTarget:
    """How much of the FLOPs of the monolith's best FID an ensemble takes for the same, each with its best batch."""
    figure = "training FLOPs to the tuned monolith's best FID, over its own, batches chosen on validation images"
    most = 0.25
    cells = {label: by_seed for label, by_seed in cells.items() if BEST_BATCH in label}
    budgets = [
        {label.removeprefix(kind) for label in cells if label.startswith(kind)} for kind in _CURVES
    ]
    if budgets[0] != budgets[1]:
        return TableTarget(figure, f"at most {most:g}")
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in cells.values()))) if cells else []
    values = []
    notes = []
    for seed in seeds:
        curve = {kind: _curve(cells, kind, seed) for kind in _CURVES}
        flops, fid = min(curve["monolith"], key=lambda point: point[1])
        reached, how = flops_to(curve["lock(1)"], fid)
        notes.append(how)
        if reached is not None:
            values.append(reached / flops)
    used = [by_seed[seed] for by_seed in cells.values() for seed in seeds]
    if seeds and len(values) < len(seeds):
        note = f"not reached with {len(seeds) - len(values)} of {len(seeds)} seeds"
        met: Met = (
            "no" if len(seeds) >= _SEEDS and all(value > most for value in values) else "undecided"
        )
        return TableTarget(
            figure, f"at most {most:g}", seeds=len(seeds), met=met, note=note, **_origin(used)
        )
    target = target_of(figure, f"at most {most:g}", values, most, used, notes[0] if notes else "")
    if bounds := sum(note == _BOUND for note in notes):
        note = f"{_BOUND}, with {bounds} of {len(seeds)} seeds"
        met = "yes" if target.met == "yes" else "undecided"  # what is at most so much may be less
        return replace(target, low=None, high=None, met=met, note=note)
    return target


def _curve(cells: Cells, kind: str, seed: int) -> list[tuple[float, float]]:
    """Return FLOPs and FID of a kind of model, by FLOPs."""
    points = [
        (by_seed[seed].figures["flops"].value, by_seed[seed].figures["fid"].value)
        for label, by_seed in cells.items()
        if label.startswith(kind)
    ]
    return sorted(points)


def flops_to(curve: Sequence[tuple[float, float]], fid: float) -> tuple[float | None, str]:
    """Return the FLOPs at which a curve first reaches an FID, on straight lines between logarithms; None if never.

    Where its first point is below already, its FLOPs are an upper bound, and the second value says so.
    """
    before: tuple[float, float] | None = None
    for flops, reached_fid in curve:
        if reached_fid <= fid:
            if before is None:
                return flops, _BOUND
            share = log(before[1] / fid) / log(before[1] / reached_fid)
            return exp(log(before[0]) + share * log(flops / before[0])), "interpolated"
        before = (flops, reached_fid)
    return None, "not reached"


def target_of(
    figure: str,
    target: str,
    values: Sequence[float],
    most: float,
    cells: Sequence[Measured],
    note: str,
) -> TableTarget:
    """Return a target with its mean over seeds.

    Args:
        figure: what is measured.
        target: what it should be, in words.
        values: one of each seed.
        most: the target.
        cells: those that the values come from.
        note: which rows these are.
    """
    if not values:
        return TableTarget(figure, target)
    mean, low, high = spread(values, as_ratios=True)
    met = _met(low, high, most, len(values))
    return TableTarget(figure, target, mean, low, high, len(values), met, note, **_origin(cells))


def _met(low: float | None, high: float | None, most: float, seeds: int) -> Met:
    """Say yes where the whole interval reaches the target, with three seeds or more; no where none of it does."""
    if low is None or high is None:
        return "undecided"
    if low > most:
        return "no"
    return "yes" if high <= most and seeds >= _SEEDS else "undecided"


def _origin(cells: Sequence[Measured]) -> dict[str, Any]:
    last = max(cells, key=lambda cell: cell.utc)
    return {"commit": last.commit, "hardware": last.hardware, "utc": last.utc}


def write_targets(path: Path, rows: Sequence[TableTarget]) -> None:
    """Write targets.csv; a figure that was not measured has no value."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            (
                "figure",
                "target",
                "value",
                "low",
                "high",
                "seeds",
                "met",
                "commit",
                "hardware",
                "utc",
            )
        )
        for row in rows:
            numbers = [
                "" if number is None else f"{number:.4g}"
                for number in (row.value, row.low, row.high)
            ]
            met = row.met or "not measured"
            writer.writerow(
                (
                    row.figure,
                    row.target,
                    *numbers,
                    row.seeds,
                    met,
                    row.commit,
                    row.hardware,
                    row.utc,
                )
            )
