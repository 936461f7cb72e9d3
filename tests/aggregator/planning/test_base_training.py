"""A base that is trained on public images: resumed to the byte, with a card, and then the start of a plan's experts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from aggregator.intake.examination import public_images
from aggregator.planning import base_training
from aggregator.planning.base_training import BaseImages, check_base_folder, train_base
from aggregator.planning.recipe import Recipe
from ddm.errors import SetupError
from ddm.io.tensors import load_tensors
from ddm.planning.bases import BaseSpace, open_base
from ddm.planning.trained_base import TrainedBaseCard, images_digest
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import sha256_file
from ddm.protocol.bases import TrainedBase
from ddm.protocol.latent import IdentityLatent
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder
from ddm.training.progress import Progress
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, TinyFederation, images, recipe

TRAINING = {
    "num_steps": 12,
    "batch_size": 8,
    "ema_decay": 0.5,
    "precision": "fp32",
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mmdit": {"kind": "mmdit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2},
    "unet": {
        "kind": "unet",
        "channels": [8, 8],
        "attention": [False, False],
        "num_res_blocks": 1,
        "head_channels": 8,
        "norm_groups": 4,
    },
}
SETTINGS = TrainingSettings(device="cpu")


def table(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {"kind": "trained", "folder": str(folder), "licence": "CC0-1.0", "training": TRAINING}
    return base | changes


def base_images(num: int = 30, seed: int = 0) -> BaseImages:
    x_0 = torch.from_numpy(images(num, 0.0, seed=seed))
    return BaseImages(x_0, None, IdentityLatent(), None, NoCondition(), images_digest(x_0))


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
    with pytest.raises(SetupError) as caught:
        train(chosen, base_images(seed=1))
    assert "images_digest" in (caught.value.got or "")


def test_job_that_was_left_beside_a_finished_base_is_removed(tmp_path: Path) -> None:
    """The fault: a process that was killed after it wrote the card left copies of the images for good."""
    chosen = recipe(base=table(tmp_path / "base"))
    card = train(chosen, base_images())
    (tmp_path / "base" / "job" / "checkpoints").mkdir(parents=True)
    assert train(chosen, base_images()) == card
    assert not (tmp_path / "base" / "job").exists()


def folder_of_notes(folder: Path) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text("mine", "utf-8")
    (folder / "notes.txt").write_text("mine", "utf-8")
    return folder


def folder_of_a_page(folder: Path) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text("mine", "utf-8")
    return folder


def file_in_its_place(path: Path) -> Path:
    path.write_text("mine", "utf-8")
    return path


@pytest.mark.parametrize("make", [folder_of_notes, folder_of_a_page, file_in_its_place])
def test_folder_of_something_else_is_refused_for_a_base(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """The fault: `folder = "."` replaced the README.md of the operator's own folder."""
    chosen = recipe(base=table(make(tmp_path / "mine")))
    with pytest.raises(SetupError) as caught:
        check_base_folder(chosen)
    assert "base.folder" in caught.value.subject


def test_folder_of_a_base_is_not_refused_whether_it_is_new_begun_or_finished(
    tmp_path: Path,
) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    check_base_folder(chosen)
    with pytest.raises(KeyboardInterrupt):
        train(chosen, base_images(), stop_after=1)
    check_base_folder(chosen)
    train(chosen, base_images())
    # Killed between the page and the card; and then with something that was added to the finished base.
    card = (tmp_path / "base" / "base.json").read_bytes()
    (tmp_path / "base" / "base.json").unlink()
    check_base_folder(chosen)
    (tmp_path / "base" / "base.json").write_bytes(card)
    (tmp_path / "base" / "LICENSE").write_text("CC0-1.0", "utf-8")
    check_base_folder(chosen)


