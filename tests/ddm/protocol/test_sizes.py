"""Sizes that were computed from numbers alone are those of the networks that are then built."""

import pytest
import torch

from ddm.encoders.autoencoder import build_autoencoder
from ddm.models import empty_expert, num_parameters
from ddm.models.adaptation import adapt
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    Shape,
    TextCondition,
    TransformerSize,
    Unet,
)
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.learning import LoraAdaptation
from ddm.protocol.sizes import (
    autoencoder_size,
    lora_parameters,
    network_size,
    perceptron_parameters,
    token_router_size,
)

NONE, CLASS, TEXT = (
    NoCondition(),
    ClassCondition(num_classes=10),
    TextCondition(dim=24, max_tokens=5),
)
UNETS = (
    Unet(channels=(8,), attention=(False,), num_res_blocks=1, head_channels=4, norm_groups=4),
    Unet(
        channels=(8, 16), attention=(False, True), num_res_blocks=2, head_channels=8, norm_groups=4
    ),
    Unet(
        channels=(8, 8, 24),
        attention=(True, False, True),
        num_res_blocks=3,
        head_channels=8,
        norm_groups=4,
    ),
    Unet(
        channels=(16, 8), attention=(False, False), num_res_blocks=1, head_channels=8, norm_groups=8
    ),
)
EXPERTS: list[tuple[Architecture, Shape, Condition]] = [
    *(
        (Dit(patch=patch, hidden=hidden, depth=depth, heads=heads), (3, 16, 8), condition)
        for patch, hidden, depth, heads in (
            (1, 8, 1, 2),
            (2, 48, 3, 4),
            (4, 64, 2, 1),
            (8, 12, 5, 6),
        )
        for condition in (NONE, CLASS, TEXT)
    ),
    *(
        (Dit(patch=2, hidden=48, depth=3, heads=4, qk_norm=True), (3, 16, 8), condition)
        for condition in (NONE, TEXT)
    ),
    *(
        (Mmdit(patch=2, hidden=32, depth=depth, heads=4, shared_depth=shared), (4, 8, 8), TEXT)
        for depth, shared in ((1, 0), (3, 0), (3, 1), (4, 4), (1, 1))
    ),
    *((unet, (2, 16, 8), condition) for unet in UNETS for condition in (NONE, CLASS, TEXT)),
    *((unet, (1, 8, 8, 4), condition) for unet in UNETS for condition in (NONE, CLASS)),
]


@pytest.mark.parametrize(("architecture", "shape", "condition"), EXPERTS)
def test_parameters_of_an_expert_are_counted_exactly(
    architecture: Architecture, shape: Shape, condition: Condition
) -> None:
    with torch.device("meta"):
        built = empty_expert(architecture, shape, condition)
    size = network_size(architecture, shape, condition)
    assert size.parameters == num_parameters(built)
    assert size.buffers == sum(b.numel() for name, b in built.named_buffers() if "position" in name)
    assert size.widest <= size.alive


@pytest.mark.parametrize(("architecture", "shape", "condition"), EXPERTS)
def test_parameters_of_a_low_rank_adaptation_are_counted_exactly(
    architecture: Architecture, shape: Shape, condition: Condition
) -> None:
    adaptation = LoraAdaptation(rank=3, alpha=1.0)
    with torch.device("meta"):
        adapted = adapt(empty_expert(architecture, shape, condition), adaptation, seed=0)
    added = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    assert lora_parameters(adaptation, architecture, shape, condition) == added


@pytest.mark.parametrize("num_experts", [1, 7])
@pytest.mark.parametrize(
    "condition", [NoCondition(), ClassCondition(num_classes=5), TextCondition(dim=6, max_tokens=3)]
)
def test_parameters_of_the_samples_router_are_counted_exactly(
    num_experts: int, condition: Condition
) -> None:
    sizes, shape = TransformerSize(patch=2, hidden=24, depth=2, heads=3), (3, 8, 4)
    with torch.device("meta"):
        built = TokenRouter(Dit(**sizes.model_dump()), shape, num_experts, condition)
    assert token_router_size(sizes, shape, num_experts, condition).parameters == num_parameters(
        built
    )


@pytest.mark.parametrize("channels", [(8,), (8, 16), (16, 8, 24)])
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 16), (1, 8, 8, 4)])
def test_parameters_of_an_autoencoder_are_counted_exactly(
    channels: tuple[int, ...], attends: bool, shape: Shape
) -> None:
    size = AutoencoderSize(
        channels=channels,
        attention=(attends,) * len(channels),
        latent_channels=3,
        num_res_blocks=2,
        norm_groups=4,
    )
    with torch.device("meta"):
        built = build_autoencoder(size, shape)
    assert autoencoder_size(size, shape).parameters == num_parameters(built)


def test_parameters_of_a_perceptron_are_counted_exactly() -> None:
    layers = [torch.nn.Linear(8, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)]
    assert perceptron_parameters(8, 5, 2, 3) == sum(num_parameters(layer) for layer in layers)


def test_sizes_beyond_any_machine_are_counted_in_no_time() -> None:
    vast = Dit(patch=1, hidden=8192, depth=128, heads=128)
    size = network_size(vast, (1, 65536, 65536), NONE)
    assert size.widest == 8192 * 65536**2
    assert size.training_bytes(2**20) > 2**70
