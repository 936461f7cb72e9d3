"""A student of a published release whose experts work on latents and know classes: made, loaded, and sampled from."""

import json
import os
import shutil
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm import load_student, open_ensemble
from ddm.cli.main import app
from ddm.distillation.student import (
    RECORD_SUFFIX,
    OwnSamples,
    Student,
    StudentOrigin,
    autoencoder_beside,
)
from ddm.encoders.autoencoder import build_autoencoder
from ddm.encoders.text import TextEncoder, pin
from ddm.errors import (
    DataError,
    DigestError,
    DocumentError,
    MathError,
    MissingFileError,
    SetupError,
)
from ddm.evaluation import evaluate
from ddm.evaluation.classifier import train_classifier
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition, Dit, NoCondition, TextCondition
from ddm.protocol.base import File
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import AutoencoderKlLatent, AutoencoderSize
from ddm.protocol.learning import Training, UniformT
from ddm.system.console import EXIT_TERMINATED, run_app
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, recipe
from tests.support.text_encoders import make_encoder, save_encoder

SIZE = AutoencoderSize(
    channels=(8, 8), attention=(False, False), latent_channels=3, num_res_blocks=1, norm_groups=4
)
PIXELS = (1, 4, 4)
SEEN = (3, 2, 2)
RANGE = (-2.0, 2.0)
ARCHITECTURE = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
TRAINING = {
    "num_steps": 12,
    "batch_size": 8,
    "learning_rate": 0.003,
    "weight_decay": 0.0,
    "ema_decay": 0.5,
}


def command(*words: object) -> int:
    """Run `ddm` with these words; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        run_app(app, [str(word) for word in words])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """A federation whose experts work on latents and are told classes, published in `release`."""
    path = tmp_path_factory.mktemp("student")
    tiny = TinyFederation.create(path, {"north": 60, "west": 40})
    weights = path / "autoencoder.safetensors"
    save_tensors(weights, build_autoencoder(SIZE, PIXELS).state_dict())
    chosen = recipe(
        data={"shape": list(PIXELS), "range": list(RANGE)},
        latent={"kind": "autoencoder_kl", "weights": str(weights)} | SIZE.model_dump(mode="json"),
        condition={"kind": "class", "num_classes": 2, "drop": 0.2},
        expert={"architecture": ARCHITECTURE, "training": TRAINING},
        statistics={
            "unit": "image",
            "total": {"epsilon": 8.0, "delta": 0.0},
            "counts": {"epsilon": 4.0, "num_groups": 4},
            "class_counts": {"epsilon": 4.0, "num_classes": 2},
        },
        router={"kind": "counts"},
    )
    tiny.complete(path / "release", chosen)
    return tiny


def distil(tiny: TinyFederation, out: Path, *more: object) -> int:
    release = tiny.path / "release"
    return command(
        "distill",
        release,
        "--root",
        tiny.root,
        "--state",
        out.parent / "state",
        "--out",
        out,
        *more,
    )


@pytest.fixture(scope="module")
def made(tiny: TinyFederation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "student.safetensors"
    assert distil(tiny, out, "--num", 40) == 0
    return out


@pytest.fixture
def student(made: Path, tmp_path: Path) -> Path:
    """A student of one's own, elsewhere, under another name; the release is not there."""
    for source in (made, made.with_suffix(RECORD_SUFFIX), autoencoder_beside(made)):
        shutil.copy(source, tmp_path / source.name.replace("student", "moved"))
    return tmp_path / "moved.safetensors"


def test_student_of_latents_and_classes_draws_pixels_of_the_class_asked_for(
    student: Path, tiny: TinyFederation
) -> None:
    record, alone = load_student(student)
    assert isinstance(record.latent, AutoencoderKlLatent)
    assert isinstance(record.condition, ClassCondition)
    drawn = alone.sample(4, steps=3, condition=1)
    assert drawn.latents.shape == (4, *SEEN) and drawn.images.shape == (4, *PIXELS)
    ensemble = open_ensemble(tiny.path / "release", root=tiny.root)
    assert drawn.value_range == ensemble.value_range == RANGE
    assert torch.equal(drawn.images, ensemble.latent.decode(drawn.latents)), (
        "its autoencoder is the release's"
    )
    other = alone.sample(4, steps=3, condition=0)
    assert not torch.equal(other.images, drawn.images)
    with pytest.raises(MathError, check=has_subject("condition")):
        alone.sample(1, condition=2)


