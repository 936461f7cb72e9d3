"""The same trainings on a GPU: what is learned there is what a CPU learns, up to its rounding. Run with `-m gpu`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddm.errors import SetupError
from ddm.training.config import Engine, TrainingSettings
from ddm.training.distributed import num_processes
from tests.ddm.training.test_distributed import apart
from tests.ddm.training.test_loop import Run, settings
from tests.support.group_program import make_network, make_texts
from tests.support.jobs import SmallJob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TOLERANCE = 1e-3  # of weights of about 0.1 after 30 steps; kernels of a GPU add in another order


def trained(folder: Path, kind: str, engine: Engine, **recipe: object) -> dict[str, Tensor]:
    return Run(
        folder, settings(**recipe), model=make_network(kind), labels=make_texts(kind), engine=engine
    )().ema


@pytest.mark.parametrize("kind", ["dit", "mmdit"])
@pytest.mark.parametrize(
    "asked", [{}, {"recompute": True}, {"accumulate": 2}, {"compile": True}], ids=str
)
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch, about parts of itself
@pytest.mark.filterwarnings("default:TensorFloat32:UserWarning")  # the recipe says float32
def test_gpu_trains_the_expert_of_a_cpu(
    tmp_path: Path, kind: str, asked: dict[str, object]
) -> None:
    there = trained(tmp_path / "gpu", kind, Engine.model_validate({"device": "cuda"} | asked))
    here = trained(tmp_path / "cpu", kind, Engine(device="cpu"))
    assert all(value.device.type == "cpu" for value in there.values())
    assert apart(there, here) < TOLERANCE
    assert apart(dict(make_network(kind).state_dict()), here) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", ["dit", "mmdit"])
def test_gpu_trains_in_bf16_and_keeps_float32(tmp_path: Path, kind: str) -> None:
    half = trained(tmp_path / "half", kind, Engine(device="cuda"), precision="bf16")
    full = trained(tmp_path / "full", kind, Engine(device="cuda"))
    assert all(
        value.dtype == torch.float32 and bool(value.isfinite().all()) for value in half.values()
    )
    assert 0 < apart(half, full) < apart(dict(make_network(kind).state_dict()), full)


def test_auto_is_one_process_a_gpu_and_more_are_refused() -> None:
    assert num_processes(Engine(processes="auto")) == NUM_GPUS
    assert num_processes(Engine(processes="auto", device="cpu")) == 1
    with pytest.raises(SetupError, match="training.processes"):
        num_processes(Engine(processes=NUM_GPUS + 1))


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_train_the_expert_of_one_process(tmp_path: Path, shard: bool) -> None:
    def run(folder: Path, engine: Engine) -> dict[str, Tensor]:
        trial = SmallJob(folder, TrainingSettings.model_validate(engine.model_dump()))
        trial()
        return load_file(trial.expert)

    two = run(tmp_path / "two", Engine(device="cuda", processes=2, shard=shard))
    assert apart(two, run(tmp_path / "one", Engine(device="cuda"))) < TOLERANCE
