"""A base that is trained on public images: resumed to the byte, with a card, and then the start of a plan's experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from aggregator.planning.base_training import BaseImages, train_base
from aggregator.planning.recipe import Recipe
from ddm.errors import SetupError
from ddm.io.tensors import load_tensors
from ddm.planning.bases import BaseSpace, open_base
from ddm.planning.trained_base import TrainedBaseCard
from ddm.protocol.architecture import NoCondition
from ddm.protocol.base import sha256_file
from ddm.protocol.bases import TrainedBase
from ddm.protocol.latent import IdentityLatent
from ddm.training.config import TrainingSettings
from ddm.training.progress import Progress
from tests.support.commands import run_command
from tests.support.federation import TinyFederation, images, recipe

TRAINING = {
    "num_steps": 12,
    "batch_size": 8,
    "ema_decay": 0.5,
    "precision": "fp32",
}
SETTINGS = TrainingSettings(device="cpu")


def table(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {"kind": "trained", "folder": str(folder), "licence": "CC0-1.0", "training": TRAINING}
    return base | changes


def base_images(num: int = 30, seed: int = 0) -> BaseImages:
    x_0 = torch.from_numpy(images(num, 0.0, seed=seed))
    return BaseImages(x_0, None, IdentityLatent(), None, NoCondition())


def train(
    chosen: Recipe, learned: BaseImages, stop_after: int | None = None, **options: Any
) -> TrainedBaseCard:
    last_step = 0

    def note(progress: Progress) -> None:
        nonlocal last_step
        last_step = progress.step

    def should_stop() -> bool:
        return stop_after is not None and last_step >= stop_after

    return train_base(
        chosen,
        learned,
        "f" * 64,
        options.get("settings", SETTINGS),
        on_progress=note,
        should_stop=should_stop,
    )


def test_interrupted_base_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole = recipe(base=table(tmp_path / "whole"))
    train(whole, base_images())
    stopped = recipe(base=table(tmp_path / "stopped"))
    with pytest.raises(KeyboardInterrupt):
        train(stopped, base_images(), stop_after=1)
    assert not (tmp_path / "stopped" / "base.json").exists()
    card = train(stopped, base_images())
    assert card.steps == TRAINING["num_steps"]
    digests = {
        name: sha256_file(tmp_path / name / "base.safetensors") for name in ("whole", "stopped")
    }
    assert digests["whole"] == digests["stopped"] == card.file.digest
    assert not (tmp_path / "stopped" / "job" / "checkpoints").exists()


def test_finished_base_is_not_trained_again_and_one_of_other_images_is_refused(
    tmp_path: Path,
) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    card = train(chosen, base_images())
    assert train(chosen, base_images()) == card
    with pytest.raises(SetupError):
        train(chosen, base_images(seed=1))


def test_plan_states_that_its_base_was_trained_on_public_images(tmp_path: Path) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    card = train(chosen, base_images())
    space = BaseSpace(IdentityLatent(), None, NoCondition(), (-1.0, 1.0))
    opened = open_base(chosen, (1, 4, 4), space, None)
    assert opened is not None
    stated = opened.describe("0" * 64, IdentityLatent())
    assert stated.origin == TrainedBase(digest=card.file.digest, images_digest=card.images_digest)
    assert (stated.licence, stated.num_images, stated.changes) == ("CC0-1.0", 30, ())
    trained = load_tensors(tmp_path / "base" / "base.safetensors", None, max_bytes=1 << 20)
    assert all(torch.equal(opened.tensors[name], trained[name]) for name in trained)
    # The base itself has the full rate, the experts that start from it have half of it.
    described = recipe().model_dump(mode="json", exclude_none=True)["expert"]
    described["training"].pop("learning_rate")
    experts = recipe(base=table(tmp_path / "base"), expert=described).expert.training
    assert card.training.learning_rate == 0.5 / 16
    assert experts.learning_rate == card.training.learning_rate / 2


@pytest.mark.slow
def test_base_is_trained_by_two_processes_as_experts_are(tmp_path: Path) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    settings = TrainingSettings(device="cpu", processes=2)
    card = train(chosen, base_images(), settings=settings)
    assert card.steps == TRAINING["num_steps"]


def test_command_trains_a_base_with_classes_and_names_the_next_one(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    public = tmp_path / "public.npz"
    np.savez(public, images=images(120, 0.0, seed=90), labels=np.arange(120) % 2)
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["condition"] = {"kind": "class", "num_classes": 2}
    described["base"] = table(tmp_path / "base")
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    words = ["aggregator", "base", tiny.federation.path, "--recipe", chosen, "--public", public]
    done = run_command(*words, "--device", "cpu")
    assert done.code == 0, done.err
    assert "aggregator plan" in done.out
    page = (tmp_path / "base" / "README.md").read_text("utf-8")
    assert "license: " in page and "cc0-1.0" in page
    # A quarter of the public images is held out to judge routers and experts.
    assert "90 public images" in page
    tensors = load_tensors(tmp_path / "base" / "base.safetensors", None, max_bytes=1 << 20)
    assert tensors["classes.table.weight"].shape == (3, 16)

    described.pop("base")
    chosen.write_bytes(tomli_w.dumps(described).encode())
    refused = run_command(*words)
    assert refused.code == SetupError.exit_code and "base.kind" in refused.err
    described["base"] = table(tmp_path / "other")
    chosen.write_bytes(tomli_w.dumps(described).encode())
    refused = run_command(*words, "--launcher", "srun train")
    assert refused.code == SetupError.exit_code and "{folder}" in refused.err


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"learning_rate": None}, "base.training.learning_rate"),
        ({"mask_ratio": 0.5}, "base.training.mask_ratio"),
    ],
)
def test_command_names_what_the_training_of_a_unet_lacks_before_it_reads_images(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["expert"]["architecture"] = {
        "kind": "unet",
        "channels": [8, 8],
        "attention": [False, False],
        "head_channels": 8,
        "norm_groups": 4,
    }
    training = TRAINING | {"learning_rate": 0.001} | change
    stated = {name: value for name, value in training.items() if value is not None}
    described["base"] = table(tmp_path / "base", training=stated)
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    # There are no such images: the recipe is refused before they are looked for.
    words = ["aggregator", "base", tiny.federation.path, "--recipe", chosen]
    refused = run_command(*words, "--public", tmp_path / "missing.npz")
    assert refused.code == SetupError.exit_code
    assert field in refused.err


def test_base_of_a_patch_that_does_not_divide_the_images_is_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    public = tmp_path / "public.npz"
    np.savez(public, images=images(120, 0.0, seed=90))
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["expert"]["architecture"]["patch"] = 3
    described["base"] = table(tmp_path / "base")
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    words = ["aggregator", "base", tiny.federation.path, "--recipe", chosen, "--public", public]
    refused = run_command(*words, "--device", "cpu")
    assert refused.code == SetupError.exit_code and "expert.architecture" in refused.err
