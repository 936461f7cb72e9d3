"""Sizes that are known before a network has any memory are those of the real network, and vast ones cost nothing."""

import resource
import time
from importlib import import_module
from typing import get_args

import pytest
from torch import nn

from ddm.models import build_expert, network_size
from ddm.models.adaptation import adapt, num_added_parameters
from ddm.models.network import ExpertNetwork
from ddm.protocol.architecture import (
    Architecture,
    ArchitectureKind,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    Shape,
    TextCondition,
    Unet,
)
from ddm.protocol.learning import FullAdaptation, LoraAdaptation

NONE = NoCondition()
CLASS = ClassCondition(num_classes=10)
TEXT = TextCondition(dim=24, max_tokens=5)
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
def test_size_of_an_expert_is_that_of_the_real_network(
    architecture: Architecture, shape: Shape, condition: Condition
) -> None:
    network = build_expert(architecture, shape, condition=condition)
    assert isinstance(network, ExpertNetwork)
    size = network_size(architecture, shape, condition)
    assert size.bytes == sum(weight.nbytes for weight in network.state_dict().values())
    assert size.parameters == sum(weight.numel() for weight in network.parameters())
    assert size.buffers == sum(buffer.numel() for buffer in network.buffers())
    assert size.activations == network.activations()
    assert size.activations.widest <= size.activations.forward


@pytest.mark.parametrize(("architecture", "shape", "condition"), EXPERTS)
def test_numbers_that_a_low_rank_adaptation_adds_are_those_of_the_real_network(
    architecture: Architecture, shape: Shape, condition: Condition
) -> None:
    adaptation = LoraAdaptation(rank=3, alpha=1.0)
    network = build_expert(architecture, shape, condition=condition)
    num_layers = sum(isinstance(module, nn.Linear) for module in network.modules())
    assert num_layers
    adapted = adapt(network, adaptation, seed=0)
    added = [weight for weight in adapted.parameters() if weight.requires_grad]
    assert len(added) == 2 * num_layers
    assert num_added_parameters(adaptation, architecture, shape, condition) == sum(
        weight.numel() for weight in added
    )


def test_adaptation_without_factors_adds_nothing() -> None:
    architecture = Dit(patch=2, hidden=48, depth=3, heads=4)
    assert num_added_parameters(FullAdaptation(), architecture, (3, 16, 8), NONE) == 0


SMALL: dict[str, dict[str, object]] = {
    "dit": {"patch": 2, "hidden": 8, "depth": 1, "heads": 2},
    "mmdit": {"patch": 2, "hidden": 8, "depth": 1, "heads": 2},
    "unet": {"channels": (4,), "attention": (True,), "head_channels": 4, "norm_groups": 2},
}
VAST: list[tuple[Architecture, Shape]] = [
    (Dit(patch=1, hidden=8192, depth=128, heads=128), (65536, 65536, 65536)),
    (Mmdit(patch=1, hidden=8192, depth=128, heads=128), (65536, 65536, 65536)),
    (
        Unet(channels=(4096,) * 8, attention=(True,) * 8, num_res_blocks=16),
        (65536, 65536, 65536, 65536),
    ),
]


@pytest.mark.measured
@pytest.mark.parametrize(
    ("architecture", "shape"), VAST, ids=lambda value: getattr(value, "kind", "")
)
def test_sizes_beyond_any_machine_are_counted_in_seconds_and_little_memory(
    architecture: Architecture, shape: Shape
) -> None:
    condition = TextCondition(dim=16384, max_tokens=4096)
    # What torch loads once for networks without memory is no cost of this one.
    network_size(type(architecture).model_validate(SMALL[architecture.kind]), (1, 8, 8), TEXT)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin_s = time.process_time()
    size = network_size(architecture, shape, condition)
    assert time.process_time() - begin_s < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10
    assert size.bytes > 2**38
    assert size.activations.widest > 2**40
    assert size.training_bytes(2**20) > 2**60


def test_every_value_of_the_widest_layer_is_counted() -> None:
    architecture = Dit(patch=1, hidden=8192, depth=128, heads=128)
    size = network_size(architecture, (1, 65536, 65536), NONE)
    assert size.activations.widest == 8192 * 65536**2


def test_every_kind_of_architecture_has_one_document_and_one_network() -> None:
    union, _ = get_args(Architecture)
    documents = {document.model_fields["kind"].default: document for document in get_args(union)}
    assert set(documents) == set(get_args(ArchitectureKind))
    for kind in documents:
        network = import_module(f"ddm.models.{kind}").NETWORK
        assert issubclass(network, ExpertNetwork)