@pytest.mark.parametrize(
    ("base", "options", "words"),
    [
        ({"licence": "CC-BY-NC-4.0"}, (), "licence of the releases"),
        ({"folder": "."}, (), "base.folder"),
        ({}, ("--launcher", "srun {folder}", "--jobs", "jobs"), "found:    jobs must be"),
    ],
)
def test_command_refuses_before_it_reads_images_what_could_not_become_a_plans_base(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: dict[str, Any],
    options: tuple[str, ...],
    words: str,
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["base"] = table(tmp_path / "base") | base
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    monkeypatch.chdir(tmp_path)
    command = ["aggregator", "base", tiny.federation.path, "--recipe", chosen]
    # There are no such images.
    refused = run_command(*command, "--public", tmp_path / "missing.npz", *options)
    assert refused.code == SetupError.exit_code
    assert words in refused.err


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("licence", {"base": {"licence": "MIT"}}),
        ("source", {"base": {"source": "other pictures"}}),
        ("objective", {"objective": {"prediction": "v", "path": "cosine_vp"}}),
        ("t_distribution", {"t_distribution": {"kind": "uniform"}}),
        ("range", {"data": {"shape": [1, 4, 4], "range": [0.0, 1.0]}}),
        ("training", {"base": {"training": TRAINING | {"num_steps": 13}}}),
    ],
)
def test_finished_base_of_another_recipe_is_refused_by_the_field_that_differs(
    tmp_path: Path, field: str, changes: dict[str, Any]
) -> None:
    train(recipe(base=table(tmp_path / "base")), base_images())
    base = table(tmp_path / "base", **changes.get("base", {}))
    with pytest.raises(SetupError) as caught:
        train(recipe(**changes | {"base": base}), base_images())
    assert field in (caught.value.got or "")


def test_finished_base_of_another_condition_is_refused(tmp_path: Path) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    train(chosen, base_images())
    with pytest.raises(SetupError) as caught:
        train(chosen, replace(base_images(), condition=ClassCondition(num_classes=2)))
    assert "condition" in (caught.value.got or "")


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


def test_trained_base_is_refused_for_experts_with_another_number_of_heads(tmp_path: Path) -> None:
    """All tensors of the two networks have the same names and shapes."""
    chosen = recipe(base=table(tmp_path / "base"))
    train(chosen, base_images())
    described = chosen.expert.model_dump(mode="json", exclude_none=True)
    described["architecture"]["heads"] *= 2
    described.pop("adaptation")
    space = BaseSpace(IdentityLatent(), None, NoCondition(), (-1.0, 1.0))
    with pytest.raises(SetupError) as caught:
        open_base(recipe(base=table(tmp_path / "base"), expert=described), (1, 4, 4), space, None)
    assert caught.value.subject == "recipe, expert.architecture.heads"


@pytest.mark.slow
def test_base_is_trained_by_two_processes_as_experts_are(tmp_path: Path) -> None:
    chosen = recipe(base=table(tmp_path / "base"))
    settings = TrainingSettings(device="cpu", processes=2)
    card = train(chosen, base_images(), settings=settings)
    assert card.steps == TRAINING["num_steps"]


