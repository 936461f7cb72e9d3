"""Experts of every architecture, looked at from their file, against the same loaded whole."""

from pathlib import Path

import pytest
import torch

from ddm.io.tensors import save_tensors
from ddm.models import build_expert, num_parameters
from ddm.models.streamed import StreamedExpert, stored_tensors
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

DIT = Dit(patch=2, hidden=32, depth=2, heads=2)
MMDIT = Mmdit(patch=2, hidden=32, depth=2, heads=2, shared_depth=1)
TEXT = TextCondition(dim=5, max_tokens=4)


def check(
    architecture: Architecture,
    condition: Condition,
    path: Path,
    shape: tuple[int, ...],
    share: float,
) -> None:
    loaded = build_expert(architecture, shape, condition=condition).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in loaded.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    save_tensors(path, dict(loaded.state_dict()))
    stored = stored_tensors(architecture, shape, path, 1 << 24, condition)
    streamed = StreamedExpert(architecture, shape, stored, condition)
    x = torch.randn(5, *shape, generator=generator)
    t_B = torch.linspace(0, 1, 5)
    with torch.no_grad():
        torch.testing.assert_close(streamed(x, t_B), loaded(x, t_B), rtol=1e-4, atol=1e-5)
        assert float((loaded(x, t_B) - loaded(x, t_B.flip(0))).abs().max()) > 1e-3
    assert 0 <= streamed.resident_bytes < share * 4 * num_parameters(loaded)


@pytest.mark.parametrize(
    ("architecture", "condition"),
    [(DIT, NoCondition()), (DIT, ClassCondition(num_classes=3)), (DIT, TEXT), (MMDIT, TEXT)],
    ids=["dit", "dit class", "dit text", "mmdit text"],
)
def test_streamed_transformer_answers_as_the_loaded_one_and_keeps_next_to_nothing_in_memory(
    architecture: Architecture, condition: Condition, tmp_path: Path
) -> None:
    check(architecture, condition, tmp_path / "expert.safetensors", (3, 4, 6), share=0.01)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 8, 8, 4)], ids=["2D", "3D"])
def test_streamed_unet_answers_as_the_loaded_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    unet = Unet(
        channels=(8, 16), attention=(False, True), num_res_blocks=1, head_channels=8, norm_groups=4
    )
    check(unet, NoCondition(), tmp_path / "expert.safetensors", shape, share=1.01)
