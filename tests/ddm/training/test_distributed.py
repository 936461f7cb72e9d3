"""The same training in parts, in two processes, sharded, recomputed, compiled: rounding apart, the same expert."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from ddm.errors import SetupError
from ddm.models import build_expert
from ddm.training.config import Engine
from ddm.training.distributed import blocks_of
from ddm.training.progress import Progress
from tests.ddm.training.test_loop import (
    SHAPE,
    SMALL,
    Run,
    same_bytes,
    settings,
    stop_at,
)
from tests.support.errors import has_subject
from tests.support.group_program import make_network, make_texts, run_group

TOLERANCE = 2e-5  # of weights of about 0.1 after 30 steps
CPU = {"device": "cpu"}
RUNS: dict[str, dict[str, object]] = {
    "replicas": {"engine": CPU},
    "sharded": {"engine": CPU | {"shard": True, "accumulate": 2}},
    "continued": {"engine": CPU | {"shard": True, "recompute": True}},
    "stopped": {"engine": CPU, "stop": 20},
    "other_seed": {"engine": CPU, "recipe": {"seed": 4}},
    "half": {"engine": CPU, "recipe": {"precision": "bf16"}},
    "joint": {"engine": CPU | {"shard": True}, "kind": "mmdit"},
    "joint_stopped": {"engine": CPU | {"shard": True}, "kind": "mmdit", "stop": 20},
    "joint_resumed": {"engine": CPU | {"shard": True}, "kind": "mmdit", "folder": "joint_stopped"},
}


class Finished(NamedTuple):
    """What a run came to."""

    ema: dict[str, Tensor]
    reports: list[Progress]


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One process."""
    run = Run(tmp_path_factory.mktemp("alone"))
    return Finished(run().ema, run.reports)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left; one of their runs continued from a checkpoint of one process."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(KeyboardInterrupt):
        Run(folder / "continued")(stop_at(15))
    runs = {
        name: {"recipe": {}, "stop": None, "kind": "dit", "folder": None} | options
        for name, options in RUNS.items()
    }
    (folder / "runs.json").write_text(json.dumps(runs), "utf-8")
    run_group(folder)
    return folder


@pytest.mark.parametrize("name", ["replicas", "sharded", "continued"])
def test_two_processes_train_the_expert_and_the_loss_curve_of_one(
    two: Path, alone: Finished, name: str
) -> None:
    weights = load_file(two / f"{name}.safetensors")
    assert apart(weights, alone.ema) < TOLERANCE
    assert apart(load_file(two / "other_seed.safetensors"), alone.ema) > 100 * TOLERANCE
    reports = [(report.step, report.loss) for report in alone.reports]
    curve = [tuple(pair) for pair in json.loads((two / f"{name}.json").read_text())]
    expected = reports[1:] if name == "continued" else reports
    assert [step for step, _ in curve] == [step for step, _ in expected]
    assert [loss for _, loss in curve] == pytest.approx([loss for _, loss in expected], rel=1e-5)


def test_sharded_text_expert_resumes_to_the_same_bytes_and_is_that_of_one_process(
    two: Path, tmp_path: Path
) -> None:
    sharded = load_file(two / "joint.safetensors")
    assert same_bytes(load_file(two / "joint_resumed.safetensors"), sharded)
    one = Run(tmp_path, model=make_network("mmdit"), labels=make_texts("mmdit"))().ema
    assert apart(sharded, one) < TOLERANCE
    assert apart(make_network("mmdit").state_dict(), one) > 100 * TOLERANCE


def test_checkpoint_of_two_processes_continues_in_one(
    two: Path, alone: Finished, tmp_path: Path
) -> None:
    shutil.copytree(two / "stopped", tmp_path / "stopped")
    questions: list[int] = []
    ema = Run(tmp_path / "stopped")(lambda: bool(questions.append(1))).ema
    assert len(questions) == 10
    assert apart(ema, alone.ema) < TOLERANCE


