"""Experts that start from a public one: what is added, what stays, and that the merged expert is the trained one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import SetupError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.models import build_expert, expected_tensors
from ddm.models.adaptation import LoraLinear, adapt, merged
from ddm.protocol.architecture import Condition, Dit, Mmdit, NoCondition, TextCondition
from ddm.protocol.learning import Adaptation, FullAdaptation, LoraAdaptation, PartialAdaptation
from tests.ddm.training.test_loop import SHAPE, SMALL, Run, images, settings
from tests.support.errors import has_subject

LORA = LoraAdaptation(rank=2, alpha=6.0)
PARTIAL = PartialAdaptation(trained=("blocks.0.up", "head.bias"))
TEXT = TextCondition(dim=3, max_tokens=2)
JOINT = Mmdit(patch=2, hidden=16, depth=2, heads=2, shared_depth=1)


def public_expert(
    seed: int = 9, architecture: Dit | Mmdit = SMALL, condition: Condition = NoCondition()
) -> nn.Module:
    """Weights that answer something, as trained ones do."""
    expert = build_expert(architecture, SHAPE, condition=condition, seed=seed)
    with torch.no_grad():
        for weight in expert.parameters():
            weight.add_(
                0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            )
    return expert


def weights(expert: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in expert.state_dict().items()}


def trained(folder: Path, adaptation: Adaptation) -> dict[str, Tensor]:
    run = Run(folder, settings(), model=adapt(public_expert(), adaptation, seed=1))
    return run().ema


def test_lora_adds_the_scaled_product_of_its_factors_and_nothing_of_higher_rank() -> None:
    layer = nn.Linear(5, 7)
    before = weights(layer)
    lora = LoraLinear(layer, rank=2, alpha=6.0)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lora(x), layer(x)), "a fresh one adds nothing"
    with torch.no_grad():
        lora.up_OR.normal_()
    update = torch.stack([lora(e) - layer(e) for e in torch.eye(5)], dim=1)
    assert torch.allclose(update, 3.0 * lora.up_OR @ lora.down_RI, atol=1e-5)
    assert torch.linalg.matrix_rank(update.double(), atol=1e-5) == 2
    assert torch.linalg.matrix_rank(before["weight"].double(), atol=1e-5) == 5


@pytest.mark.parametrize(
    ("architecture", "condition"),
    [(SMALL, NoCondition()), (SMALL, TEXT), (JOINT, TEXT)],
    ids=["dit", "text", "mmdit"],
)
def test_merged_expert_answers_as_the_adapted_one_and_has_the_tensors_of_its_architecture(
    architecture: Dit | Mmdit, condition: Condition, tmp_path: Path
) -> None:
    adapted = adapt(public_expert(9, architecture, condition), LORA, seed=1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if name.endswith("up_OR"):
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    whole = merged(adapted.state_dict(), LORA)
    save_tensors(tmp_path / "whole.safetensors", whole)
    specs = expected_tensors(architecture, SHAPE, condition)
    expert = build_expert(architecture, SHAPE, condition=condition)
    expert.load_state_dict(load_tensors(tmp_path / "whole.safetensors", specs, max_bytes=1 << 24))
    x = images(6)
    t = torch.linspace(0.1, 0.9, 6)
    inputs = (x, t) if condition.kind == "none" else (x, t, torch.randn(6, 2, 3))
    base = public_expert(9, architecture, condition)
    with torch.no_grad():
        assert torch.allclose(expert(*inputs), adapted(*inputs), atol=1e-5)
        assert not torch.allclose(base(*inputs), adapted(*inputs), atol=1e-2)


def test_lora_trains_its_factors_alone_and_the_released_update_has_their_rank(
    tmp_path: Path,
) -> None:
    base = weights(public_expert())
    ema = trained(tmp_path, LORA)
    for name, value in ema.items():
        if not name.endswith(("up_OR", "down_RI")):
            assert torch.equal(value, base[name.replace(".frozen.", ".")]), name
    whole = merged(ema, LORA)
    assert whole.keys() == base.keys()
    ranks = {
        name: int(torch.linalg.matrix_rank((whole[name] - base[name]).double(), atol=1e-6))
        for name in base
        if base[name].dim() == 2
    }
    assert set(ranks.values()) == {2}
    free = trained(tmp_path / "full", FullAdaptation())
    assert (
        torch.linalg.matrix_rank(
            (free["blocks.0.up.weight"] - base["blocks.0.up.weight"]).double(), atol=1e-6
        )
        > 2
    )


def test_partial_adaptation_trains_the_named_weights_and_leaves_every_other_byte(
    tmp_path: Path,
) -> None:
    base = weights(public_expert())
    whole = merged(trained(tmp_path, PARTIAL), PARTIAL)
    changed = {name for name in base if not torch.equal(base[name], whole[name])}
    assert changed == {"blocks.0.up.weight", "blocks.0.up.bias", "head.bias"}
    assert whole.keys() == base.keys()


@pytest.mark.parametrize("prefix", ["blocks.7", "block", "head.weigh"])
def test_partial_adaptation_that_names_no_weight_is_refused(prefix: str) -> None:
    with pytest.raises(SetupError, check=has_subject("plan, adaptation.trained")):
        adapt(public_expert(), PartialAdaptation(trained=("head", prefix)), seed=0)


def test_new_weights_depend_on_the_seed_alone_and_leave_the_random_state() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, same, other = (weights(adapt(public_expert(), LORA, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.down_RI"], other["head.down_RI"])
