"""What the tables hold: every row as plain data, from which a model is trained and samples are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ddm.diffusion.solver import SolverName
from ddm.ensemble import Full, Lock, Nucleus, Sample, Strategy, Threshold, TopK, TopOne
from ddm.protocol.base import Model
from examples.paper.tables.presets import Preset

Partition = Literal["clusters", "random", "silos", "unequal"]

STRATEGIES: Mapping[str, Strategy] = {
    "full": Full(),
    "sample": Sample(),
    "lock(1)": Lock(1.0),
    "lock(.8)": Lock(0.8),
    "lock(.5)": Lock(0.5),
    "lock(.2)": Lock(0.2),
    "top-1": TopOne(),
    "top-2": TopK(2),
    "top-3": TopK(3),
    "nucleus(.9)": Nucleus(0.9),
    "threshold(.1)": Threshold(0.1),
}
_EVALUATIONS: Mapping[SolverName, int] = {"euler": 1, "heun": 2, "midpoint": 2, "rk4": 4, "dpm": 1, "unipc": 1}


class Monolith(Model):
    """One model of all training images.

    Attributes:
        budget: of training, in units of the preset.
    """

    kind: Literal["monolith"] = "monolith"
    budget: float = 1.0


class Experts(Model):
    """An ensemble of K experts with its router.

    Attributes:
        budget: of training, in units of the preset; all experts together take it.
        num: K.
        partition: whose images an expert has.
    """

    kind: Literal["experts"] = "experts"
    budget: float = 1.0
    num: int
    partition: Partition = "clusters"


class TrainingImages(Model):
    """No model: training images in the place of samples."""

    kind: Literal["training images"] = "training images"


Source = Annotated[Monolith | Experts | TrainingImages, Field(discriminator="kind")]


class Row(Model):
    """One row of a table.

    Attributes:
        table: its number.
        label: as it is printed.
        source: where samples come from.
        strategy: one of `STRATEGIES`.
        router: the ensemble's own, or the exact posterior of the training images.
        prior: the shares of the training images, or equal ones.
        solver: of the sampling.
        steps: of the solver; the preset's own where None.
    """

    table: int
    label: str
    source: Source
    strategy: str = "lock(1)"
    router: Literal["own", "exact"] = "own"
    prior: Literal["data", "equal"] = "data"
    solver: SolverName = "midpoint"
    steps: int | None = None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        number: the paper's plan's.
        title: what it says.
        columns: the figures that it shows, by their names in a cell.
        rows: what is measured.
    """

    number: int
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


def tables(preset: Preset) -> dict[int, Table]:
    """Return all tables, by number."""
    found = (_strategies, _numbers, _partitions, _budgets, _unequal, _solvers)
    return {table.number: table for table in (make(preset) for make in found)}


def _strategies(preset: Preset) -> Table:
    experts = Experts(num=preset.num_islands)
    rows = [
        Row(table=1, label="training images (floor)", source=TrainingImages()),
        Row(table=1, label="monolith", source=Monolith()),
        Row(table=1, label="sample, exact router (oracle)", source=experts, strategy="sample", router="exact"),
        *(Row(table=1, label=name, source=experts, strategy=name) for name in STRATEGIES),
    ]
    columns = ("fid", "fid_pca", "kid", "precision", "recall", "share_error", "evaluations", "images_per_s")
    return Table(1, f"Strategies of {preset.num_islands} experts at equal training FLOPs", columns, rows)


def _numbers(preset: Preset) -> Table:
    rows = [Row(table=2, label="1 (monolith)", source=Monolith())]
    for num in sorted((*preset.other_islands, preset.num_islands)):
        rows += [
            Row(table=2, label=f"{num}, {name}", source=Experts(num=num), strategy=name)
            for name in ("lock(1)", "sample")
        ]
    return Table(2, "Number of experts at equal training FLOPs", ("fid", "fid_pca", "kid", "recall"), rows)


def _partitions(preset: Preset) -> Table:
    ways: Mapping[Partition, str] = {"clusters": "feature clusters", "random": "random", "silos": "Dirichlet silos"}
    rows = [Row(table=3, label="monolith", source=Monolith())]
    for way, name in ways.items():
        experts = Experts(num=preset.num_islands, partition=way)
        rows += [
            Row(table=3, label=f"{name}, {strategy}", source=experts, strategy=strategy)
            for strategy in ("lock(1)", "lock(.5)", "sample", "top-1")
        ]
    columns = ("fid", "fid_pca", "kid", "recall", "share_error")
    return Table(3, f"Partition among {preset.num_islands} experts", columns, rows)


def _budgets(preset: Preset) -> Table:
    rows = []
    for budget in (*preset.budgets, 1.0):
        experts = Experts(num=preset.num_islands, budget=budget)
        rows += [
            Row(table=4, label=f"monolith, budget {budget:g}", source=Monolith(budget=budget)),
            Row(table=4, label=f"lock(1), budget {budget:g}", source=experts),
        ]
    return Table(4, "FID by training FLOPs", ("fid", "fid_pca", "kid", "flops"), rows)


def _unequal(preset: Preset) -> Table:
    experts = Experts(num=4, partition="unequal")
    rows = [Row(table=7, label="monolith", source=Monolith())]
    rows += [
        Row(table=7, label=name, source=experts, strategy=name)
        for name in ("full", "sample", "lock(1)", "lock(.5)", "top-1", "top-2", "nucleus(.9)", "threshold(.1)")
    ]
    rows += [
        Row(table=7, label=f"{name}, equal prior", source=experts, strategy=name, prior="equal")
        for name in ("lock(1)", "sample", "top-1")
    ]
    columns = ("fid", "share_error", "smallest_followed", "smallest_drawn", "smallest_recall")
    return Table(7, "Silos of .7, .2, .08 and .02 of the images", columns, rows)


def _solvers(preset: Preset) -> Table:
    experts = Experts(num=preset.num_islands)
    rows = [
        Row(
            table=10,
            label=f"{strategy}, {solver}, {evaluations}",
            source=experts,
            strategy=strategy,
            solver=solver,
            steps=evaluations // each,
        )
        for strategy in ("lock(1)", "sample")
        for solver, each in _EVALUATIONS.items()
        for evaluations in preset.solver_evaluations
        if evaluations >= each
    ]
    return Table(10, "Solvers by evaluations a sample", ("fid", "kid", "evaluations"), rows)
