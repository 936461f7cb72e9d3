"""A plan asks an exact question about one image by what a silo then does: it stops, waits, or shows another number.

Two sites differ in one image. The plan's encoder, or its bounds, are made to fire for that image alone; nothing that
the aggregator sees of the sites may differ.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from aggregator.planning.sign import sign_plan
from ddm.encoders.autoencoder import build_autoencoder
from ddm.encoders.non_finite import replace_non_finite
from ddm.errors import DataError, NumericalError
from ddm.images.picture import Picture
from ddm.images.transform import Transform
from ddm.io.tensors import load_tensors, save_tensors
from ddm.partition.nearest import NearestCentroid
from ddm.protocol.base import File, Unit
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.submission import MAX_LOSS
from ddm.protocol.transform import TransformSpec
from ddm.routers.sketch import Sketch
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.distributed import training_process
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.state import TrainingState
from silo.data.declared import check_values, facts_of
from silo.data.transformed import LEFT_OUT, NOT_TAKEN
from silo.plan import acceptance
from silo.worker import stages
from tests.support.case import case
from tests.support.cohorts import source_at
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    cohort,
    images,
    make_draft,
    recipe,
    write_policy,
)
from tests.support.observed import observe
from tests.support.pictures import read_all_pictures
from tests.support.recipes import training

SILO = "north"
TARGET = np.ones((1, 4, 4), np.float32)
COUNTS: dict[str, Any] = {
    "statistics": {
        "unit": "image",
        "total": {"epsilon": 1.0, "delta": 0.0},
        "counts": {"epsilon": 1.0, "num_groups": 4},
    },
    "router": {"kind": "counts"},
}


def enlarged(pictures: np.ndarray, times: int) -> np.ndarray:
    """Repeat every pixel, in both directions."""
    return np.kron(pictures, np.ones((1, 1, times, times), np.float32))


def world(folder: Path, *, with_target: bool, times: int = 1) -> TinyFederation:
    """A federation of one site, which holds the target or another image in its place; `times` as large."""
    made = cohort(40, 0.0, seed=5)
    made["images"] = made["images"] * 0.5
    if with_target:
        made["images"][7] = TARGET
    made["images"] = enlarged(made["images"], times)
    folder.mkdir()
    np.savez(folder / "data.npz", **made)  # type: ignore[arg-type]
    tiny = TinyFederation.create(folder / "tiny", {})
    tiny.join_with(SILO, folder / "data.npz")
    return tiny


def signed(
    tiny: TinyFederation, spoil: Callable[[Path], None], *, times: int = 1, **tables: object
) -> str:
    """Sign a plan after `spoil` changed one of its public files."""
    made = np.concatenate([images(120, centre, seed=90) for centre in (-0.5, 0.5)])
    public = torch.from_numpy(enlarged(made, times))
    draft = make_draft(tiny.federation, recipe(**(COUNTS | tables)), public, tiny.path / "scratch")
    spoil(draft.folder)
    files = tuple(File.of(file.path, draft.folder / file.path) for file in draft.plan.files)
    draft = replace(draft, plan=draft.plan.model_copy(update={"files": files}))
    sign_plan(tiny.federation, draft, PASSPHRASE)
    return draft.plan.plan_id


def overflowing(folder: Path) -> None:
    """Let the encoder exceed float32 for an image that is bright all over, and for no other."""
    path = folder / "plan" / "encoder.safetensors"
    tensors = dict(load_tensors(path, None, max_bytes=1 << 20))
    basis = tensors["basis"].clone()
    basis[0] = 3e37
    save_tensors(path, tensors | {"basis": basis, "mean": torch.zeros_like(tensors["mean"])})


def test_encoder_that_overflows_for_one_person_shows_nothing(tmp_path: Path) -> None:
    seen = []
    for name, with_target in (("with", True), ("without", False)):
        tiny = world(tmp_path / name, with_target=with_target)
        plan_id = signed(tiny, overflowing)
        seen.append(observe(tiny, SILO, plan_id))
        files = acceptance.load_accepted(
            tiny.sites[SILO], plan_id, str(tiny.state_of(SILO).plan_digest)
        ).files()
        held = torch.from_numpy(np.load(tmp_path / name / "data.npz")["images"])
        fired = ~torch.isfinite(files.encoder.encode(held)).all(1)
        # the question does tell them apart
        assert fired.nonzero().flatten().tolist() == ([7] if with_target else [])
    assert seen[0] == seen[1]


def overflowing_network(folder: Path) -> None:
    """Let the first layer of timm's network exceed float32 for an image that is bright all over, and for no other."""
    path = folder / "plan" / "encoder.safetensors"
    tensors = dict(load_tensors(path, None, max_bytes=1 << 24))
    spoiled = {
        name: torch.zeros_like(tensor) if tensor.dim() == 4 else tensor
        for name, tensor in tensors.items()
    }
    # sees 1 everywhere in the target, and at most 0.5 in any other image
    first = tensors["conv1.0.weight"]
    spoiled["conv1.0.weight"] = torch.full_like(first, 3.4e38 / first[0].numel() / 0.7)
    save_tensors(path, spoiled)


