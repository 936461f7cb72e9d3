"""What an earlier run published: taken over where the same classifier judged it, else shown table by table."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ddm.errors import DataError, MissingFileError
from ddm.io.files import require_file, write_atomic
from ddm.protocol.base import Model
from examples.paper.tables.judging import CLASSIFIER, Judged
from examples.paper.tables.results import Cell, Cost, Figure, RateChoice
from examples.paper.tables.sharing import alone

RECORD = "run.json"
_PUBLISHED = "published"
_COST = ("steps", "batch", "rate", "flops", "router_flops", "training_s", "trained_commit")
COLUMNS = (
    *("row", "seed", "figure", "value", "low", "high", "router", "samples", "sampling_s"),
    *_COST,
    *("commit", "hardware", "utc"),
)

Cells = Mapping[str, Mapping[int, Cell]]
"""The cells of a table, by label and then by seed."""


class Origin(Model):
    """Where a table comes from.

    Attributes:
        commands: of the runs that measured it, one after the other.
        judge: the classifier in whose features its images were judged.
    """

    commands: tuple[str, ...]
    judge: Judged

    def judged_by(self, judge: Judged) -> bool:
        """Whether it is the same file; its accuracy may differ from machine to machine."""
        return self.judge.digest == judge.digest


class Record(Model):
    """What a folder of tables says beside its figures.

    Attributes:
        settings: digest of the data set and all sizes.
        tables: the origin of each.
        rates: how learning rates were chosen, by kind of model.
    """

    settings: str
    tables: dict[int, Origin]
    rates: dict[str, RateChoice]

    def write(self, folder: Path) -> None:
        """Write it beside the tables."""
        write_atomic(folder / RECORD, self.model_dump_json(indent=1).encode() + b"\n")

    @classmethod
    def read(cls, folder: Path, settings: str) -> "Record":
        """Read what a run with the same settings wrote.

        Raises:
            MissingFileError, DataError: nothing there, or something else, or of other settings.
        """
        path = folder / RECORD
        require_file(path, "the record of published tables")
        try:
            record = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise DataError(
                path.name, expected="the record of published tables", got="something else"
            ) from error
        if record.settings != settings:
            remedy = "Name tables of the same data set, preset and scale, or measure all anew."
            raise DataError(
                path.name, expected=f"settings {settings}", got=record.settings, remedy=remedy
            )
        return record


@dataclass(frozen=True)
class Published:
    """An earlier run's folder, read.

    Attributes:
        record: what it says of itself; None where there is no earlier run.
        cells: by table.
    """

    record: Record | None = None
    cells: Mapping[int, Cells] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, settings: str) -> "Published":
        """Read a folder that a run with the same settings wrote; see `Record.read`."""
        record = Record.read(folder, settings)
        return cls(
            record, {number: read_cells(folder / f"table{number}.csv") for number in record.tables}
        )

    @classmethod
    def of(cls, out: Path, folder: Path | None, settings: str) -> "Published":
        """Return what a run in `out` goes on with: a folder that is named now, or was once; nothing without any.

        What is named is copied to `out`, so that further runs need not name it.

        Raises:
            MissingFileError, DataError: see `Record.read`.
        """
        with alone(out, Path(CLASSIFIER).stem, wait=True):
            if folder:
                (out / _PUBLISHED).mkdir(exist_ok=True)
                return _brought(folder, out, settings)
            return (
                cls.read(out / _PUBLISHED, settings)
                if (out / _PUBLISHED / RECORD).exists()
                else cls()
            )

    def rate(self, kind: str) -> RateChoice | None:
        """Return how the learning rate of a kind of model was chosen, if it was."""
        return self.record.rates.get(kind) if self.record else None

    def origin(self, number: int) -> Origin | None:
        """Return where a table comes from; None for one that was not published."""
        return self.record.tables.get(number) if self.record else None

    def cell(self, number: int, label: str, seed: int, judge: Judged) -> Cell | None:
        """Return what was measured of a row, if the same classifier judged its table."""
        origin = self.origin(number)
        same = origin is not None and origin.judged_by(judge)
        return self.cells[number].get(label, {}).get(seed) if same else None


def _brought(folder: Path, out: Path, settings: str) -> Published:
    """Copy published tables, and their classifier where this run has none yet; return them."""
    earlier = Published.read(folder, settings)
    names = [f"table{number}.csv" for number in earlier.cells]
    for name in (*names, RECORD):  # the record last: it says that the tables are there
        write_atomic(out / _PUBLISHED / name, (folder / name).read_bytes())
    if (folder / CLASSIFIER).exists() and not (out / CLASSIFIER).exists():
        write_atomic(out / CLASSIFIER, (folder / CLASSIFIER).read_bytes())
    return earlier


def write_cells(path: Path, cells: Cells) -> None:
    """Write every figure of every seed, each on a line of its own."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(COLUMNS)
        for label, by_seed in cells.items():
            for seed, cell in by_seed.items():
                cost = cell.cost
                spent: tuple[object, ...] = ("",) * len(_COST)
                if cost:
                    spent = (
                        cost.steps,
                        cost.batch_size,
                        f"{cost.learning_rate:g}",
                        f"{cost.flops:.6g}",
                    )
                    spent += (f"{cost.router_flops:.6g}", f"{cost.seconds:.1f}", cost.commit)
                drawn = (cell.router, cell.num_samples, f"{cell.sampling_seconds:.1f}")
                for name, figure in cell.figures.items():
                    numbers = (
                        "" if number is None else f"{number:.6g}"
                        for number in (figure.value, figure.low, figure.high)
                    )
                    writer.writerow(
                        (
                            label,
                            seed,
                            name,
                            *numbers,
                            *drawn,
                            *spent,
                            cell.commit,
                            cell.hardware,
                            cell.utc,
                        )
                    )


