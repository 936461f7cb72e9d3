"""From a hospital's captions to a researcher's prompt, in one process; and what becomes of captions on the way."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from aggregator.planning.recipe import Recipe
from ddm import open_ensemble
from ddm.cli.main import app
from ddm.encoders.text import TextEncoder
from ddm.errors import DataError, DigestError, MathError, SetupError
from ddm.io.settings import save_settings
from ddm.io.tensors import load_tensors
from ddm.loading.release import open_release
from ddm.models import build_expert
from ddm.protocol.architecture import Mmdit, TextCondition
from ddm.protocol.data import DataSpec
from ddm.sampling.options import SamplingOptions
from silo.config import Policy, TextSettings
from silo.data.captions import keep_texts, some_texts, texts_of
from silo.data.cohort import Cohort, dataset_digest
from silo.data.latents import training_inputs
from silo.plan.acceptance import load_accepted
from silo.plan.workspace import Workspace
from silo.worker.stages import read_assignment
from silo.worker.training import SiloTraining, conditions_of, train_experts
from silo.worker.worker import Worker
from tests.faults.test_disk_full import small_disk
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject
from tests.support.federation import POLICY, TinyFederation, recipe, write_policy
from tests.support.text_encoders import DIM, make_encoder, save_encoder

SPEC = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
IMAGES = np.linspace(-1, 1, 4 * 16, dtype=np.float32).reshape(4, 1, 4, 4)
SECRET = "secret"  # a word of the tokenizer that one caption has, and that must not be found in anything that leaves
PROMPTS = ("bright right", "bright left")
L = 6
TRAINING = {
    # After 100 steps the drawn images were far from all public ones in 1 of 40 trainings, and screening said so.
    "num_steps": 300,
    "batch_size": 16,
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "ema_decay": 0.95,
    "schedule": "constant",
    "precision": "fp32",
}
COUNTS = {
    "unit": "image",
    "total": {"epsilon": 8.0, "delta": 0.0},
    "counts": {"epsilon": 4.0, "num_groups": 4},
}


def load(path: Path, captions: object, **options: Any) -> Cohort:
    arrays = {"images": IMAGES} | ({} if captions is None else {"captions": captions})
    np.savez(path / "a.npz", **arrays)  # type: ignore[arg-type]
    request: dict[str, Any] = {
        "min_images": 1,
        "salt": b"s" * 32,
        "unit": "image",
        "num_classes": None,
    }
    return cohort_at(path / "a.npz", SPEC, captions=True, **(request | options))


def with_captions(path: Path, silo_ids: dict[str, int], folder: Path) -> TinyFederation:
    """A federation whose silos have a caption for nearly each image, and the encoder in `folder`."""
    tiny = TinyFederation.create(path, silo_ids)
    for silo_id, site in tiny.sites.items():
        data = path / f"{silo_id}.npz"
        with np.load(data) as archive:
            images = archive["images"]
            labels = archive["labels"]
        captions = [PROMPTS[label] for label in labels]
        captions[:4] = ["", SECRET, "nan", f"{captions[3]} " * L]
        np.savez(data, images=images, captions=np.array(captions))
        write_policy(
            site,
            POLICY
            | {"data": {"kind": "arrays", "shape": [1, 4, 4], "range": [-1, 1], "captions": True}},
        )
        settings = site.settings().model_copy(update={"text": TextSettings(encoder=str(folder))})
        save_settings(settings, site.path / "silo.toml", "test")
    return tiny


def asking(folder: Path) -> Recipe:
    architecture = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
    return recipe(
        condition={"kind": "text", "encoder": str(folder), "max_tokens": L, "drop": 0.1},
        expert={"architecture": architecture, "training": TRAINING},
        statistics=COUNTS,
        router={"kind": "counts"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(
        tmp_path_factory.mktemp("encoders") / "tiny-t5", make_encoder("T5EncoderModel")
    )


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """A federation of experts told texts, published in its folder `release`."""
    path = tmp_path_factory.mktemp("texts")
    tiny = with_captions(path, {"east": 40, "north": 70}, folder)
    tiny.complete(path / "release", asking(folder))
    return tiny


def cohort_of(tiny: TinyFederation, silo_id: str) -> Cohort:
    """What the silo's worker reads of its data."""
    site = tiny.sites[silo_id]
    request: dict[str, Any] = {
        "min_images": 1,
        "salt": site.salt(),
        "unit": "image",
        "num_classes": None,
    }
    return cohort_at(tiny.path / f"{silo_id}.npz", SPEC, captions=True, **request)


