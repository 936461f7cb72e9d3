"""Attention in bf16 on a CPU avoids torch's fused one in bf16 while training; here it is held against it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm.models.layers import attend

B = 3
A = 2
HEAD = 16


def inputs(tokens: int, others: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = (tokens, others, others)
    return [torch.randn(B, A, n, HEAD, generator=random).to(dtype).requires_grad_() for n in sizes]


def keep_some(tokens: int, others: int) -> Tensor:
    mask = torch.rand(B, 1, tokens, others, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True  # a token that may look at nothing has no answer
    return mask


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes in which torch's fused attention answered, call by call."""
    calls: list[torch.dtype] = []
    real = F.scaled_dot_product_attention

    def watched(*arguments: Tensor, **options: Tensor | None) -> Tensor:
        calls.append(arguments[0].dtype)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return calls


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "others"), [(9, 9), (9, 5), (1, 1), (128, 128), (9, 129)])
def test_training_in_bf16_attends_as_in_float64(
    tokens: int, others: int, masked: bool, fused: list[torch.dtype]
) -> None:
    mask = keep_some(tokens, others) if masked else None
    narrow = inputs(tokens, others, torch.bfloat16)
    exact = inputs(tokens, others, torch.bfloat16)
    out = attend(narrow[0], narrow[1], narrow[2], mask)
    assert fused == ([] if others <= 8 * HEAD else [torch.float32])
    wide = [tensor.double() for tensor in exact]
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask).transpose(1, 2).flatten(2)
    assert out.shape == (B, tokens, A * HEAD)
    assert torch.allclose(out.double(), expected, atol=0.03, rtol=0.02)
    towards = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (out.double() * towards).sum().backward()
    (expected * towards).sum().backward()
    for mine, theirs in zip(narrow, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        error = (
            mine.grad.double() - theirs.grad.double()
        ).norm() / theirs.grad.double().norm().clamp(min=1e-3)
        assert error < 0.03


def test_fused_attention_answers_elsewhere(fused: list[torch.dtype]) -> None:
    attend(*inputs(9, 9, torch.float32))
    with torch.no_grad():
        attend(*inputs(9, 9, torch.bfloat16))
    assert fused == [torch.float32, torch.bfloat16]