@pytest.mark.slow
def test_network_of_timm_that_overflows_for_one_person_shows_nothing(tmp_path: Path) -> None:
    seen = []
    network = {
        "kind": "timm",
        "model": "test_resnet",
        "random_weights": True,
        "image_size": [32, 32],
    }
    for name, with_target in (("with", True), ("without", False)):
        tiny = world(tmp_path / name, with_target=with_target)
        plan_id = signed(tiny, overflowing_network, encoder=network)
        seen.append(observe(tiny, SILO, plan_id))
        files = acceptance.load_accepted(
            tiny.sites[SILO], plan_id, str(tiny.state_of(SILO).plan_digest)
        ).files()
        held = torch.from_numpy(np.load(tmp_path / name / "data.npz")["images"])
        with pytest.raises(DataError) if with_target else nullcontext():
            files.encoder.encode(held)
        fired = ~torch.isfinite(files.encoder.encode(held, replacement=torch.nan)).all(1)
        assert fired.nonzero().flatten().tolist() == ([7] if with_target else [])
    assert seen[0] == seen[1]


AUTOENCODER = AutoencoderSize(
    channels=(8, 16, 8, 16, 8),
    attention=(False,) * 5,
    latent_channels=2,
    num_res_blocks=1,
    norm_groups=4,
)


def overflowing_autoencoder(folder: Path) -> None:
    """Let MONAI's autoencoder exceed float32 for an image that is bright all over, and for no other.

    The first branch turns a brightness above 0.75 into a large number and all others into 0: it sees the difference and
    its negative, so that normalising them keeps the sign, and SiLU drops what is far below 0. All that follows sums.
    """
    path = folder / "plan" / "autoencoder.safetensors"
    tensors = dict(load_tensors(path, None, max_bytes=1 << 20))
    of = {
        name: torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith("encoder.blocks.")
    }
    first = "encoder.blocks.0.conv"
    branch = "encoder.blocks.1"
    of[f"{first}.weight"][0] = 1 / 9
    of[f"{first}.bias"][0] = -0.75
    of[f"{first}.weight"][1] = -1 / 9
    of[f"{first}.bias"][1] = 0.75
    of[f"{branch}.norm1.weight"].fill_(1e3)
    of[f"{branch}.conv1.conv.weight"][2, 0, 1, 1] = 1.0
    of[f"{branch}.norm2.weight"].fill_(1e4)
    of[f"{branch}.conv2.conv.weight"][2:, 2, 1, 1] = 1e4
    of["encoder.blocks.2.conv.conv.weight"][:, 2:] = 1e4
    for number in range(3, 10):
        shortcut = number % 2 == 1
        of[f"encoder.blocks.{number}.{'nin_shortcut' if shortcut else 'conv'}.conv.weight"].fill_(
            1e4
        )
    save_tensors(path, tensors | of)


