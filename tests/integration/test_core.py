"""What a plan may ask of experts beside the plain ones, from the silo's files to samples of the release, in process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm import open_ensemble
from ddm.cli.main import app
from ddm.diffusion.path import CosinePath, LinearPath, as_velocity
from ddm.distillation.student import load_student
from ddm.errors import MathError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.loading.release import open_release
from ddm.models import build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import Training
from ddm.system.console import run_app
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from tests.support.federation import TinyFederation, images, recipe

SIZES = {"east": 60, "north": 90}
ARCHITECTURE = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
TRAINING = {
    "num_steps": 150,
    "batch_size": 16,
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "ema_decay": 0.95,
    "schedule": "constant",
    "precision": "fp32",
}
COUNTED = {
    "unit": "image",
    "total": {"epsilon": 8.0, "delta": 0.0},
    "counts": {"epsilon": 4.0, "num_groups": 4},
}


def bright_left(images: Tensor) -> Tensor:
    """By how much the left column is brighter than the right one: above 0 in class 1, below in class 0."""
    return (images[..., 0] - images[..., -1]).mean((1, 2))


def test_class_that_was_asked_for_is_drawn_from_a_published_release(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES)
    chosen = recipe(
        condition={"kind": "class", "num_classes": 2, "drop": 0.1},
        expert={"architecture": ARCHITECTURE, "training": TRAINING},
        statistics=COUNTED | {"class_counts": {"epsilon": 4.0, "num_classes": 2}},
        router={"kind": "counts"},
    )
    tiny.complete(tmp_path / "release", chosen)
    ensemble = open_ensemble(tmp_path / "release", root=tiny.root)

    def share_of_class_1(**condition: object) -> float:
        drawn = ensemble.sample(64, strategy="full", steps=8, seed=0, **condition)  # type: ignore[arg-type]
        return float((bright_left(drawn.images) > 0).float().mean())

    assert share_of_class_1(condition=1, guidance=1.0) > 0.9
    assert share_of_class_1(condition=0, guidance=1.0) < 0.1
    assert 0.2 < share_of_class_1() < 0.8, "without a condition both classes are drawn"
    with pytest.raises(MathError, match="class"):
        ensemble.sample(2, condition=2)


def test_silos_may_learn_on_different_paths_and_still_make_one_ensemble(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES)
    exceptions = [{"silo_id": "north", "path": "cosine_vp", "prediction": "eps"}]
    chosen = recipe(
        objective={"path": "linear", "prediction": "velocity", "exceptions": exceptions},
        expert={"architecture": ARCHITECTURE, "training": TRAINING},
        statistics=COUNTED,
        router={"kind": "counts"},
    )
    tiny.complete(tmp_path / "release", chosen)
    release = open_release(tmp_path / "release", root=tiny.root, state=None)
    assert (
        release.plan.objective.of("north").path
        == "cosine_vp"
        != release.plan.objective.of("east").path
    )
    ensemble = open_ensemble(tmp_path / "release", root=tiny.root)
    north = list(ensemble.expert_ids).index("north")
    expert = next(listed for listed in release.manifest.experts if listed.silo_id == "north")
    as_sent = build_expert(Dit.model_validate(ARCHITECTURE), (1, 4, 4))
    as_sent.load_state_dict(
        load_tensors(release.folder / expert.file.path, None, max_bytes=expert.file.bytes)
    )
    x_B = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    t_B = torch.linspace(0.1, 0.9, 8)
    with torch.inference_mode():
        answer = ensemble.experts[north](x_B, t_B)
        torch.testing.assert_close(
            answer, as_velocity(as_sent, "eps", CosinePath(), LinearPath())(x_B, t_B)
        )
        assert float((answer - as_sent(x_B, t_B)).abs().max()) > 0.1
    assert torch.isfinite(ensemble.sample(4, strategy="full", steps=4).images).all()


def test_experts_adapted_from_a_public_one_are_published_whole(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES)
    base = train(
        build_expert(Dit.model_validate(ARCHITECTURE), (1, 4, 4), seed=7),
        Examples(
            torch.from_numpy(
                np.concatenate([images(120, centre, seed=91) for centre in (-0.5, 0.5)])
            )
        ),
        Training.model_validate(TRAINING),
        TrainingObjective(),
        TrainingRun(tmp_path / "base"),
    ).ema
    save_tensors(tmp_path / "base.safetensors", base)
    chosen = recipe(
        base={"kind": "file", "file": str(tmp_path / "base.safetensors"), "licence": "CC0-1.0"},
        expert={
            "architecture": ARCHITECTURE,
            "training": TRAINING | {"num_steps": 20},
            "adaptation": {"kind": "lora", "rank": 2, "alpha": 2.0},
        },
        statistics=COUNTED,
        router={"kind": "counts"},
    )
    tiny.complete(tmp_path / "release", chosen)
    release = open_release(tmp_path / "release", root=tiny.root, state=None)
    for expert in release.manifest.experts:
        weights = load_tensors(release.folder / expert.file.path, None, max_bytes=expert.file.bytes)
        change = weights["head.weight"] - base["head.weight"]
        assert set(weights) == set(base) and bool(change.any())
        assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) <= 2
    assert torch.isfinite(
        open_ensemble(tmp_path / "release", root=tiny.root).sample(4, steps=2).images
    ).all()

    wide = tmp_path / "wide.toml"
    wide.write_text('[architecture]\nkind = "dit"\npatch = 2\nhidden = 24\ndepth = 1\nheads = 2\n')
    start = release.plan.file(release.plan.expert.base or "").digest
    for name, more, expected in (
        ("like", (), start),
        ("wide", ("--architecture", str(wide)), None),
    ):
        out = tmp_path / f"{name}.safetensors"
        words = [
            "distill",
            str(tmp_path / "release"),
            "--root",
            str(tiny.root),
            "--out",
            str(out),
            *more,
        ]
        with pytest.raises(SystemExit) as ended:
            run_app(app, [*words, "--num", "16", "--steps", "1"])
        assert not ended.value.code
        assert load_student(out)[0].base == expected, (
            "a student that is built alike starts where the experts did"
        )
    weights = load_tensors(tmp_path / "like.safetensors", None, max_bytes=2**20)
    moved = max(float((weights[name] - base[name]).abs().max()) for name in base)
    assert 0 < moved < 0.02, "one step of training away"
