"""One expert, measured, and leaks.csv, which has the figures of all."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddm.errors import DataError
from ddm.io.files import require_file
from ddm.protocol.base import Model
from examples.paper.leaks.choices import CHOICES
from examples.paper.tables.results import Figure

LEAKS = "leaks.csv"
_INTERVALS = ("auc", "tpr", "copies", "fid", "kid")
_OF_OUTSIDER = ("outsider_auc", "outsider_tpr")
_ENDS = {"": "value", "_low": "low", "_high": "high"}
_COLUMNS = (
    *("dataset", "choice", "images", "seed", "steps", "verdict"),
    *(f"{name}{end}" for name in _INTERVALS for end in _ENDS),
    *_OF_OUTSIDER,
    *("noise_multiplier", "training_s", "audit_s", "classifier", "commit", "hardware", "utc"),
)


class LeakCell(Model):
    """One silo's expert, measured.

    Attributes:
        choice: a name of `CHOICES`.
        images: that it learned.
        seed: of these images and of the training.
        steps: of training.
        verdict: of the audit.
        figures: `auc` and `tpr` (at 1% false positives) of the audit's strongest attack, `outsider_auc` and
            `outsider_tpr` of an outsider's where one attacked, `copies` (the larger share of near
            copies, by pixels or features), `fid` and `kid`.
        noise_multiplier: of private training.
        training_s: seconds of training.
        audit_s: seconds of the audit, over all restarts.
        classifier: sha256 of the one in whose features FID and KID are; empty where it was not recorded.
        commit: of the code.
        hardware: in words.
        utc: when it was measured.
    """

    choice: str
    images: int
    seed: int
    steps: int
    verdict: str
    figures: dict[str, Figure]
    noise_multiplier: float | None
    training_s: float
    audit_s: float
    classifier: str
    commit: str
    hardware: str
    utc: str

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells it from all others of a data set: choice, images and seed."""
        return self.choice, self.images, self.seed


def write_cells(path: Path, dataset: str, cells: Iterable[LeakCell]) -> None:
    """Write every expert's figures on a line of its own."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cell in cells:
            writer.writerow(_line(dataset, cell))


def read_cells(path: Path, dataset: str, classifier: str, share: float) -> list[LeakCell]:
    """Read what `write_cells` wrote.

    Args:
        path: the file.
        dataset: all lines have to be of this one.
        classifier: sha256 of the one that judges; no line may name another.
        share: of all steps, which every training has to have.

    Raises:
        MissingFileError, DataError: nothing there, or something else, or of another data set, classifier or share.
    """
    require_file(path, "the figures of an earlier run")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
        datasets = {line["dataset"] for line in lines}
        cells = [_cell(line) for line in lines]
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise DataError(
            path.name, expected="figures as this program writes them", got="something else"
        ) from error
    if datasets - {dataset}:
        raise DataError(path.name, expected=dataset, got=", ".join(sorted(datasets)))
    others = [cell for cell in cells if cell.steps != CHOICES[cell.choice].steps_at(share)]
    if others:
        raise DataError(
            path.name,
            expected=f"trainings with {share:g} of their steps",
            got=f"{len(others)} rows with another number of steps",
            remedy="Give the `--scale` of the earlier run.",
        )
    judges = {cell.classifier for cell in cells} - {"", classifier}
    if judges:
        remedy = "FIDs of several classifiers cannot be compared: name that classifier's file after `--classifier`."
        raise DataError(
            path.name,
            expected=f"figures of the classifier {classifier[:16]}",
            got=", ".join(sorted(judge[:16] for judge in judges)),
            remedy=remedy,
        )
    return cells


def _line(dataset: str, cell: LeakCell) -> dict[str, object]:
    line: dict[str, object] = cell.model_dump(exclude={"figures"})
    line["dataset"] = dataset
    line["noise_multiplier"] = _number(cell.noise_multiplier)
    line["training_s"] = f"{cell.training_s:.1f}"
    line["audit_s"] = f"{cell.audit_s:.1f}"
    for name in _INTERVALS:
        for end, field in _ENDS.items():
            line[f"{name}{end}"] = _number(getattr(cell.figures[name], field))
    for name in _OF_OUTSIDER:
        line[name] = f"{cell.figures[name].value:.6f}" if name in cell.figures else ""
    return line


def _cell(line: Mapping[str, str]) -> LeakCell:
    """Return a line as a cell.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    figures = {
        name: Figure.model_validate(
            {field: _read_number(line[f"{name}{end}"]) for end, field in _ENDS.items()}
        )
        for name in _INTERVALS
    }
    figures |= {name: Figure(value=float(line[name])) for name in _OF_OUTSIDER if line[name]}
    choice = line["choice"]
    if choice not in CHOICES:
        raise ValueError(choice)
    return LeakCell(
        choice=choice,
        images=int(line["images"]),
        seed=int(line["seed"]),
        steps=int(line["steps"]),
        verdict=line["verdict"],
        figures=figures,
        noise_multiplier=_read_number(line["noise_multiplier"]),
        training_s=float(line["training_s"]),
        audit_s=float(line["audit_s"]),
        classifier=line["classifier"],
        commit=line["commit"],
        hardware=line["hardware"],
        utc=line["utc"],
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _read_number(text: str) -> float | None:
    return float(text) if text else None