def cells_of(folder: Path, number: int) -> Cells:
    """Return the cells of a table in a folder; none where there is no such table, or another file of that name."""
    try:
        return read_cells(folder / f"table{number}.csv")
    except (MissingFileError, DataError):
        return {}


def read_cells(path: Path) -> dict[str, dict[int, Cell]]:
    """Read what `write_cells` wrote.

    Raises:
        MissingFileError, DataError: nothing there, or something else.
    """
    require_file(path, "a table's figures")
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise DataError(
                    path.name, expected=f"the columns {', '.join(COLUMNS)}", got="others"
                )
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            path.name, expected="a table's figures as CSV", got="something else"
        ) from error
    cells: dict[str, dict[int, Cell]] = {}
    try:
        for line in lines:
            by_seed = cells.setdefault(line["row"], {})
            seed = int(line["seed"])
            cell = by_seed.get(seed) or _cell(line)
            value, low, high = (
                float(line[name]) if line[name] else None for name in ("value", "low", "high")
            )
            figure = Figure.model_validate({"value": value, "low": low, "high": high})
            by_seed[seed] = cell.model_copy(
                update={"figures": {**cell.figures, line["figure"]: figure}}
            )
    except (ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise DataError(
            path.name, expected="numbers as a run writes them", got="something else"
        ) from error
    return cells


def _cell(line: Mapping[str, str]) -> Cell:
    cost = None
    if line["steps"]:
        cost = Cost(
            steps=int(line["steps"]),
            batch_size=int(line["batch"]),
            learning_rate=float(line["rate"]),
            flops=float(line["flops"]),
            router_flops=float(line["router_flops"]),
            seconds=float(line["training_s"]),
            commit=line["trained_commit"],
        )
    return Cell(
        seed=int(line["seed"]),
        cost=cost,
        router=line["router"],
        num_samples=int(line["samples"]),
        sampling_seconds=float(line["sampling_s"]),
        figures={},
        commit=line["commit"],
        hardware=line["hardware"],
        utc=line["utc"],
    )