def test_student_that_was_interrupted_and_one_that_was_not_are_the_same_bytes(
    made: Path, tiny: TinyFederation, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distil(tiny, out, "--num", 40, "--checkpoint-s", 0) == 0
    assert out.read_bytes() == made.read_bytes()
    for path in (
        out,
        out.with_suffix(RECORD_SUFFIX),
        *out.with_suffix(".work").glob("checkpoints/step-*12.*"),
    ):
        path.unlink()
    assert len(list(out.with_suffix(".work").glob("checkpoints/*.json"))) == 1, (
        "it goes on from step 11"
    )
    assert distil(tiny, out, "--num", 40) == 0
    assert out.read_bytes() == made.read_bytes()


def test_command_draws_from_a_student_and_says_where_it_comes_from(
    student: Path, tiny: TinyFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (student, "--num", 3, "--steps", 2)
    assert command("sample-student", *options, "--out", tmp_path / "a.npz", "--class", 1) == 0
    output = capsys.readouterr().out
    assert load_student(student)[0].source.manifest in output and "images in [-2, 2]" in output
    release = (tiny.path / "release", "--root", tiny.root, "--state", tmp_path / "state")
    assert command("sample", *release, "--num", 2, "--steps", 2, "--out", tmp_path / "e.npz") == 0
    assert "images in [-2, 2]" in capsys.readouterr().out
    assert (
        command(
            "sample-student", *options, "--out", tmp_path / "b.npz", "--class", 1, "--guidance", 2
        )
        == 0
    )
    images = [np.load(tmp_path / name)["images"] for name in ("a.npz", "b.npz")]
    assert images[0].shape == (3, *PIXELS) and not np.array_equal(*images)
    assert (
        command("sample-student", *options, "--out", tmp_path / "c.npz", "--class", 2)
        == SetupError.exit_code
    )
    assert command("sample-student", *options, "--out", tmp_path / "d.gif") == SetupError.exit_code
    for lone in (
        ("--guidance", 1),
        ("--text", "a"),
        ("--text-encoder", tmp_path),
        ("--class", 1, "--text", "a"),
    ):
        assert (
            command("sample-student", *options, "--out", tmp_path / "d.npz", *lone)
            == SetupError.exit_code
        )


def test_student_is_evaluated_as_its_release_is_without_silos(
    student: Path, tiny: TinyFederation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those of the library on what `ddm sample-student` draws."""
    generator = torch.Generator().manual_seed(0)
    real = (torch.randn(60, *PIXELS, generator=generator) / 2).clamp(*RANGE)
    np.savez(tmp_path / "real.npz", images=real.numpy())
    labels = torch.arange(60) % 2
    classifier = train_classifier(real, labels, DataSpec(shape=PIXELS, range=RANGE), num_steps=2)
    classifier.save(tmp_path / "classifier.safetensors")
    features = ("--features", tmp_path / "classifier.safetensors")
    words = ("evaluate", student, "--reference", tmp_path / "real.npz", "--steps", 2, *features)

    assert command(*words, "--num", 20, "--out", tmp_path / "page", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    record, _ = load_student(student)
    assert document["student"] == {"digest": record.file.digest}
    assert document["release"]["manifest"] == record.source.manifest
    assert document["per_silo"] == {} and document["share_error"] is None
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert f"a student of {record.source.plan_id}" in page and 'id="silos"' not in page

    drawn = tmp_path / "drawn.npz"
    assert command("sample-student", student, "--num", 20, "--steps", 2, "--out", drawn) == 0
    expected = evaluate(np.load(drawn)["images"], real, features=classifier.encode).to_json()
    for name, estimate in expected["metrics"].items():
        assert document["metrics"][name] == pytest.approx(estimate, rel=1e-4, abs=1e-6), name
    capsys.readouterr()
    assert command(*words, "--samples", drawn, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["metrics"]["kid"] == pytest.approx(document["metrics"]["kid"], rel=1e-4, abs=1e-6)

    # Among samples of the release they are those of no silo.
    release = ("evaluate", tiny.path / "release", "--root", tiny.root, *words[2:])
    state = ("--state", tmp_path / "state")
    assert command(*release, *state, "--samples", drawn, "--json") == 0
    assert json.loads(capsys.readouterr().out)["per_silo"] == {}


def test_evaluation_of_a_student_refuses_what_a_student_lacks(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "real.npz", images=np.zeros((20, *PIXELS), np.float32))
    words = ("evaluate", student, "--reference", tmp_path / "real.npz", "--num", 20)
    for flags, subject in [
        (("--root", "1.root.json"), "--root"),
        (("--strategy", "lock"), "--strategy"),
        (("--tau", 0.5), "--tau"),
        (("--prior", "equal"), "--prior"),
        (("--set", "router-every=2"), "--set router-every"),
        # The plan's encoder, which is the default.
        ((), "--features"),
    ]:
        with case(flags=flags):
            assert command(*words, *flags) == SetupError.exit_code
            assert subject in capsys.readouterr().err
    missing = ("evaluate", tmp_path / "release", *words[2:])
    assert command(*missing) == SetupError.exit_code
    assert "Add --root FILE" in capsys.readouterr().err


def test_file_that_cannot_hold_the_samples_is_refused_before_any_is_drawn(
    student: Path, tiny: TinyFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddm.cli.sampling.draw", draw)
    release = (tiny.path / "release", "--root", tiny.root, "--state", tmp_path / "state")
    for words in (("sample", *release), ("sample-student", student)):
        codes = [
            command(*words, "--num", 1, "--out", tmp_path / name) for name in ("a.nii.gz", "a.npz")
        ]
        assert codes == [SetupError.exit_code, 130]


def told_texts(folder: Path) -> Path:
    """A student that reads texts, its weights random; the encoder that its record pins is made in `folder`."""
    condition = pin(
        save_encoder(folder / "tiny-t5", make_encoder("T5EncoderModel")), max_tokens=6, drop=0.1
    )
    expert = build_expert(Dit.model_validate(ARCHITECTURE), PIXELS, condition=condition, seed=1)
    random = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(value.shape, generator=random) / 5
        for name, value in expert.state_dict().items()
    }
    weights = folder / "reader.safetensors"
    save_tensors(weights, state)
    record = Student(
        source=StudentOrigin(plan_id="tiny-00000000", version=1, manifest="0" * 64, root="0" * 64),
        images=OwnSamples(num=1, seed=0),
        teacher="label",
        data=DataSpec(shape=PIXELS, range=(-0.5, 0.5)),
        condition=condition,
        architecture=Dit.model_validate(ARCHITECTURE),
        path="linear",
        t_distribution=UniformT(),
        training=Training.model_validate(TRAINING),
        loss=0.0,
        seconds=0.0,
        file=File.of("student.safetensors", weights),
    )
    weights.with_suffix(RECORD_SUFFIX).write_bytes(record.encode())
    return weights


def test_command_tells_a_student_the_prompt_through_the_pinned_encoder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = told_texts(tmp_path)
    out = tmp_path / "a.npz"
    options = (weights, "--num", 3, "--steps", 2, "--out", out)
    reading = ("--text-encoder", tmp_path / "tiny-t5", "--guidance", 2)
    record, alone = load_student(weights)
    assert isinstance(record.condition, TextCondition)
    encoder = TextEncoder.open(tmp_path / "tiny-t5", record.condition)
    images_by_prompt = {}
    for prompt in ("bright left", "dark right"):
        assert command("sample-student", *options, "--text", prompt, *reading) == 0
        with np.load(out) as drawn:
            images_by_prompt[prompt] = drawn["images"]
        text = encoder.encode([prompt])[0]
        images = alone.sample(3, steps=2, condition=text, guidance=2).images
        assert np.array_equal(images_by_prompt[prompt], images.clamp(-0.5, 0.5).numpy())
    assert not np.allclose(*images_by_prompt.values(), atol=1e-3)
    assert (
        command("sample-student", *options, "--text", "bright left", *reading, "--class", 1)
        == SetupError.exit_code
    )
    assert command("sample-student", *options, "--class", 1) == SetupError.exit_code
    save_encoder(tmp_path / "other", make_encoder("T5EncoderModel", seed=1))
    other = ("--text", "bright left", "--text-encoder", tmp_path / "other")
    assert command("sample-student", *options, *other) == DigestError.exit_code
    assert "the file that the plan pins" in capsys.readouterr().err


class Interrupting(StringIO):
    """Standard output on which training, as soon as it tells of itself, is asked to end."""

    def write(self, text: str) -> int:
        if "training" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def test_signal_ends_training_with_a_checkpoint_of_the_step_where_it_came(
    made: Path, tiny: TinyFederation, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    before = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(Interrupting()):
        assert distil(tiny, out, "--num", 40) == EXIT_TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before
    steps = sorted(path.stem for path in out.with_suffix(".work").glob("checkpoints/*.json"))
    assert steps[-1] == "step-0000000010", (
        "told of itself at step 10, long before a checkpoint is due"
    )
    assert not out.exists()
    assert distil(tiny, out, "--num", 40) == 0
    assert out.read_bytes() == made.read_bytes()


def test_given_images_are_encoded_and_told_their_classes(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (30, *PIXELS)).astype(np.float32)
    data = tmp_path / "public.npz"
    out = tmp_path / "student.safetensors"
    np.savez(data, images=images, labels=np.arange(30) % 2)
    assert distil(tiny, out, "--data", data, "--steps", 3) == 0
    record, alone = load_student(out)
    assert (record.images.num, record.teacher, record.condition.kind) == (30, "drawn", "class")
    assert alone.sample(2, steps=2, condition=0).images.shape == (2, *PIXELS)
    np.savez(data, images=images)
    assert (
        distil(tiny, tmp_path / "other.safetensors", "--data", data, "--steps", 3)
        == DataError.exit_code
    )
    np.savez(data, images=images, labels=np.zeros(29, np.int64))
    assert (
        distil(tiny, tmp_path / "other.safetensors", "--data", data, "--steps", 3)
        == DataError.exit_code
    )


def test_student_without_condition_may_be_made_of_experts_that_have_one(
    tiny: TinyFederation, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distil(tiny, out, "--num", 20, "--steps", 2, "--unconditional") == 0
    record, alone = load_student(out)
    assert isinstance(record.condition, NoCondition)
    assert alone.sample(2, steps=2).images.shape == (2, *PIXELS)
    with pytest.raises(MathError, check=has_subject("condition")):
        alone.sample(2, condition=0)
    assert (
        distil(tiny, out, "--num", 20, "--steps", 2, "--texts", "texts.npz") == SetupError.exit_code
    )


def test_student_with_another_or_no_autoencoder_or_a_record_without_is_refused(
    student: Path,
) -> None:
    beside = autoencoder_beside(student)
    record = student.with_suffix(RECORD_SUFFIX)
    weights = bytearray(beside.read_bytes())
    text = record.read_bytes()
    weights[-1] ^= 1
    beside.write_bytes(weights)
    with pytest.raises(DigestError, check=has_subject("moved.autoencoder.safetensors")):
        load_student(student)
    beside.unlink()
    with pytest.raises(MissingFileError, check=has_subject("moved.autoencoder.safetensors")):
        load_student(student)
    start = text.index(b'"autoencoder":{')
    record.write_bytes(text[:start] + b'"autoencoder":null' + text[text.index(b"}", start) + 1 :])
    with pytest.raises(DocumentError, check=has_subject("moved.json, field document")):
        load_student(student)
