"""Measures recipes of training: the same network, images and steps, one change at a time, by the FID of its samples.

    python -m examples.paper.recipe --data FOLDER --out FOLDER

FOLDER of --data holds Fashion-MNIST's four idx gz files. A small transformer is trained on the training images by each
recipe, and its samples are compared with the test images by the features of a small classifier, which is trained first
and kept in --out. Each row is written as it is done, and rows that are there already are not measured again. Prints the
table and writes it to recipe.md and recipe.csv.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble
from ddm.evaluation.classifier import Classifier, train_classifier
from ddm.evaluation.metrics import Side, measure
from ddm.io.idx import labels_beside, read_idx
from ddm.io.sources import read_images
from ddm.models import build_expert
from ddm.protocol.base import Model
from ddm.protocol.plan import DataSpec
from ddm.system.console import UNBROKEN, progress, say, table
from ddm.training.loop import train
from examples.paper.recipes import ROWS, SHAPE, Row

DATA = DataSpec(shape=SHAPE, range=(-1.0, 1.0))
_NEIGHBOURS = 5


class Measured(Model):
    """What one recipe reached.

    Attributes:
        fid: of its samples against the test images.
        low: lower end of its 95% interval, over samples and test images.
        high: upper end.
        loss: mean squared error at the end.
        train_s: seconds of training, on whatever machine.
    """

    fid: float
    low: float
    high: float
    loss: float
    train_s: Annotated[float, Field(ge=0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's idx gz files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the classifier, each row")
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), help="of the table; default all")
    parser.add_argument("--num", type=int, default=2500, help="samples of each; default 2500")
    parser.add_argument("--steps", type=int, help="training steps, in place of the table's own, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and samples")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default 1")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    images, tests = (read_images(given.data / f"{part}-images-idx3-ubyte.gz", DATA) for part in ("train", "t10k"))
    judge = _classifier(given.data / "train-images-idx3-ubyte.gz", images, given.out / "classifier.safetensors")
    reference = Side.of(judge.encode(tests), _NEIGHBOURS)
    found: dict[str, Measured] = {}
    for name in given.rows or ROWS:
        path = given.out / f"{name}-{given.seed}.json"
        if not path.exists():
            row = ROWS[name] if given.steps is None else ROWS[name].shortened(given.steps)
            measured = _measure(name, row, images, judge, reference, num=given.num, seed=given.seed)
            path.write_text(measured.model_dump_json(), "utf-8")
        found[name] = Measured.model_validate_json(path.read_text("utf-8"))
    say(write(given.out, found))


def _classifier(path: Path, images: Tensor, kept: Path) -> Classifier:
    if not kept.exists():
        labels = torch.from_numpy(read_idx(labels_beside(path)).copy()).long()
        with progress("training the classifier") as tell:
            train_classifier(images, labels, DATA, on_progress=tell).save(kept)
    return Classifier.load(kept)


def _measure(
    name: str, row: Row, images: Tensor, judge: Classifier, reference: Side, *, num: int, seed: int
) -> Measured:
    model = build_expert(row.network, SHAPE, seed=seed)
    settings = row.training.model_copy(update={"seed": seed})
    with tempfile.TemporaryDirectory() as scratch, progress(f"{name}: training") as tell:
        trained = train(
            model,
            images,
            settings,
            LinearPath(),
            row.times,
            checkpoint_dir=Path(scratch),
            on_progress=lambda done: tell(done.step, done.num_steps),
            should_stop=lambda: False,
        )
    model.load_state_dict(trained.ema)
    ensemble = Ensemble([model.eval()], None, [1.0], SHAPE)
    with progress(f"{name}: drawing") as tell:
        samples = ensemble.sample(num, seed=seed, on_progress=tell).images.clamp(*DATA.range)
    fid = measure(Side.of(judge.encode(samples), _NEIGHBOURS), reference)[0]["fid"]
    return Measured(fid=fid.value, low=fid.low, high=fid.high, loss=trained.loss, train_s=trained.seconds)


def write(out: Path, found: Mapping[str, Measured]) -> str:
    """Write recipe.csv and recipe.md, and return the table as Markdown."""
    first = next(iter(found.values())).fid
    head = ("recipe", "FID", "95% interval", "of the first", "loss", "seconds")
    rows = [
        (ROWS[name].label, f"{each.fid:.1f}", f"{each.low:.1f} to {each.high:.1f}", f"{each.fid / first:.2f}")
        + (f"{each.loss:.4f}", f"{each.train_s:.0f}")
        for name, each in found.items()
    ]
    text = table(rows, head, width=UNBROKEN)
    (out / "recipe.md").write_text(text, "utf-8")
    lines = [
        ",".join(["row", *Measured.model_fields]),
        *(",".join([name, *(f"{value:g}" for value in each.model_dump().values())]) for name, each in found.items()),
    ]
    (out / "recipe.csv").write_text("\n".join(lines) + "\n", "utf-8")
    return text


if __name__ == "__main__":
    main()
