"""Exported folders are opened again by the programs that they are for, and answer as ours does."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ddm import load_student
from ddm.cli.main import app
from ddm.diffusion.solver import integrate, uniform_times
from ddm.distillation.student import Student
from ddm.errors import SetupError
from ddm.export.programs import example_inputs, input_names
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.base import File, sha256_hex
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.web_host import serve_folder

TOLERANCE = 1e-5
SHAPE = (1, 8, 8)
CLASSES = ClassCondition(num_classes=3)
TEXT = TextCondition(dim=6, max_tokens=4)
DIT = Dit(patch=2, hidden=16, depth=2, heads=2, qk_norm=True, position_grid=(3, 3))
UNET = Unet(
    channels=(8, 16),
    attention=(False, True),
    num_res_blocks=1,
    head_channels=8,
    norm_groups=4,
)
MMDIT = Mmdit(patch=2, hidden=16, depth=2, heads=2, shared_depth=1)
NETWORKS = [
    pytest.param(DIT, CLASSES, id="dit-class"),
    # Their traces take up to half a minute.
    pytest.param(UNET, NoCondition(), id="unet", marks=pytest.mark.slow),
    pytest.param(MMDIT, TEXT, id="mmdit-text", marks=pytest.mark.slow),
]


def made_student(folder: Path, architecture: Architecture, condition: Condition) -> Path:
    """Write a student with made weights and its record."""
    network = build_expert(architecture, SHAPE, condition=condition)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=random))
    path = folder / "student.safetensors"
    save_tensors(path, network.state_dict())
    data = path.read_bytes()
    file = File(path=path.name, bytes=len(data), digest=sha256_hex(data))
    digest = "a" * 64
    record = {
        "format": "archipelago/student/1",
        "source": {"plan_id": "plan-00000000", "version": 1, "manifest": digest, "root": digest},
        "images": {"kind": "own_samples", "num": 4, "seed": 0},
        "teacher": "mixture",
        "data": {"shape": SHAPE, "range": [-1.0, 1.0]},
        "condition": condition.model_dump(mode="json"),
        "architecture": architecture.model_dump(mode="json"),
        "path": "linear",
        "t_distribution": {"kind": "uniform"},
        "training": {
            "num_steps": 1,
            "batch_size": 1,
            "learning_rate": 0.1,
            "weight_decay": 0.0,
            "ema_decay": 0.5,
        },
        "loss": 1.0,
        "seconds": 1.0,
        "file": file.model_dump(mode="json"),
    }
    student = Student.parse(json.dumps(record).encode(), subject="record")
    path.with_suffix(".json").write_bytes(student.encode())
    return path


def export(*words: object) -> BaseException | None:
    """Run the command; return how it ended, None for well."""
    # A warning would be an error here: an operator can change nothing of those that torch and diffusers give.
    return CliRunner().invoke(app, ["export", *map(str, words)]).exception


def network_of(student: Path) -> Callable[..., Tensor]:
    _, ensemble = load_student(student)
    return ensemble.experts[0]


def check_answers(
    answer: Callable[..., Tensor], network: Callable[..., Tensor], shape: Any, condition: Condition
) -> None:
    """Compare answers at several times and numbers of samples."""
    for num in (1, 3, 5):
        with case(num=num):
            inputs = example_inputs(shape, condition, num)
            torch.testing.assert_close(
                answer(*inputs), network(*inputs), atol=TOLERANCE, rtol=TOLERANCE
            )


def open_onnx(file: Path) -> Callable[..., Tensor]:
    runtime = pytest.importorskip(
        "onnxruntime", reason="needs onnxruntime: pip install '.[onnx]' onnxruntime"
    )
    session = runtime.InferenceSession(str(file))

    def answer(*inputs: Tensor) -> Tensor:
        names = [part.name for part in session.get_inputs()]
        feed = {name: part.numpy() for name, part in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return answer


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "condition"), NETWORKS)
def test_program_of_torch_export_answers_as_the_student_for_any_number_of_samples(
    tmp_path: Path, architecture: Architecture, condition: Condition
) -> None:
    student = made_student(tmp_path, architecture, condition)
    assert export(student, "--torch-export", tmp_path / "out") is None
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    check_answers(program, network_of(student), SHAPE, condition)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f'manifest_digest: "{"a" * 64}"' in card
    assert "synthetic" in card


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "condition"), NETWORKS)
def test_onnx_answers_as_the_student_for_any_number_of_samples(
    tmp_path: Path, architecture: Architecture, condition: Condition
) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[onnx]'")
    student = made_student(tmp_path, architecture, condition)
    assert export(student, "--onnx", tmp_path / "out") is None
    answer = open_onnx(tmp_path / "out" / "model.onnx")
    check_answers(answer, network_of(student), SHAPE, condition)
    assert input_names(condition)[:2] == ["x", "t"]


@pytest.mark.slow
@torch.no_grad()
def test_router_exported_from_a_release_answers_as_the_releases(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    from ddm import open_ensemble

    words = (published_once.release, "--root", published_once.root, "--state", tmp_path / "state")
    assert export(*words, "--router", "--torch-export", tmp_path / "out") is None
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    ensemble = open_ensemble(published_once.release, root=published_once.root)
    for num in (1, 3, 5):
        x, t = example_inputs(ensemble.shape, NoCondition(), num)
        own = ensemble.router.log_likelihood(x, t)
        torch.testing.assert_close(program(x, t), own, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def diffusers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(
            "diffusers", reason="needs diffusers: pip install '.[diffusers]'"
        )
        # Its classes are imported when they are first named.
        _ = (module.DDPMPipeline, module.UNet2DModel, module.FlowMatchEulerDiscreteScheduler)
        return module


def open_folder(diffusers: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def test_unet_opens_in_diffusers_alone_and_draws_the_images_of_ours(
    diffusers: Any, tmp_path: Path
) -> None:
    student = made_student(tmp_path, UNET, NoCondition())
    assert export(student, "--diffusers", tmp_path / "out") is None
    index = json.loads((tmp_path / "out" / "model_index.json").read_text("utf-8"))
    assert index["unet"] == ["diffusers", "UNet2DModel"]
    pipeline = open_folder(diffusers, tmp_path / "out")
    assert type(pipeline) is diffusers.DDPMPipeline

    random = torch.Generator().manual_seed(3)
    noise = torch.randn(2, *SHAPE, generator=random)
    drawn = pipeline(
        2, num_inference_steps=5, generator=random.manual_seed(3), output_type="np"
    ).images
    # The scheduler's own times: the last but one is 1 / 1000.
    times = pipeline.scheduler.sigmas.tolist()
    own = integrate(network_of(student), noise, times, "euler")
    expected = (own / 2 + 0.5).clamp(0, 1).movedim(1, -1)
    torch.testing.assert_close(torch.from_numpy(drawn), expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "condition", "library"),
    [
        pytest.param(DIT, CLASSES, "ddm.export.diffusers_classes", id="dit-class"),
        pytest.param(UNET, CLASSES, "diffusers", id="unet-class"),
        pytest.param(MMDIT, TEXT, "ddm.export.diffusers_classes", id="mmdit-text"),
    ],
)
def test_pipeline_of_a_condition_draws_the_images_of_ours(
    diffusers: Any,
    tmp_path: Path,
    architecture: Architecture,
    condition: Condition,
    library: str,
) -> None:
    student = made_student(tmp_path, architecture, condition)
    assert export(student, "--diffusers", tmp_path / "out") is None
    index = json.loads((tmp_path / "out" / "model_index.json").read_text("utf-8"))
    assert index["network"][0] == library
    pipeline = open_folder(diffusers, tmp_path / "out")
    noise, _, c = example_inputs(SHAPE, condition, 3)
    drawn = pipeline(
        3,
        num_inference_steps=4,
        condition=c,
        guidance_scale=1.5,
        latents=noise,
        output_type="pt",
    ).images
    network = network_of(student)

    def guided(x: Tensor, t: Tensor) -> Tensor:
        return 2.5 * network(x, t, c) - 1.5 * network(x, t)

    own = integrate(guided, noise, uniform_times(4), "euler")
    torch.testing.assert_close(drawn, own, atol=TOLERANCE, rtol=TOLERANCE)


def test_ensemble_as_a_pipeline_draws_what_the_release_draws_and_is_verified_first(
    diffusers: Any, published_once: PublishedRelease, tmp_path: Path
) -> None:
    from ddm import open_ensemble
    from ddm.errors import RootError, TrustError
    from ddm.export.diffusers_folder import diffusers_classes

    classes = diffusers_classes()
    pipeline = classes.EnsemblePipeline.from_release(
        published_once.release, root=published_once.root
    )
    assert isinstance(pipeline, diffusers.DiffusionPipeline)
    drawn = pipeline(3, num_inference_steps=2, seed=4, output_type="pt").images
    own = open_ensemble(published_once.release, root=published_once.root)
    assert torch.equal(drawn, own.sample(3, steps=2, seed=4).images)

    other_root = tmp_path / "1.root.json"
    other_root.write_bytes(published_once.root.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises((RootError, TrustError)):
        classes.EnsemblePipeline.from_release(published_once.release, root=other_root)
    with pytest.raises(SetupError, check=has_subject("EnsemblePipeline")):
        pipeline.save_pretrained(tmp_path / "copy")
    with pytest.raises(SetupError, check=has_subject("EnsemblePipeline")):
        classes.EnsemblePipeline.from_pretrained(tmp_path)


def test_changed_release_is_refused_and_nothing_is_written(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    import shutil

    from ddm.errors import DigestError

    copy = tmp_path / "release"
    shutil.copytree(published_once.release, copy)
    exported = first_expert(published_once)
    (expert,) = copy.rglob(exported["file"]["path"])
    data = bytearray(expert.read_bytes())
    data[-1] ^= 1
    expert.write_bytes(data)
    words = (copy, "--root", published_once.root, "--state", tmp_path / "state")
    ended = export(*words, "--expert", exported["expert_id"], "--torch-export", tmp_path / "out")
    assert isinstance(ended, DigestError)
    assert not (tmp_path / "out").exists()


def test_expert_of_a_release_on_a_host_is_exported_and_the_others_are_not_fetched(
    published_once: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    expert_id = first_expert(published_once)["expert_id"]
    words = ("--root", published_once.root, "--expert", expert_id, "--torch-export")
    with serve_folder(published_once.release) as host:
        ended = export(host.url, *words, tmp_path / "by-address")
    assert ended is None, ended
    assert export(published_once.release, *words, tmp_path / "by-folder") is None
    answers = []
    for name in ("by-address", "by-folder"):
        program = torch.export.load(tmp_path / name / "model.pt2").module()
        answers.append(program(torch.ones(2, 1, 4, 4), torch.full((2,), 0.5)))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    fetched = list((tmp_path / "cache").rglob("expert.safetensors"))
    assert len(fetched) == 1


def first_expert(published: PublishedRelease) -> dict[str, Any]:
    """The manifest's record of an expert."""
    (manifest,) = published.release.rglob("*manifest.json")
    expert: dict[str, Any] = json.loads(manifest.read_text("utf-8"))["experts"][0]
    return expert


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "release").mkdir()
    student = tmp_path / "student.safetensors"
    for words, subject in [
        ((student,), "ddm export"),
        ((student, "--onnx", out, "--diffusers", out), "ddm export"),
        ((student, "--torch-export", out, "--root", "1.root.json"), "--root"),
        ((student, "--torch-export", out, "--expert", "a"), "--expert"),
        ((student, "--torch-export", out, "--router"), "--router"),
        ((tmp_path / "release", "--torch-export", out), "ddm export"),
        ((tmp_path / "release", "--torch-export", out, "--expert", "a"), "--root"),
        ((tmp_path / "release", "--diffusers", out, "--router"), "--router"),
        ((student, "--torch-export", tmp_path), str(tmp_path)),
    ]:
        with case(words=words):
            ended = export(*words)
            assert isinstance(ended, SetupError)
            assert ended.subject == subject
