"""Measures recipes of training: the same network, images and steps, one change at a time, by the FID of its samples.

    python -m examples.paper.recipe --data FOLDER --out FOLDER

The folder of --data contains Fashion-MNIST's four idx gz files, which are split as for the tables. Each recipe trains a
small transformer on the training images. Its samples are compared with the validation images, by the features of a
small classifier that is trained first, on the public images, and stays in --out; only the tables use the test images.
Each row is written when it is measured, and is not measured again. The script prints the table and writes it to
recipe.md and recipe.csv.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ddm.ensemble import Ensemble, SamplingOptions
from ddm.evaluation.classifier import Classifier, train_classifier
from ddm.evaluation.intervals import Estimate
from ddm.evaluation.metrics import FeatureSet, measure
from ddm.io.files import write_atomic
from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import Model
from ddm.protocol.data import DataSpec
from ddm.system.console import UNBROKEN, human_flops, progress, say, table
from ddm.training.averages import average_of_width
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from examples.paper.recipes import ROWS, SHAPE, RecipeRow
from examples.paper.tables.clock import ended
from examples.paper.tables.data import Part, read_world
from examples.paper.tables.results import commit, hardware, utc

DATA = DataSpec(shape=SHAPE, range=(-1.0, 1.0))
_NEIGHBOURS = 5
_SOLVER_STEPS = 10


class MeasuredRecipe(Model):
    """What one recipe reached.

    Attributes:
        fid: of its samples against the validation images; the lowest, where a row has several averages.
        low: lower end of its 95% interval, over samples and validation images.
        high: upper end.
        width: of the average that it is of, where that was chosen afterwards.
        loss: mean squared error at the end.
        steps: of training.
        flops: of training.
        train_s: seconds of training.
        seed: of weights, batches and samples.
        commit: of the code.
        hardware: in words.
        utc: when it was measured.
    """

    fid: float
    low: float
    high: float
    width: float | None
    loss: float
    steps: int
    flops: float
    train_s: Annotated[float, Field(ge=0)]
    seed: int
    commit: str
    hardware: str
    utc: str


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of Fashion-MNIST's idx gz files"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the table, the classifier and the rows"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=sorted(ROWS), help="rows of the table; default: all"
    )
    parser.add_argument(
        "--num", type=int, default=2500, help="number of samples of each row; default: 2500"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="number of training steps instead of the table's, for a quick trial",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and samples")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default: 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return ended(lambda: run(arguments), arguments.out)


def run(given: argparse.Namespace) -> None:
    """Measure the rows that were asked for, and print and write the table."""
    given.out.mkdir(parents=True, exist_ok=True)
    world = read_world("fashion-mnist", given.data)
    judge = _classifier(world.public, given.out / "classifier.safetensors")
    reference = FeatureSet.of(judge.encode(world.validation.images), _NEIGHBOURS)
    measurements: dict[str, MeasuredRecipe] = {}
    for name in given.rows or ROWS:
        row = ROWS[name] if given.steps is None else ROWS[name].shortened(given.steps)
        path = given.out / f"{name}-{row.training.num_steps}-{given.num}-{given.seed}.json"
        if not path.exists():
            measured = _measure(
                name, row, world.train, judge, reference, num=given.num, seed=given.seed
            )
            write_atomic(path, measured.model_dump_json().encode())
        measurements[name] = MeasuredRecipe.model_validate_json(path.read_text("utf-8"))
    say(write(given.out, measurements))


def _classifier(public: Part, kept: Path) -> Classifier:
    if not kept.exists():
        with progress("training the classifier") as report_progress:
            train_classifier(public.images, public.label_N, DATA, on_progress=report_progress).save(
                kept
            )
    return Classifier.load(kept)


def _measure(
    name: str,
    row: RecipeRow,
    part: Part,
    judge: Classifier,
    reference: FeatureSet,
    *,
    num: int,
    seed: int,
) -> MeasuredRecipe:
    condition = (
        NoCondition()
        if row.drop is None
        else ClassCondition(num_classes=int(part.label_N.max()) + 1, drop=row.drop)
    )
    model = build_expert(row.network, SHAPE, condition=condition, seed=seed)
    settings = row.training.model_copy(update={"seed": seed})
    examples = Examples(part.images)
    if row.drop is not None:
        examples = Examples(part.images, part.label_N, row.drop)
    with tempfile.TemporaryDirectory() as scratch:
        with progress(f"{name}: training") as report_progress:
            trained = train(
                model,
                examples,
                settings,
                TrainingObjective(t_distribution=row.times),
                TrainingRun(
                    Path(scratch),
                    on_progress=lambda done: report_progress(done.step, done.num_steps),
                ),
            )
        averages: dict[float | None, dict[str, Tensor]] = {None: trained.ema}
        if row.widths:
            averages = {
                width: average_of_width(Path(scratch), settings, width, trained.ema)
                for width in row.widths
            }
    classes = None if row.drop is None else part.label_N[torch.arange(num) % len(part)]
    fids: dict[float | None, Estimate] = {}
    for width, weights in averages.items():
        model.load_state_dict(weights)
        ensemble = Ensemble([model.eval()], None, [1.0], SHAPE, condition=condition)
        with progress(f"{name}: drawing") as report_progress:
            drawn = ensemble.sample(
                num,
                steps=_SOLVER_STEPS,
                condition=classes,
                seed=seed,
                options=SamplingOptions(on_progress=report_progress),
            )
        samples = FeatureSet.of(judge.encode(drawn.images.clamp(*DATA.range)), _NEIGHBOURS)
        fids[width] = measure(samples, reference)[0]["fid"]
    width = min(fids, key=lambda each: fids[each].value)
    return MeasuredRecipe(
        fid=fids[width].value,
        low=fids[width].low,
        high=fids[width].high,
        width=width,
        loss=trained.loss,
        steps=trained.steps,
        flops=trained.flops,
        train_s=trained.seconds,
        seed=seed,
        commit=commit(),
        hardware=hardware(torch.device("cpu")),
        utc=utc(),
    )


def write(out: Path, found: Mapping[str, MeasuredRecipe]) -> str:
    """Write recipe.csv and recipe.md, and return the table as Markdown."""
    first = next(iter(found.values())).fid
    head = ("recipe", "FID", "95% interval", "of the first", "loss", "FLOPs", "seconds")
    rows = [
        (ROWS[name].label + (f": {row.width:g}" if row.width else ""), f"{row.fid:.1f}")
        + (f"{row.low:.1f} to {row.high:.1f}", f"{row.fid / first:.2f}")
        + (f"{row.loss:.4f}", human_flops(row.flops), f"{row.train_s:.0f}")
        for name, row in found.items()
    ]
    text = table(rows, head, width=UNBROKEN)
    (out / "recipe.md").write_text(text, "utf-8")
    with (out / "recipe.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(("row", *MeasuredRecipe.model_fields))
        for name, measured in found.items():
            values = measured.model_dump().values()
            writer.writerow(
                (name, *(f"{value:g}" if isinstance(value, float) else value for value in values))
            )
    return text


if __name__ == "__main__":
    sys.exit(main())