def bright_left(images: torch.Tensor) -> torch.Tensor:
    """By how much the left column is brighter than the right one."""
    return (images[..., 0] - images[..., -1]).mean((1, 2))


def command(tiny: TinyFederation, out: Path, *words: object) -> tuple[str, BaseException | None]:
    arguments = (
        tiny.path / "release",
        "--root",
        tiny.root,
        "--state",
        out.parent / "state",
        "--out",
        out,
        *words,
    )
    result = CliRunner().invoke(app, ["sample", *map(str, arguments)])
    return result.output, result.exception


def test_captions_are_read_from_text_and_bytes_and_blank_where_there_is_none(
    tmp_path: Path,
) -> None:
    texts = ["no  finding\n", "nan", "", "Pleuraerguß links"]
    wanted = ("no finding", "", "", "Pleuraerguß links")
    assert load(tmp_path, texts).captions == wanted
    assert load(tmp_path, np.array([text.encode() for text in texts])).captions == wanted


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        (None, "captions"),
        (["secret"] * 3, "shape"),
        (["", "nan", "None", " "], "only blank"),
        (["secret", "x" * 4097, "", ""], "at most"),
        (["secret" * 4000, "", "", ""], "at most"),
        ([b"secret \xff", b"", b"", b""], "UTF-8"),
        (["secret \ud800", "", "", ""], "UTF-8"),
        ([1, 2, 3, 4], "text"),
        (np.array(["secret", None, "b", "c"], dtype=object), "pickled"),
    ],
    ids=[
        "missing",
        "too few",
        "blank",
        "long",
        "huge",
        "no UTF-8",
        "surrogate",
        "numbers",
        "objects",
    ],
)
def test_captions_that_cannot_be_used_are_refused_without_saying_what_they_say(
    tmp_path: Path, captions: object, said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load(tmp_path, captions)
    assert "secret" not in f"{caught.value} {caught.value.remedy}"


def test_digest_covers_captions_and_a_cohort_that_is_printed_holds_none(tmp_path: Path) -> None:
    cohort = load(tmp_path, ["secret", "b", "c", "d"])
    digests = {
        cohort.digest,
        load(tmp_path, ["secret", "b", "c", "e"]).digest,
        load(tmp_path, ["secret", "bc", "", "d"]).digest,
    }
    assert len(digests) == 3 and dataset_digest(cohort.images, b"s" * 32) not in digests
    assert "secret" not in repr(cohort)


def test_image_that_was_asked_for_in_words_is_drawn_from_a_published_release(
    published: TinyFederation, folder: Path
) -> None:
    ensemble = open_ensemble(published.path / "release", root=published.root)
    assert isinstance(ensemble.condition, TextCondition)
    encoder = TextEncoder.open(folder, ensemble.condition)

    def share_of_bright_left(prompt: str | None) -> float:
        condition = None
        guidance = 0.0
        options = SamplingOptions()
        if prompt is not None:
            condition = encoder.encode([prompt])[0]
            guidance = 1.0
            options = SamplingOptions(condition_prior=ensemble.prior)
        images = ensemble.sample(
            64,
            strategy="full",
            steps=8,
            seed=0,
            condition=condition,
            guidance=guidance,
            options=options,
        ).images
        return float((bright_left(images) > 0).float().mean())

    assert share_of_bright_left("bright left") > 0.9
    assert share_of_bright_left("bright right") < 0.1
    assert 0.2 < share_of_bright_left(None) < 0.8, "without a text both are drawn"
    with pytest.raises(MathError, check=has_subject("condition_prior")):
        ensemble.sample(2, condition=encoder.encode(["bright left"])[0])


def test_command_draws_the_same_images_for_the_same_prompt_and_others_for_another(
    published: TinyFederation, folder: Path, tmp_path: Path
) -> None:
    def drawn(prompt: str) -> np.ndarray:
        flags = (
            "--num",
            4,
            "--steps",
            2,
            "--text",
            prompt,
            "--text-encoder",
            folder,
            "--guidance",
            1,
        )
        output, ended = command(published, tmp_path / "a.npz", *flags)
        assert ended is None, output
        assert "No release states who holds images of this text" in output
        assert ("longer than 6 tokens" in output) == (len(prompt.split()) > 5)
        with np.load(tmp_path / "a.npz") as archive:
            return np.asarray(archive["images"])

    one = drawn("bright left")
    assert np.array_equal(one, drawn("bright left"))
    assert not np.allclose(one, drawn("bright right"), atol=1e-2)
    drawn("bright left bright left bright left")


def test_prompt_is_refused_with_another_encoder_than_the_pinned_one(
    published: TinyFederation, tmp_path: Path
) -> None:
    other = save_encoder(tmp_path / "other", make_encoder("T5EncoderModel", seed=1))
    flags = ("--num", 2, "--text", "bright left", "--text-encoder", other)
    _, ended = command(published, tmp_path / "a.npz", *flags)
    assert isinstance(ended, DigestError) and "tiny-t5, model.safetensors" in ended.subject
    assert not (tmp_path / "a.npz").exists()


def test_no_caption_and_no_vector_of_one_is_in_anything_that_leaves(
    published: TinyFederation,
) -> None:
    left = [
        file for silo_id in published.sites for file in published.sites[silo_id].outbox.rglob("*")
    ]
    left += list((published.path / "release").rglob("*")) + list(
        (published.federation.accepted).rglob("*")
    )
    contents = [file.read_bytes() for file in left if file.is_file()]
    assert len(contents) > 10
    words = [prompt.encode() for prompt in (*PROMPTS, SECRET)]
    assert not any(word in content for word in words for content in contents)
    kept = next(published.sites["east"].private.glob("texts-*.npy"))
    vector = np.load(kept)[1, 0].tobytes()
    assert vector.strip(b"\0") and not any(vector in content for content in contents)
    plan = open_release(published.path / "release", root=published.root, state=None).plan
    assert {file.path for file in plan.files} == {
        "plan/centroids.safetensors",
        "plan/encoder.safetensors",
        "plan/sketch.safetensors",
    }, "the text encoder itself does not travel"


def test_captions_are_encoded_once_go_on_where_they_stopped_and_belong_to_one_data_set(
    published: TinyFederation, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = published.sites["north"]
    kept = [np.load(path) for path in site.private.glob("texts-*")]
    assert [text.shape for text in kept] == [(70, L, DIM)]
    state = published.state_of("north")
    plan = load_accepted(site, str(state.plan_id), str(state.plan_digest)).plan
    assert isinstance(plan.condition, TextCondition)
    cohort = cohort_of(published, "north")
    calls: list[tuple[int, int]] = []

    def stop_once(num_done: int, total: int) -> None:
        calls.append((num_done, total))
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_texts(cohort, plan, site.settings(), tmp_path, stop_once)
    with pytest.raises(DataError, check=has_subject("captions")):
        texts_of(cohort, plan, tmp_path)
    for _ in range(2):
        keep_texts(cohort, plan, site.settings(), tmp_path, stop_once)
    assert calls == [(64, 70), (70, 70)]
    assert caplog.messages == ["Captions cut to 6 tokens: 1"]
    vectors = texts_of(cohort, plan, tmp_path)
    assert vectors is not None and np.array_equal(vectors.numpy(), kept[0])
    wanted = TextEncoder.open(folder, plan.condition).encode(cohort.captions or ())
    torch.testing.assert_close(vectors, wanted)
    assert [bool(row.any()) for row in vectors[:4]] == [False, True, False, True], (
        "blank captions are no text"
    )
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]
    changed = replace(cohort, digest="0" * 64)
    with pytest.raises(DataError, check=has_subject("captions")):
        texts_of(changed, plan, tmp_path)
    keep_texts(changed, plan, site.settings(), tmp_path, lambda num_done, total: None)
    assert len(list(tmp_path.iterdir())) == 1, "those of the other data set are gone"


def test_texts_of_a_part_of_the_images_take_neither_memory_nor_room_for_padding(
    tmp_path: Path,
) -> None:
    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    text_NLD = torch.zeros(400, 100, 400)  # 64 MB of which one page each is touched
    text_NLD[:, :2] = torch.arange(1.0, 401)[:, None, None]
    text_NLD[7] = 0.0
    chosen = torch.tensor([3, 7, *range(100, 399)])
    before = anonymous()
    vectors = some_texts(text_NLD, chosen, tmp_path / "new")
    took = anonymous() - before
    assert took < vectors.nbytes / 4
    assert torch.equal(vectors, text_NLD[chosen])
    assert not list((tmp_path / "new").iterdir()), "its file has no name"


def test_expert_of_some_images_is_told_their_texts_and_one_of_all_reads_the_file_itself(
    published: TinyFederation, tmp_path: Path
) -> None:
    site = published.sites["north"]
    state = published.state_of("north")
    plan = load_accepted(site, str(state.plan_id), str(state.plan_digest)).plan
    cohort = training_inputs(cohort_of(published, "north"), plan, site.private)
    text_NLD = cohort.text_NLD
    assert (
        text_NLD is not None and conditions_of(plan, cohort, torch.arange(70), tmp_path) is text_NLD
    )
    some = conditions_of(plan, cohort, torch.tensor([0, 1, 69]), tmp_path)
    assert (
        some is not None
        and torch.equal(some, text_NLD[[0, 1, 69]])
        and not torch.equal(some[1], some[2])
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_full_disk_while_captions_are_encoded_is_an_error_and_not_the_end_of_the_process(
    published: TinyFederation, tmp_path: Path
) -> None:
    site = published.sites["north"]
    state = published.state_of("north")
    plan = load_accepted(site, str(state.plan_id), str(state.plan_digest)).plan
    (private := tmp_path / "private").mkdir()
    with (
        small_disk(private, 2 * os.sysconf("SC_PAGE_SIZE")),
        pytest.raises(OSError, match="No space left"),
    ):
        keep_texts(
            cohort_of(published, "north"),
            plan,
            site.settings(),
            private,
            lambda num_done, total: None,
        )


def test_mmdit_learns_from_captions_as_well(
    published: TinyFederation, folder: Path, tmp_path: Path
) -> None:
    site = published.sites["east"]
    state = published.state_of("east")
    accepted = load_accepted(site, str(state.plan_id), str(state.plan_digest))
    plan = accepted.plan
    joint = Mmdit(patch=2, hidden=16, depth=1, heads=2)
    training = plan.expert.training.model_copy(update={"num_steps": 60})
    expert = plan.expert.model_copy(update={"architecture": joint, "training": training})
    mmdit_plan = plan.model_copy(update={"expert": expert})
    work = Workspace(tmp_path)
    work.expert_path("east").parent.mkdir(parents=True)
    cohort = cohort_of(published, "east")
    files = accepted.files()
    silo_training = SiloTraining(
        plan=mmdit_plan,
        files=files,
        cohort=training_inputs(cohort, plan, site.private),
        fine_N=read_assignment(cohort, files, site.private / "cohort.parquet"),
        work=work,
        policy=Policy(),
        silo_id="east",
    )
    train_experts(silo_training, on_progress=lambda progress: None, should_stop=lambda: False)
    trained = build_expert(joint, plan.expert_shape, condition=plan.condition)
    trained.load_state_dict(load_tensors(work.expert_path("east"), None, max_bytes=1 << 24))
    encoder = TextEncoder.open(folder, plan.condition)  # type: ignore[arg-type]
    x_B = torch.zeros(1, 1, 4, 4)
    t_B = torch.full((1,), 0.9)
    with torch.inference_mode():
        right, left = (
            bright_left(-trained(x_B, t_B, encoder.encode([prompt]))) for prompt in PROMPTS
        )
    assert float(left) > float(right) + 0.1, (
        "the way from noise to data leads to what the text says"
    )


def test_site_without_captions_without_the_encoder_or_with_another_refuses_before_anything_is_debited(
    folder: Path, tmp_path: Path
) -> None:
    tiny = with_captions(tmp_path, {"east": 60}, folder)
    site = tiny.sites["east"]
    data = tmp_path / "east.npz"
    tiny.deliver_plan("east", tiny.sign(asking(folder)))
    tiny.work("east", until="plan_accepted")
    settings = site.settings()
    whole = data.read_bytes()
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(
        "{}" + " " * ((folder / "config.json").stat().st_size - 2)
    )

    def scanned(encoder: Path | None) -> None:
        text = TextSettings(encoder=str(encoder)) if encoder else None
        save_settings(settings.model_copy(update={"text": text}), site.path / "silo.toml", "test")
        worker = Worker(site, tiny.key("east"), lambda state: None)
        worker.begin()
        worker.step()

    with pytest.raises(SetupError, check=has_subject("text encoder")):
        scanned(None)
    with pytest.raises(DigestError, check=has_subject("text encoder tiny-t5, config.json")):
        scanned(tmp_path / "other")
    with np.load(data) as archive:
        images = archive["images"]
    np.savez(data, images=images)
    with pytest.raises(DataError, check=has_subject("captions")):
        scanned(folder)
    assert site.ledger_path.read_bytes() == b"" and tiny.state_of("east").state == "plan_accepted"
    data.write_bytes(whole)
    scanned(folder)
    assert tiny.state_of("east").state == "scanned"
