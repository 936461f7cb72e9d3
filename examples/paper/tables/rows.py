"""A row of a table, as plain data; and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ddm.diffusion.solver import SolverName
from ddm.ensemble import Full, Lock, Nucleus, Sample, Strategy, Threshold, TopK, TopOne
from ddm.protocol.base import Model
from examples.paper.tables.sources import Source

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


# rows that a target is of
UNTUNED = "monolith, default rate"
FORMER = "monolith, former recipe"
BEST_BATCH = ", best batch"  # what their names end with in table 4, before the budget


class FittedRouter(Model):
    """A router in place of the ensemble's own.

    Attributes:
        family: the prior alone, the ensemble's own, a router on the training images and their silos, one on images
            that the experts draw, or one of a federation's statistics.
        epsilon: of all statistics together; None without noise.
    """

    family: Literal["prior", "own", "labels", "samples", "counts", "learned"]
    epsilon: float | None = None


class Row(Model):
    """One row of a table.

    Attributes:
        table: its number.
        label: as it is printed.
        source: where samples come from.
        strategy: one of `STRATEGIES`.
        router: the ensemble's own, or the exact posterior of the training images, or one fitted for it.
        prior: the shares of the training images, or equal ones; or those without the last expert.
        solver: of the sampling.
        steps: of the solver; the preset's own where None.
        guidance: towards the class that a sample is asked for, of conditional sources.
        best: whether the source has what is best on validation images in the place of its own: a monolith or experts
            the batch, and as many more steps; FedProx the weight of its term.
        merged: whether samples are drawn from one network with the mean of the experts' weights, by their priors.
    """

    table: int
    label: str
    source: Source
    strategy: str = "lock(1)"
    router: Literal["own", "exact"] | FittedRouter = "own"
    prior: Literal["data", "equal", "lost"] = "data"
    solver: SolverName = "midpoint"
    steps: int | None = None
    guidance: Annotated[float, Field(exclude_if=lambda scale: scale == 0.0)] = 0.0
    best: Annotated[bool, Field(exclude_if=lambda best: not best)] = False
    merged: Annotated[bool, Field(exclude_if=lambda merged: not merged)] = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        number: as `--tables` takes it.
        title: what it says.
        columns: the figures that it shows, by their names in a cell.
        rows: what is measured.
        note: what a reader needs to know beside them.
    """

    number: int
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