@pytest.mark.slow
def test_autoencoder_that_overflows_for_one_person_shows_nothing(tmp_path: Path) -> None:
    seen = []
    times = 8
    save_tensors(
        tmp_path / "weights.safetensors",
        dict(build_autoencoder(AUTOENCODER, (1, 32, 32)).state_dict()),
    )
    tables: dict[str, Any] = {
        "data": {"shape": [1, 32, 32], "range": [-1.0, 1.0]},
        "latent": AUTOENCODER.model_dump(mode="json")
        | {"kind": "autoencoder_kl", "weights": str(tmp_path / "weights.safetensors")},
    }
    for name, with_target in (("with", True), ("without", False)):
        tiny = world(tmp_path / name, with_target=with_target, times=times)
        plan_id = signed(tiny, overflowing_autoencoder, times=times, **tables)
        seen.append(observe(tiny, SILO, plan_id))
        files = acceptance.load_accepted(
            tiny.sites[SILO], plan_id, str(tiny.state_of(SILO).plan_digest)
        ).files()
        held = torch.from_numpy(np.load(tmp_path / name / "data.npz")["images"])
        with pytest.raises(NumericalError) if with_target else nullcontext():
            files.latent.encode(held)
        fired = ~torch.isfinite(files.latent.encode(held, replacement=torch.nan)).flatten(1).all(1)
        assert fired.nonzero().flatten().tolist() == ([7] if with_target else [])
    assert seen[0] == seen[1]


SPREAD = 12  # pictures, of which the site declares as many as there are


def spread(
    folder: Path, unit: Unit, *, patients: Sequence[str], num: int = SPREAD
) -> TinyFederation:
    """A federation of one site with files in a folder of its own; a table says whose they are."""
    rows = [
        f"{path.name},{patient}"
        for path, patient in zip(sorted(folder.iterdir()), patients, strict=True)
    ]
    (folder / "volumes.csv").write_text("\n".join(["file,patient", *rows]) + "\n")
    tiny = TinyFederation.create(folder.parent / "tiny", {})
    declared = {"privacy": {"unit": unit}, "training": {"min_images": num}}
    tiny.join_with(
        SILO, folder, POLICY | declared | {"data": {"kind": "pictures", "min_images": num}}
    )
    return tiny


def asking(unit: Unit, transform: dict[str, Any], num: int = SPREAD) -> dict[str, Any]:
    """The tables of a plan that asks by its transform."""
    statistics = COUNTS["statistics"] | {"unit": unit}
    return {
        "statistics": statistics,
        "partition": {"kind": "silo", "min_images": num},
        "transform": transform,
    }