def test_two_processes_in_bf16_train_another_expert_of_the_same_precision(
    two: Path, tmp_path: Path
) -> None:
    half = load_file(two / "half.safetensors")
    one = Run(tmp_path, settings(precision="bf16"))().ema
    full = load_file(two / "replicas.safetensors")
    assert apart(half, one) < apart(half, full) / 2
    assert all(value.dtype == torch.float32 for value in half.values())


@pytest.mark.parametrize("kind", ["dit", "mmdit"])
def test_expert_in_bf16_is_near_that_in_float32_and_kept_in_float32(
    tmp_path: Path, kind: str
) -> None:
    def run(folder: Path, precision: str) -> dict[str, Tensor]:
        return Run(
            folder, settings(precision=precision), model=make_network(kind), labels=make_texts(kind)
        )().ema

    half = run(tmp_path / "half", "bf16")
    full = run(tmp_path / "full", "fp32")
    assert all(value.dtype == torch.float32 for value in half.values())
    assert 0 < apart(half, full) < apart(dict(make_network(kind).state_dict()), full)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_batch_in_parts_trains_the_same_expert_even_when_the_parts_differ_in_size(
    alone: Finished, tmp_path: Path, parts: int
) -> None:
    run = Run(tmp_path, engine=Engine(device="cpu", accumulate=parts))
    assert apart(run().ema, alone.ema) < TOLERANCE
    assert [report.loss for report in run.reports] == pytest.approx(
        [report.loss for report in alone.reports], rel=1e-5
    )


def test_process_alone_is_refused_where_several_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SetupError, check=has_subject("training.processes")):
        Run(tmp_path, engine=Engine(device="cpu", processes=2))()
    assert Run(tmp_path, engine=Engine(device="cpu", processes="auto"))().steps == 30


def test_batch_in_more_parts_than_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, check=has_subject("training.accumulate")):
        Run(tmp_path, engine=Engine(device="cpu", accumulate=9))()


def test_recomputed_blocks_train_the_same_bytes_and_run_their_forward_pass_twice(
    alone: Finished, tmp_path: Path
) -> None:
    run = Run(tmp_path, engine=Engine(device="cpu", recompute=True))
    calls: list[int] = []
    (block,) = blocks_of(run.model)
    inner = block.get_submodule("project")
    inner.register_forward_hook(lambda *_: calls.append(1))
    assert same_bytes(run().ema, alone.ema)
    counted_for_flops = 1
    assert len(calls) == 2 * 30 + counted_for_flops


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for what is compiled: a process that was killed while it compiled leaves torn files in the common one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch, about parts of itself
@pytest.mark.usefixtures("fresh_cache")
def test_compiled_expert_trains_the_same_weights_up_to_rounding(
    alone: Finished, tmp_path: Path
) -> None:
    compiled = Run(tmp_path, engine=Engine(device="cpu", compile=True))()
    assert 0 < apart(compiled.ema, alone.ema) < TOLERANCE
    assert apart(compiled.ema, build_expert(SMALL, SHAPE, seed=3).state_dict()) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.usefixtures("fresh_cache")
def test_compiled_expert_that_recomputes_blocks_and_leaves_tokens_out_trains_the_same_weights(
    tmp_path: Path,
) -> None:
    recipe = settings(mask_ratio=0.5, unmasked_share=0.2)
    engine = Engine(device="cpu", compile=True, recompute=True, accumulate=3)
    compiled = Run(tmp_path / "compiled", recipe, engine=engine)().ema
    assert 0 < apart(compiled, Run(tmp_path / "plain", recipe)().ema) < TOLERANCE
    assert apart(compiled, Run(tmp_path / "whole")().ema) > 10 * TOLERANCE, (
        "leaving tokens out tells"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused_when_asked_for_and_done_without_when_not(
    alone: Finished, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, check=has_subject("training.device")):
        Run(tmp_path, engine=Engine(device="cuda"))()
    assert same_bytes(Run(tmp_path, engine=Engine())().ema, alone.ema)


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"accumulate": 0}, {"devices": "cpu"}])
def test_engine_with_unknown_fields_or_values_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Engine.model_validate(wrong)