def test_jobs_of_two_bases_of_the_same_images_have_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: on a cluster, the second base would go on from the checkpoint of the first one."""
    folders = []

    def note_folder(task: object, job: JobFolder, *_: object, **__: object) -> None:
        folders.append(job.path)
        raise KeyboardInterrupt

    monkeypatch.setattr(base_training, "train_job", note_folder)
    jobs = tmp_path / "jobs"
    launcher = "srun train {folder} {processes}"
    settings = TrainingSettings(device="cpu", launcher=launcher, jobs=jobs)
    longer = TRAINING | {"num_steps": 24}
    for name, training in (("first", TRAINING), ("second", longer), ("first", TRAINING)):
        chosen = recipe(base=table(tmp_path / name, training=training))
        with pytest.raises(KeyboardInterrupt):
            train(chosen, base_images(), settings=settings)
    assert {folder.parent for folder in folders} == {jobs}
    # The same base finds its own folder again.
    assert folders[0] == folders[2] != folders[1]


@pytest.mark.parametrize(("kind", "has_texts"), [("mmdit", True), ("mmdit", False), ("unet", True)])
def test_base_is_refused_before_anything_is_opened_for_an_architecture_that_it_cannot_have(
    tmp_path: Path, kind: str, has_texts: bool
) -> None:
    """The fault: a unet was trained for hours, and no plan could add the layers that read a text."""
    tiny = TinyFederation.create(tmp_path / "tiny", {})
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["expert"]["architecture"] = ARCHITECTURES[kind]
    described["base"] = table(tmp_path / "base", training=TRAINING | {"learning_rate": 0.001})
    if has_texts:
        # There is no such encoder, and there are no such images.
        described["condition"] = {"kind": "text", "encoder": "missing", "max_tokens": 2}
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    words = ["aggregator", "base", tiny.federation.path, "--recipe", chosen]
    refused = run_command(*words, "--public", tmp_path / "missing.npz")
    assert refused.code == SetupError.exit_code
    assert "recipe, expert.architecture" in refused.err
    assert "a base is trained without texts" in refused.err
    assert f"found:    {kind}, " in refused.err
    assert "Choose a dit" in refused.err


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
    described["expert"]["architecture"] = ARCHITECTURES["unet"]
    training = TRAINING | {"learning_rate": 0.001} | change
    stated = {name: value for name, value in training.items() if value is not None}
    described["base"] = table(tmp_path / "base", training=stated)
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    # There are no such images: the recipe is refused before they are looked for.
    words = ["aggregator", "base", tiny.federation.path, "--recipe", chosen]
    refused = run_command(*words, "--public", tmp_path / "missing.npz")
    assert refused.code == SetupError.exit_code
    # The words of our check, without what pydantic puts before them.
    assert f"found:    {field}" in refused.err


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


def files_of_operator(folder: Path) -> tuple[Path, Path]:
    """Write 240 public images of two kinds, and the passphrase of the federation; return both paths."""
    public = folder / "public.npz"
    centres = [images(120, centre, seed=90) for centre in (-0.5, 0.5)]
    np.savez(public, images=np.concatenate(centres))
    secret = folder / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    return public, secret


def test_plan_starts_from_a_base_only_if_it_holds_out_the_same_public_images(
    tmp_path: Path,
) -> None:
    """Otherwise the base could have learned the images that judge routers and experts."""
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 60})
    public, secret = files_of_operator(tmp_path)
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["base"] = table(tmp_path / "base", source="made pictures")
    chosen = tmp_path / "plan.toml"

    def run(command: str, *options: object) -> Any:
        chosen.write_bytes(tomli_w.dumps(described).encode())
        words = ["aggregator", command, tiny.federation.path, "--recipe", chosen, "--public"]
        return run_command(*words, *(options or (public,)))

    plan_options = (public, "--passphrase-file", secret, "--yes")
    trained = run("base", public, "--device", "cpu")
    assert trained.code == 0, trained.err

    described["public"]["seed"] = 1
    refused = run("plan", *plan_options)
    assert refused.code == SetupError.exit_code
    assert "public images" in refused.err and "public.seed" in refused.err
    described["public"]["seed"] = 0
    described["base"]["licence"] = "MIT"
    refused = run("plan", *plan_options)
    assert refused.code == SetupError.exit_code and "base.licence" in refused.err
    described["base"]["licence"] = "CC0-1.0"

    signed = run("plan", *plan_options)
    assert signed.code == 0, signed.err
    # The source is in the plan, and the person who signs it is shown it.
    assert "made pictures" in signed.out
    plan, _ = tiny.federation.current_plan()
    assert plan.base is not None and plan.base.source == "made pictures"
    # A later plan that carries experts over compares the images that this plan keeps.
    card = TrainedBaseCard.parse((tmp_path / "base" / "base.json").read_bytes(), subject="card")
    kept = public_images(tiny.federation, plan.plan_id, "fitted", as_latents=False)
    assert images_digest(kept) == card.public_digest


def test_plan_of_unets_starts_from_a_base_of_a_unet(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 60})
    public, secret = files_of_operator(tmp_path)
    described = recipe().model_dump(mode="json", exclude_none=True)
    described["expert"]["architecture"] = ARCHITECTURES["unet"]
    training = TRAINING | {"num_steps": 4, "learning_rate": 0.001}
    described["base"] = table(tmp_path / "base", training=training)
    chosen = tmp_path / "plan.toml"
    chosen.write_bytes(tomli_w.dumps(described).encode())
    words = [tiny.federation.path, "--recipe", chosen, "--public", public]
    trained = run_command("aggregator", "base", *words, "--device", "cpu")
    assert trained.code == 0, trained.err
    signed = run_command("aggregator", "plan", *words, "--passphrase-file", secret, "--yes")
    assert signed.code == 0, signed.err

    plan, _ = tiny.federation.current_plan()
    assert plan.base is not None
    # A quarter of the 240 public images is held out to judge routers and experts.
    assert (plan.base.num_images, plan.base.changes) == (180, ())
    weights = load_tensors(tmp_path / "base" / "base.safetensors", None, max_bytes=1 << 20)
    sent_path = tiny.federation.plan_targets(plan.plan_id) / "plan/base.safetensors"
    sent = load_tensors(sent_path, None, max_bytes=1 << 20)
    assert sent.keys() == weights.keys()
    assert all(torch.equal(sent[name], weights[name]) for name in weights)
    # A fresh network answers 0 whatever it is given; training has changed its last layer.
    assert bool(sent["net.out.2.conv.weight"].any())