def brightest(folder: Path, levels: Sequence[int]) -> list[Picture]:
    """Write pictures of 16 bits, each with one pixel of its level among darker ones."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    for number, level in enumerate(levels):
        values = rng.integers(0, 90, (20, 20)).astype(np.uint16)
        values[7, 11] = level
        Image.fromarray(values).save(folder / f"{number:02d}.png")
    return list(read_all_pictures(folder))


VALUES: dict[str, Any] = {
    "range": {"kind": "values", "low": 0.0, "high": 500.0},
    "content": {"threshold": 250 / 500},
}
PERCENTILES: dict[str, Any] = {"range": {"kind": "percentiles", "low": 99.9, "high": 100.0}}


@pytest.mark.parametrize(
    ("others", "unit"),
    [
        pytest.param(400, "image", id="threshold that one picture does not reach, image"),
        pytest.param(200, "patient", id="threshold that one picture alone reaches, patient"),
        # The other two pairs vary what these two show.
        pytest.param(400, "patient", id="does not reach, patient", marks=pytest.mark.slow),
        pytest.param(200, "image", id="alone reaches, image", marks=pytest.mark.slow),
    ],
)
def test_transform_that_takes_one_picture_or_does_not_shows_nothing(
    others: int, unit: Unit, tmp_path: Path
) -> None:
    seen = []
    patients = [f"P{number // 2}" for number in range(SPREAD)]
    patients[7] = "P99"  # who has no other picture
    for number, level in enumerate((400, 200)):
        at = [others] * SPREAD
        at[7] = level
        held = brightest(tmp_path / str(number) / "data", at)
        tiny = spread(tmp_path / str(number) / "data", unit, patients=patients)
        seen.append(observe(tiny, SILO, signed(tiny, lambda folder: None, **asking(unit, VALUES))))
        site = tiny.sites[SILO]
        blank = (site.private / "images" / LEFT_OUT).read_text().count(NOT_TAKEN)
        # the question does tell them apart, on the site alone
        assert blank == sum(position <= 250 for position in at)
        assert seen[-1].submission["num_units"] == (SPREAD if unit == "image" else 7)
        with nullcontext() if level > 250 else pytest.raises(DataError, match="threshold"):
            exactly(VALUES).apply(held[7])
    assert seen[0] == seen[1]


def exactly(transform: dict[str, Any]) -> Transform:
    return Transform(
        TransformSpec.model_validate(transform), DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
    )


def test_percentiles_that_are_equal_in_one_picture_alone_show_nothing(tmp_path: Path) -> None:
    seen = []
    for number, flat in enumerate((False, True)):
        folder = tmp_path / str(number) / "data"
        brightest(folder, [400] * SPREAD)
        if flat:
            values = np.asarray(Image.open(folder / "07.png")).copy()
            values[:3] = 400
            Image.fromarray(values).save(folder / "07.png")
        with pytest.raises(DataError, match="differ") if flat else nullcontext():
            exactly(PERCENTILES).apply(next(read_all_pictures(folder / "07.png")))
        tiny = spread(folder, "image", patients=[f"P{number}" for number in range(SPREAD)])
        seen.append(
            observe(tiny, SILO, signed(tiny, lambda folder: None, **asking("image", PERCENTILES)))
        )
        assert (NOT_TAKEN in (tiny.sites[SILO].private / "images" / LEFT_OUT).read_text()) == flat
    assert seen[0] == seen[1]


def test_number_of_slices_asks_nothing_about_the_depth_of_one_patients_volume(
    tmp_path: Path,
) -> None:
    """The card states 16 images: nine slices of the deep volume, and two of each other, would be one too many."""
    import nibabel

    seen = []
    num = 5
    transform = {"slices": {"count": 9}}
    for depth in (9, 2):
        folder = tmp_path / str(depth) / "data"
        folder.mkdir(parents=True)
        for number in range(num):
            shape = (12, 12, depth if number == 3 else 2)
            values = np.random.default_rng(number).normal(300.0, 80.0, shape).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{number}.nii")
        tiny = spread(folder, "patient", patients=[f"P{number}" for number in range(num)], num=num)
        agreed = tiny.sites[SILO].agreed()
        assert agreed is not None and agreed.images == 16
        seen.append(
            observe(
                tiny, SILO, signed(tiny, lambda folder: None, **asking("patient", transform, num))
            )
        )
        (kept,) = tiny.sites[SILO].private.glob("unpacked-*.npy")
        assert len(np.load(kept)) == 9 * num  # whatever there is to be cut
        assert seen[-1].submission["num_units"] == num
    assert seen[0] == seen[1]


def test_bounds_of_a_plan_are_answered_from_the_policy_before_any_image_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the data were opened")

    questions: dict[str, dict[str, object]] = {
        "number": {"partition": {"kind": "silo", "min_images": 40}},
        "range": {"data": {"shape": [1, 4, 4], "range": [-0.9, 0.9]}},
        "classes": {"condition": {"kind": "class", "num_classes": 2, "drop": 0.1}},
    }
    monkeypatch.setattr(stages, "load_cohort", opened)
    for number, (name, tables) in enumerate(questions.items()):
        with case(name):
            problems = []
            for with_target in (True, False):
                tiny = world(tmp_path / f"{number}{with_target}", with_target=with_target)
                site = tiny.sites[SILO]
                declared = site.policy().data.model_dump(exclude_none=True) | {"min_images": 30}
                write_policy(
                    site,
                    POLICY | {"data": declared | ({"classes": 3} if name == "classes" else {})},
                )
                plan_id = signed(tiny, lambda folder: None, **tables)
                tiny.deliver_plan(SILO, plan_id)
                problem = tiny.work(SILO, until="plan_refused").problem
                assert problem
                problems.append((problem.code, problem.message.replace(plan_id, "")))
            assert problems[0] == problems[1]
            assert problems[0][0] == 31 and "policy.toml" in problems[0][1]


def test_data_are_held_against_the_declaration_whatever_a_plan_says(tmp_path: Path) -> None:
    tiny = world(tmp_path / "tiny", with_target=False)
    site = tiny.sites[SILO]
    source = source_at(
        tmp_path / "tiny" / "data.npz", site.private / "images", site.settings().images
    )
    facts = facts_of(source)
    assert (facts.kind, facts.shape, facts.range) == ("arrays", (1, 4, 4), (-1.0, 1.0))
    wrong: dict[str, dict[str, object]] = {
        "kind": {"kind": "pictures", "shape": None},
        "shape": {"shape": [16]},
        "values: expected whole": {"range": None},
        "at least 41": {"min_images": 41},
        "classes": {"classes": 1 + 1, "shape": [1, 4, 4]},
        "outside this range": {"range": [-0.1, 0.1]},
    }
    for match, changes in wrong.items():
        with case(match):
            data = {
                name: value
                for name, value in (facts.model_dump() | changes).items()
                if value is not None
            }
            write_policy(site, POLICY | {"data": data})
            if match == "classes":
                assert check_values(source, site.policy()) == 40
                continue
            with pytest.raises(DataError, match=match):
                check_values(source, site.policy())


def test_row_that_is_not_finite_goes_to_the_first_cell_and_moves_no_other() -> None:
    centroids = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    features = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    before = NearestCentroid(centroids).find(features)
    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        spoiled = features.clone()
        spoiled[[3, 499]] = value
        after = NearestCentroid(centroids).find(spoiled)
        assert after[[3, 499]].tolist() == [0, 0]
        kept = torch.ones(500, dtype=torch.bool)
        kept[[3, 499]] = False
        assert torch.equal(after[kept], before[kept])
    assert before[[3, 499]].tolist() != [0, 0]


def test_lost_rows_are_filled_alone_or_refused() -> None:
    features = torch.arange(12.0).reshape(3, 2, 2)
    features[1, 0, 1] = torch.inf
    filled = replace_non_finite(features, 0.0, lambda: DataError("features"))
    assert torch.equal(filled[[0, 2]], features[[0, 2]]) and not filled[1].any()
    with pytest.raises(DataError):
        replace_non_finite(features, None, lambda: DataError("features"))


def test_sketch_of_an_image_that_is_not_finite_is_the_middle_of_the_ball() -> None:
    sketch = Sketch(
        torch.eye(2, 4), torch.zeros(4), 1.0, torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1)
    )
    held = torch.tensor(
        [[0.5, 0.5, 0.0, 0.0], [torch.nan, 0.0, 0.0, 0.0], [torch.inf, 1.0, 0.0, 0.0]]
    ).reshape(3, 1, 2, 2)
    assert sketch.project(held).tolist() == [[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


class Overflowing(nn.Module):
    """Overflows for an image that is bright all over."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_B: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        bright_B = (x_B.flatten(1).mean(1) > 0.9).reshape(-1, 1, 1, 1)
        return x_B * self.scale * torch.where(bright_B, torch.inf, 1.0)


