"""The picture of samples beside real images: its panels, and where its models take their learning rates."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pytest import MonkeyPatch

from ddm.io.pictures import PALETTE
from examples.paper import samples
from examples.paper.tables.presets import preset_for
from examples.paper.tables.published import RECORD, Record
from examples.paper.tables.rates import kind_of
from tests.paper.test_tables import tiny

TABLES = Path(__file__).parents[2] / "docs" / "results" / "tables-fashion-mnist"


def test_committed_tables_hold_the_learning_rate_of_every_model() -> None:
    record = Record.model_validate_json((TABLES / RECORD).read_bytes())
    preset = preset_for("cpu", (1, 28, 28))
    kinds = [kind_of(source, preset) for _, source in samples.sources(preset)]
    assert kinds == ["monolith", "federated", "4 experts"]
    assert set(kinds) <= set(record.rates)


def test_panels_show_their_images_in_order_and_the_expert_of_each() -> None:
    values = torch.linspace(-1, 1, samples.NUM_IMAGES)
    images = values[:, None, None, None].expand(-1, 1, 28, 28)
    expert_N = torch.tensor([0, 1] * (samples.NUM_IMAGES // 2))
    panels = [samples.Panel("plain", images), samples.Panel("experts", images, expert_N)]
    picture = np.asarray(samples.draw_panels(panels))
    colours = {tuple(colour) for colour in picture.reshape(-1, 3).tolist()}
    assert set(PALETTE[:2]) <= colours
    assert not set(PALETTE[2:]) & colours
    # The greys of a panel's first row, from black on.
    middle = picture[samples._TITLE_PIXELS + 4 + 28]
    greys = [int(middle[4 + 28 + 60 * column][0]) for column in range(samples.NUM_COLUMNS)]
    expected = ((values[: samples.NUM_COLUMNS] + 1) * 127.5).round().int().tolist()
    assert greys == expected


def test_script_trains_each_model_once_and_writes_the_picture(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "preset_for", tiny)
    words = ["--dataset", "digits", "--preset", "smoke", "--out", str(tmp_path)]
    assert samples.main(words) == 0
    models = {path.parent.name: path.read_bytes() for path in tmp_path.glob("models/*/cost.json")}
    assert set(models) == {"monolith", "federated", "experts"}
    picture = (tmp_path / "samples.png").read_bytes()
    assert samples.main(words) == 0
    assert (tmp_path / "samples.png").read_bytes() == picture
    assert models == {
        path.parent.name: path.read_bytes() for path in tmp_path.glob("models/*/cost.json")
    }
    with Image.open(tmp_path / "samples.png") as image:
        assert image.width > 4 * 300
