"""The command `ddm distill`, in this process: what it leaves, what it goes on from, and what it refuses at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddm.cli.main import app
from ddm.distillation.student import Student, load_student
from ddm.errors import BusyError, DigestError, DiskError, SetupError
from ddm.io.locks import locked
from ddm.protocol.base import sha256_hex
from ddm.protocol.manifest import Manifest
from ddm.system.console import run_app
from tests.conftest import PublishedRelease


def command(*words: object) -> int:
    """Run `ddm` with these words; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        run_app(app, [str(word) for word in words])
    return int(ended.value.code or 0)


def distilled(published: PublishedRelease, out: Path, *more: object) -> int:
    return command(
        "distill",
        published.release,
        "--root",
        published.root,
        "--state",
        out.parent / "state",
        "--out",
        out,
        *more,
    )


def test_command_leaves_a_student_that_names_its_release_and_can_be_sampled_from(
    published: PublishedRelease, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distilled(published, out, "--num", 20, "--steps", 4) == 0
    record, student = load_student(out)
    manifest = next(published.release.glob("targets/*/manifest.json")).read_bytes()
    assert record.source.manifest == sha256_hex(manifest)
    assert record.source.root == sha256_hex(published.root.read_bytes())
    assert (record.images.num, record.teacher, record.training.num_steps) == (20, "label", 4)
    assert student.sample(3, steps=2).images.shape == (3, 1, 4, 4)
    before = out.read_bytes()
    assert distilled(published, out, "--num", 20, "--steps", 4) == 0
    assert out.read_bytes() == before
    weights = bytearray(before)
    weights[-1] ^= 1
    out.write_bytes(weights)
    with pytest.raises(DigestError):
        load_student(out)


def test_command_distils_at_given_images_into_another_architecture(
    published: PublishedRelease, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    images = tmp_path / "public.npz"
    np.savez(
        images, images=np.random.default_rng(0).uniform(-1, 1, (30, 1, 4, 4)).astype(np.float32)
    )
    toml = tmp_path / "wide.toml"
    toml.write_text('[architecture]\nkind = "dit"\npatch = 2\nhidden = 24\ndepth = 2\nheads = 2\n')
    assert distilled(published, out, "--data", images, "--architecture", toml, "--steps", 3) == 0
    record = Student.parse(out.with_suffix(".json").read_bytes(), subject="record")
    assert record.images.model_dump() == {
        "kind": "given_images",
        "num": 30,
        "digest": sha256_hex(images.read_bytes()),
    }
    assert (record.teacher, record.architecture.hidden) == ("drawn", 24)  # type: ignore[union-attr]
    assert load_student(out)[1].sample(1, steps=2).images.shape == (1, 1, 4, 4)


def test_student_of_an_experts_form_starts_from_the_largest_one_and_others_from_random_weights(
    published: PublishedRelease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.parse(
        next(published.release.glob("targets/*/manifest.json")).read_bytes(), subject="manifest"
    )
    largest = max(manifest.experts, key=lambda expert: expert.prior)
    options = ("--num", 8, "--steps", 1, "--seed", 3)

    def made(name: str, *more: object) -> tuple[Student, dict[str, torch.Tensor]]:
        out = tmp_path / f"{name}.safetensors"
        assert distilled(published, out, *options, *more) == 0
        return load_student(out)[0], load_file(out)

    record, weights = made("a")
    other, random = made("b", "--start", "random")
    assert record.base == largest.file.digest and other.base is None
    expert = load_file(next(published.release.glob(f"targets/*/{largest.file.path}")))
    near, far = (
        sum(float((start[name] - expert[name]).square().sum()) for name in expert)
        for start in (weights, random)
    )
    assert near < far / 10
    assert (
        distilled(published, tmp_path / "a.safetensors", *options, "--start", "random")
        == SetupError.exit_code
    )
    assert "checkpoints" in capsys.readouterr().err
    toml = tmp_path / "wide.toml"
    toml.write_text('[architecture]\nkind = "dit"\npatch = 2\nhidden = 24\ndepth = 2\nheads = 2\n')
    assert made("c", "--architecture", toml)[0].base is None
    wrong = distilled(
        published, tmp_path / "d.safetensors", *options, "--architecture", toml, "--start", "expert"
    )
    assert wrong == SetupError.exit_code and "none of them" in capsys.readouterr().err


def test_command_takes_any_file_name_and_refuses_what_would_fail_when_all_is_done(
    published: PublishedRelease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my stüdent.safetensors"
    options = ("--num", 5, "--steps", 2)
    assert distilled(published, out, *options) == 0
    assert f"ddm sample-student '{out}'" in capsys.readouterr().out
    assert load_student(out)[0].images.num == 5
    assert distilled(published, out, "--num", 5, "--steps", 3) == SetupError.exit_code
    assert "another --out, or remove my stüdent.work" in capsys.readouterr().err
    with locked(out.with_suffix(".work"), "distillation"):
        assert distilled(published, out, *options) == BusyError.exit_code
    (tmp_path / "folder.safetensors").mkdir()
    assert distilled(published, tmp_path / "folder.safetensors", *options) == SetupError.exit_code
    assert not (tmp_path / "folder.work").exists()
    for flag in ("--seed", "--steps", "--num"):
        assert distilled(published, tmp_path / "b.safetensors", *options, flag, 2**53) == 2
    assert distilled(published, tmp_path / "b.safetensors", *options, "--seed", 2**53 - 1) == 0
    out.with_suffix(".json").rename(tmp_path / "b.json")
    capsys.readouterr()
    assert (
        command(
            "sample-student", tmp_path / "b.safetensors", "--num", 1, "--out", tmp_path / "a.png"
        )
        == 12
    )
    assert "or distil again" in capsys.readouterr().err, "nobody signed it, and no publisher has it"


def test_training_that_memory_or_disk_ends_is_not_blamed_on_its_checkpoints(
    published: PublishedRelease,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages = {}
    for error in (torch.OutOfMemoryError("CUDA out of memory."), DiskError("student.work")):

        def stop(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("ddm.training.state.TrainingState.advance", stop)
        out = tmp_path / f"{type(error).__name__}.safetensors"
        code = distilled(published, out, "--num", 5, "--steps", 2)
        messages[code] = capsys.readouterr().err
        assert "checkpoints" not in messages[code] and "remove" not in messages[code]
    assert (
        "memory of the GPU" in messages[SetupError.exit_code]
        and "--device cpu" in messages[SetupError.exit_code]
    )
    assert "student.work" in messages[DiskError.exit_code]


def test_command_refuses_a_release_that_was_tampered_with_and_flags_that_do_not_go_together(
    published: PublishedRelease, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distilled(published, out, "--num", 5, "--data", "public.npz") == SetupError.exit_code
    assert distilled(published, tmp_path / "student", "--num", 5) == SetupError.exit_code
    expert = next(published.release.glob("targets/*/silos/*/experts/*/expert.safetensors"))
    data = bytearray(expert.read_bytes())
    data[-1] ^= 1
    expert.write_bytes(data)
    assert distilled(published, out, "--num", 20, "--steps", 4) == DigestError.exit_code
    assert not out.with_suffix(".json").exists()
