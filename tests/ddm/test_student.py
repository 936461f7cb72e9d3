"""A student of a published release whose experts work on latents and know classes: made, loaded, and sampled from."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm import Ensemble, load_student
from ddm.cli import app
from ddm.console import run_app
from ddm.errors import DataError, DigestError, DocumentError, MathError, SetupError, TensorFileError
from ddm.latents import build_autoencoder
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.plan import AutoencoderKlLatent, ClassCondition, NoCondition
from ddm.student import RECORD_SUFFIX, autoencoder_beside
from ddm.tensors import save_tensors
from tests.federation import TinyFederation, recipe

SIZE = AutoencoderSize(channels=(8, 8), attention=(False, False), latent_channels=3, num_res_blocks=1, norm_groups=4)
PIXELS, SEEN = (1, 4, 4), (3, 2, 2)
ARCHITECTURE = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
TRAINING = {
    "num_steps": 12,
    "batch_size": 8,
    "learning_rate": 0.05,
    "weight_decay": 0.0,
    "ema_decay": 0.5,
    "checkpoint_steps": 4,
}


def command(*words: object) -> int:
    """Run `ddm` with these words; return its exit code."""
    with pytest.raises(SystemExit) as done:
        run_app(app, [str(word) for word in words])
    return int(done.value.code or 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """A federation whose experts work on latents and are told classes, published in `release`."""
    path = tmp_path_factory.mktemp("student")
    tiny = TinyFederation.create(path, {"north": 60, "west": 40})
    weights = path / "autoencoder.safetensors"
    save_tensors(weights, build_autoencoder(SIZE, PIXELS).state_dict())
    chosen = recipe(
        latent={"kind": "autoencoder_kl", "weights": str(weights)} | SIZE.model_dump(mode="json"),
        condition={"kind": "class", "num_classes": 2, "drop": 0.2},
        expert={"architecture": ARCHITECTURE, "training": TRAINING},
        releases={
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
    return command("distill", release, "--root", tiny.root, "--state", out.parent / "state", "--out", out, *more)


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
    assert drawn.seen.shape == (4, *SEEN) and drawn.images.shape == (4, *PIXELS)
    ensemble = Ensemble.open(tiny.path / "release", root=tiny.root)
    assert torch.equal(drawn.images, ensemble.latent.decode(drawn.seen)), "its autoencoder is the release's"
    other = alone.sample(4, steps=3, condition=0)
    assert not torch.equal(other.images, drawn.images)
    with pytest.raises(MathError, match="class"):
        alone.sample(1, condition=2)


def test_student_that_was_interrupted_and_one_that_was_not_are_the_same_bytes(
    made: Path, tiny: TinyFederation, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distil(tiny, out, "--num", 40) == 0
    assert out.read_bytes() == made.read_bytes()
    for path in (out, out.with_suffix(RECORD_SUFFIX), *out.with_suffix(".work").glob("checkpoints/step-*12.*")):
        path.unlink()
    assert len(list(out.with_suffix(".work").glob("checkpoints/*.json"))) == 1, "it goes on from step 8"
    assert distil(tiny, out, "--num", 40) == 0
    assert out.read_bytes() == made.read_bytes()


def test_command_draws_from_a_student_and_says_where_it_comes_from(
    student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (student, "--num", 3, "--steps", 2)
    assert command("sample-student", *asked, "--out", tmp_path / "a.npz", "--class", 1) == 0
    assert load_student(student)[0].source.manifest in capsys.readouterr().out
    assert command("sample-student", *asked, "--out", tmp_path / "b.npz", "--class", 1, "--guidance", 2) == 0
    images = [np.load(tmp_path / name)["images"] for name in ("a.npz", "b.npz")]
    assert images[0].shape == (3, *PIXELS) and not np.array_equal(*images)
    assert command("sample-student", *asked, "--out", tmp_path / "c.npz", "--class", 2) == MathError.exit_code
    assert command("sample-student", *asked, "--out", tmp_path / "d.gif") == SetupError.exit_code
    for lone in (("--guidance", 1), ("--text", "a"), ("--text-encoder", tmp_path), ("--class", 1, "--text", "a")):
        assert command("sample-student", *asked, "--out", tmp_path / "d.npz", *lone) == SetupError.exit_code


def test_given_images_are_encoded_and_told_their_classes(tiny: TinyFederation, tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (30, *PIXELS)).astype(np.float32)
    data, out = tmp_path / "public.npz", tmp_path / "student.safetensors"
    np.savez(data, images=images, labels=np.arange(30) % 2)
    assert distil(tiny, out, "--data", data, "--steps", 3) == 0
    record, alone = load_student(out)
    assert (record.images.num, record.teacher, record.condition.kind) == (30, "drawn", "class")
    assert alone.sample(2, steps=2, condition=0).images.shape == (2, *PIXELS)
    np.savez(data, images=images)
    assert distil(tiny, tmp_path / "other.safetensors", "--data", data, "--steps", 3) == DataError.exit_code
    np.savez(data, images=images, labels=np.zeros(29, np.int64))
    assert distil(tiny, tmp_path / "other.safetensors", "--data", data, "--steps", 3) == DataError.exit_code


def test_student_without_condition_may_be_made_of_experts_that_have_one(tiny: TinyFederation, tmp_path: Path) -> None:
    out = tmp_path / "student.safetensors"
    assert distil(tiny, out, "--num", 20, "--steps", 2, "--unconditional") == 0
    record, alone = load_student(out)
    assert isinstance(record.condition, NoCondition)
    assert alone.sample(2, steps=2).images.shape == (2, *PIXELS)
    with pytest.raises(MathError, match="condition"):
        alone.sample(2, condition=0)
    assert distil(tiny, out, "--num", 20, "--steps", 2, "--texts", "texts.npz") == SetupError.exit_code


def test_student_with_another_or_no_autoencoder_or_a_record_without_is_refused(student: Path) -> None:
    beside, record = autoencoder_beside(student), student.with_suffix(RECORD_SUFFIX)
    weights, text = bytearray(beside.read_bytes()), record.read_bytes()
    weights[-1] ^= 1
    beside.write_bytes(weights)
    with pytest.raises(DigestError, match="autoencoder"):
        load_student(student)
    beside.unlink()
    with pytest.raises(TensorFileError, match="autoencoder"):
        load_student(student)
    start = text.index(b'"autoencoder":{')
    record.write_bytes(text[:start] + b'"autoencoder":null' + text[text.index(b"}", start) + 1 :])
    with pytest.raises(DocumentError, match="student|moved"):
        load_student(student)
