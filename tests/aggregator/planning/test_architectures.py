"""Sizes by name: what a recipe may write, and the numbers that its plan holds; what large experts cost."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from aggregator.planning.cost import MAX_TIMED_FLOPS, estimate_cost
from aggregator.planning.recipe import Recipe
from ddm.models import count_flops, num_parameters, training_flops
from ddm.models import empty_expert as empty
from ddm.protocol.architecture import Dit, Mmdit, TextCondition
from ddm.protocol.learning import Expert
from ddm.protocol.plan import Plan
from ddm.system.console import human_flops
from tests.support.documents import plan_document, to_bytes
from tests.support.federation import recipe


def recipe_with(**architecture: Any) -> Recipe:
    """The recipe of a tiny federation, with another network."""
    changed = recipe().model_dump()
    return Recipe.model_validate(
        changed | {"expert": changed["expert"] | {"architecture": architecture}}
    )


def test_named_size_becomes_the_numbers_that_a_plan_holds() -> None:
    named = recipe_with(kind="dit", size="XL/2")
    numbers = {"patch": 2, "hidden": 1152, "depth": 28, "heads": 16}
    assert type(named.expert) is Expert and named.expert.architecture == Dit(**numbers)
    assert named == recipe_with(kind="dit", **numbers)
    large = recipe_with(kind="mmdit", size="3B/2").expert.architecture
    assert large == Mmdit(patch=2, hidden=2560, depth=30, heads=20, shared_depth=30)
    gridded = recipe_with(kind="dit", size="S/2", position_grid=(2, 2)).expert.architecture
    assert gridded == Dit(patch=2, hidden=384, depth=12, heads=6, position_grid=(2, 2))
    third = recipe_with(kind="mmdit", size="d24/4").expert.architecture
    assert third == Mmdit(patch=4, hidden=1536, depth=24, heads=24)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"kind": "dit", "size": "XXL/2"}, "size must be S, B, L or XL"),
        ({"kind": "dit", "size": "XL"}, "size must be"),
        ({"kind": "mmdit", "size": "XL/2"}, "size must be d15, d18"),
        ({"kind": "dit", "size": "B/2", "depth": 3}, "leave out depth"),
        ({"kind": "mmdit", "size": "3B/2", "shared_depth": 2}, "leave out shared_depth"),
        ({"kind": "dit", "patch": 2}, "hidden"),
        ({"kind": "dit", "size": 2}, "string"),
        ({"kind": "unet", "size": "B/2"}, "size"),
    ],
)
def test_size_that_is_unknown_or_given_twice_is_refused(
    architecture: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        recipe_with(**architecture)


def test_plan_with_the_name_of_a_size_is_refused() -> None:
    document = plan_document()
    document["expert"]["architecture"] = {"kind": "dit", "size": "B/2"}
    with pytest.raises(Exception, match="architecture"):
        Plan.parse(to_bytes(document), subject="plan")


def test_published_sizes_have_the_parameters_that_their_names_say() -> None:
    text = TextCondition(dim=4096, max_tokens=77)
    billions = num_parameters(empty(Mmdit.published_size("3B/2"), (16, 32, 32), text)) / 1e9
    assert billions == pytest.approx(3.0, abs=0.01)
    assert num_parameters(
        empty(Mmdit.published_size("d24/2"), (16, 32, 32), text)
    ) / 1e9 == pytest.approx(2.0, abs=0.05)


def test_forward_flops_are_those_that_the_paper_states_and_a_third_of_training() -> None:
    """Peebles and Xie 2023, table 4: B/2 takes 23.0 Gflops of multiplications and additions together."""
    forward, both = count_flops(Dit.published_size("B/2"), (4, 32, 32))
    assert forward / 2e9 == pytest.approx(23.0, rel=0.02)
    assert both / forward == pytest.approx(3.0, rel=0.01)
    assert training_flops(Dit.published_size("B/2"), (4, 32, 32), 5) == 5 * both


def test_expert_too_large_to_try_is_estimated_and_a_small_one_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aggregator.planning.cost.sketch_noise_level", lambda plan, sketch: None)
    document = plan_document()
    small = Plan.parse(to_bytes(document), subject="plan")
    seen = torch.randn(80, *small.expert_shape, generator=torch.Generator().manual_seed(0))
    timed = estimate_cost(small, None, seen)
    assert timed.timed and timed.train_s > 0
    sizes = {"patch": 1, "hidden": 4096, "depth": 3, "heads": 16}
    document["expert"]["architecture"] = {"kind": "dit", **sizes}
    document["limits"]["expert_bytes"] = 2**40
    large = estimate_cost(Plan.parse(to_bytes(document), subject="plan"), None, seen)
    training = small.expert.training
    assert not large.timed
    assert large.training_flops * training.batch_size * 12 > MAX_TIMED_FLOPS
    assert (
        large.expert_bytes
        == 4 * large.parameters
        == 4 * num_parameters(empty(Dit(**sizes), small.expert_shape))
    )
    assert large.train_s > 100 * timed.train_s
    assert (
        large.work.memory_bytes > 6 * large.expert_bytes > large.sampling_bytes > large.expert_bytes
    )


def test_flops_are_written_for_people() -> None:
    assert human_flops(1609381457920) == "1.61 TFLOP"
    assert human_flops(950) == "950 FLOP"
    assert human_flops(3.1e21) == "3.1e+03 EFLOP"