@pytest.mark.parametrize("stops", [True, False])
def test_training_whose_gradient_overflows_for_one_image_goes_on_at_a_silo(
    stops: bool, tmp_path: Path
) -> None:
    held = torch.zeros(8, 1, 4, 4)
    held[3] = 100.0

    def run() -> Any:
        return train(
            Overflowing(),
            Examples(held),
            training(num_steps=30, batch_size=2),
            TrainingObjective(),
            TrainingRun(tmp_path, stops=stops),
        )

    if stops:
        with pytest.raises(NumericalError):
            run()
        return
    result = run()
    assert result.steps == 30
    assert np.isfinite(result.loss)
    assert all(torch.isfinite(value).all() for value in result.ema.values())
    assert float(result.ema["scale"]) != 1.0


def test_sum_of_losses_that_overflows_stops_no_silo() -> None:
    """Each image's is finite, and so is each gradient; of public data it is an error."""
    for stops in (False, True):
        machine = training_process(Engine(device="cpu"))
        state = TrainingState(
            nn.Linear(2, 1), training(num_steps=30, batch_size=2), machine, 1, stops=stops
        )
        for share in (1.0, torch.inf, 3e38):
            state.take_step(torch.tensor(share))
        with pytest.raises(NumericalError) if stops else nullcontext():
            assert 1.0 < state.finite_loss() <= MAX_LOSS


def test_submission_says_no_number_that_training_computed_from_the_images(sent_once) -> None:
    tiny, plan_id = sent_once
    (path,) = (tiny.sites["north"].outbox / plan_id).glob("1/silos/*/submission.json")
    sent = json.loads(path.read_bytes())
    assert {name for expert in sent["experts"] for name in expert["training"]} == {
        "seconds",
        "flops",
    }
