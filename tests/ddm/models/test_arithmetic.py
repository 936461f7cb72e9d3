"""The arithmetic of sampled experts: what is lowered, what stays, and what a device refuses."""

import copy
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import SetupError
from ddm.models import build_expert
from ddm.models.arithmetic import Arithmetic, why_not_compiled
from ddm.protocol.architecture import Dit
from tests.support.errors import has_subject

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)


def network() -> nn.Module:
    model = (
        build_expert(Dit(patch=2, hidden=32, depth=2, heads=2), SHAPE).eval().requires_grad_(False)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():  # a fresh model answers 0 everywhere
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, *SHAPE, generator=generator), torch.rand(4, generator=generator)


def test_kept_bfloat16_weights_answer_as_autocast_would_to_the_byte() -> None:
    plain = network()
    x_t = inputs()
    lowered = copy.deepcopy(plain)
    call = Arithmetic("bfloat16").prepare(lowered)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(*x_t).float()
        answer = call(*x_t)
        full = plain(*x_t)
    assert answer.dtype == torch.float32
    assert torch.equal(answer, expected)
    assert 0 < float((answer - full).norm() / full.norm()) < 0.05
    products = [module for module in lowered.modules() if isinstance(module, nn.Linear)]
    assert all(module.weight.dtype == torch.bfloat16 for module in products)
    assert {buffer.dtype for buffer in lowered.buffers()} == {torch.float32}, (
        "times and positions stay as they are"
    )


def test_float32_is_the_network_itself() -> None:
    plain = network()
    assert Arithmetic().prepare(plain) is plain


def test_device_refuses_what_it_does_not_have() -> None:
    Arithmetic("bfloat16").check(CPU)
    for dtype in ("tf32", "float16"):
        with pytest.raises(SetupError, check=has_subject("dtype")):
            Arithmetic(dtype).check(CPU)


def test_products_of_float32_are_rounded_only_where_tf32_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # set back afterwards
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    try:
        Arithmetic("tf32").configure_torch()
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        Arithmetic().configure_torch()
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32


def test_missing_compiler_is_told_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(network: nn.Module) -> nn.Module:
        raise RuntimeError("Failed to find C++ compiler.\nPlease specify one.")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
    assert why_not_compiled(CPU) == "Failed to find C++ compiler."


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_expert_answers_as_an_eager_one() -> None:
    if why := why_not_compiled(CPU):
        pytest.skip(f"torch cannot compile here: {why}")
    plain = network()
    x_t = inputs()
    with torch.inference_mode():
        answer = Arithmetic(compile=True).prepare(plain)(*x_t)
        torch.testing.assert_close(answer, plain(*x_t), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_torch_compiles_into_no_folder_that_another_user_could_have_made_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself torch loads libraries from a folder in /tmp that bears the user's name."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    Arithmetic("float32", compile=True).prepare(nn.Linear(1, 1))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.iterdir())
