"""Draws real images beside samples of three models that were trained on them, as one picture.

    python -m examples.paper.samples --dataset fashion-mnist --data FOLDER --preset cpu --published FOLDER --out DIR

The models are those of table 8 and its monolith, with the same seed: one model of all images, one model that FedAvg
averages over the silos, and the one-shot ensemble of the silos' experts. --published names the folder of the tables,
whose learning rates are used. Models stay in --out, so that the same command continues after an interruption.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ddm.io.pictures import BACKGROUND, GAP_PIXELS, grid
from ddm.protocol.architecture import RATE_TIMES_WIDTH
from ddm.sampling.samples import Samples
from ddm.system.console import say
from examples.paper.tables.averaging import averaged_in_process
from examples.paper.tables.clock import Clock, ended
from examples.paper.tables.data import DatasetName, World, read_world
from examples.paper.tables.drawing import drawn
from examples.paper.tables.ensembles import experts
from examples.paper.tables.lab import settings_of
from examples.paper.tables.models import Made, Workshop, monolith
from examples.paper.tables.presets import Preset, PresetName, preset_for
from examples.paper.tables.published import Record
from examples.paper.tables.rates import kind_of
from examples.paper.tables.rows import Row
from examples.paper.tables.sources import Experts, Federated, Monolith

NUM_COLUMNS = 5
NUM_IMAGES = 20
SEED = 0
_TITLE_PIXELS = 40
_FONT_PIXELS = 20
_PANEL_GAP_PIXELS = 16
# Few enough that the file stays small, and enough that nobody sees steps between greys.
_NUM_COLOURS = 64

Source = Monolith | Federated | Experts


@dataclass(frozen=True)
class Panel:
    """One part of the picture.

    Attributes:
        title: the line above it.
        images: shape (NUM_IMAGES, C, H, W).
        expert_N: the expert of each image, which the colour of its edge shows; None where there is only one model.
    """

    title: str
    images: Tensor
    expert_N: Tensor | None = None


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m examples.paper.samples",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset", choices=get_args(DatasetName), required=True)
    parser.add_argument("--data", type=Path, help="the data set's files; digits need none")
    parser.add_argument("--preset", choices=get_args(PresetName), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of models and the picture")
    parser.add_argument(
        "--published",
        type=Path,
        help="folder of tables whose learning rates are used; without it, the library's default rate",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default: 1")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    return ended(lambda: run(arguments), arguments.out)


def run(arguments: argparse.Namespace) -> None:
    """Train the models that are missing, draw their samples and write the picture."""
    world = read_world(arguments.dataset, arguments.data)
    preset = preset_for(arguments.preset, world.data.shape)
    shop = Workshop(world, preset, arguments.out / "models", Clock())
    rate_of = published_rates(arguments.published, world, preset)
    panels = [Panel("real images", world.test.images[:NUM_IMAGES])]
    for title, source in sources(preset):
        made = trained(shop, source, rate_of(source))
        samples = draw_samples(shop, made, source)
        expert_N = samples.expert_N if isinstance(source, Experts) else None
        panels.append(Panel(title, samples.images, expert_N))
    path = arguments.out / "samples.png"
    draw_panels(panels).quantize(_NUM_COLOURS).save(path, optimize=True)
    say(f"Written: {path}")


def sources(preset: Preset) -> Sequence[tuple[str, Source]]:
    """Return the models and the titles of their panels."""
    num = preset.num_silos
    averaging = Federated(num=num, rounds=preset.rounds)
    return (
        ("one model of all images", Monolith()),
        (f"FedAvg, {preset.rounds} rounds, {num} silos", averaging),
        (f"ensemble of {num} silos, sent once", Experts(num=num, partition="silos")),
    )


def published_rates(folder: Path | None, world: World, preset: Preset) -> Callable[[Source], float]:
    """Return what looks up the learning rate of a model.

    Raises:
        MissingFileError, DataError: see `Record.read`.
    """
    if folder is None:
        return lambda source: RATE_TIMES_WIDTH / preset.network.hidden
    rates = Record.read(folder, settings_of(world, preset)).rates
    return lambda source: rates[kind_of(source, preset)].rate


def trained(shop: Workshop, source: Source, rate: float) -> Made:
    """Return a model, trained now unless it is in its folder."""
    match source:
        case Monolith():
            return monolith(shop, source, rate, SEED, source.kind)
        case Federated():
            # Flower's messages, which table 8 counts, would take half an hour and change no weight.
            return averaged_in_process(shop, source, rate, SEED, source.kind)
        case Experts():
            return experts(shop, source, rate, SEED, source.kind)


def draw_samples(shop: Workshop, made: Made, source: Source) -> Samples:
    """Draw as many samples as a panel shows, by the strategy lock(1)."""
    preset = shop.preset.model_copy(update={"num_samples": NUM_IMAGES})
    row = Row(table=0, label=source.kind, source=source)
    with shop.clock.progress(f"{source.kind}: drawing") as step:
        return drawn(made.ensemble, row, preset, SEED, None, step)


def draw_panels(panels: Sequence[Panel]) -> Image.Image:
    """Arrange panels side by side, each below its title."""
    font = ImageFont.load_default(_FONT_PIXELS)
    grids = []
    for panel in panels:
        owners = None
        if panel.expert_N is not None:
            owners = panel.expert_N.tolist()
        grids.append(grid(panel.images, owners, columns=NUM_COLUMNS))
    width = sum(picture.width for picture in grids) + _PANEL_GAP_PIXELS * (len(grids) - 1)
    canvas = Image.new("RGB", (width, _TITLE_PIXELS + grids[0].height), BACKGROUND)
    pen = ImageDraw.Draw(canvas)
    x = 0
    for panel, picture in zip(panels, grids, strict=True):
        pen.text((x + GAP_PIXELS, _TITLE_PIXELS / 2), panel.title, "white", font, anchor="lm")
        canvas.paste(picture, (x, _TITLE_PIXELS))
        x += picture.width + _PANEL_GAP_PIXELS
    return canvas


if __name__ == "__main__":
    sys.exit(main())
