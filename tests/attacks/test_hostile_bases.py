"""An attack by the base of a plan: a silo refuses it within bounds, or trains on it without telling of one image."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from ddm.errors import ArchipelagoError, DocumentError, PolicyError, TensorFileError
from ddm.io.tensors import save_tensors
from ddm.models import MAX_WEIGHT, build_expert
from ddm.protocol.architecture import Dit
from tests.support.dishonest_aggregator import (
    PUBLIC,
    SIDE,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
)

SMALL = {"kind": "dit", "patch": 2, "hidden": 8, "depth": 1, "heads": 2}
ADAPTATION = {"kind": "full", "base": "plan/base.safetensors"}


def with_base(content: bytes, **changes: object) -> UnsignedPlan:
    """A plan that a site would take, but for its base."""
    plan = UnsignedPlan.honest(clusters_around(PUBLIC[:8]))
    plan.document["expert"] |= {"architecture": SMALL, "adaptation": ADAPTATION} | changes
    plan.contents["base"] = content
    return plan


def encoded(folder: Path, tensors: dict[str, torch.Tensor]) -> bytes:
    path = folder / "made.safetensors"
    save_tensors(path, tensors)
    return path.read_bytes()


def honest_weights() -> dict[str, torch.Tensor]:
    return build_expert(Dit.model_validate(SMALL), (1, SIDE, SIDE), seed=1).state_dict()


def test_honest_base_is_accepted_and_stated(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    accepted = aggregator.offer(with_base(encoded(tmp_path, honest_weights())))
    assert accepted.plan.base is not None
    assert accepted.plan.base.digest == accepted.plan.file("plan/base.safetensors").digest


def _spoiled(folder: Path, fault: str) -> bytes:
    weights = honest_weights()
    match fault:
        case "not finite":
            weights["head.weight"][0, 0] = torch.inf
        case "beyond the bound":
            weights["head.weight"][0, 0] = 2 * MAX_WEIGHT
        case "another shape":
            weights["head.weight"] = torch.zeros(3, 3)
        case "poisoned name":
            weights["../../private/silo.key"] = torch.zeros(1)
        case "tensor missing":
            del weights["head.bias"]
        case "pickle":
            return pickle.dumps(weights["head.bias"].tolist())
        case "header beyond the file":
            return (1 << 40).to_bytes(8, "little") + b"{}"
        case "tensor beyond the file":
            header = {"a": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 1 << 32]}}
            text = json.dumps(header).encode()
            return len(text).to_bytes(8, "little") + text
    return encoded(folder, weights)


@pytest.mark.parametrize(
    "fault",
    [
        "not finite",
        "beyond the bound",
        "another shape",
        "poisoned name",
        "tensor missing",
        "pickle",
        "header beyond the file",
        "tensor beyond the file",
    ],
)
def test_base_is_refused_when_its_file_is_spoiled(
    aggregator: DishonestAggregator, tmp_path: Path, fault: str
) -> None:
    with pytest.raises(TensorFileError) as refusal:
        aggregator.offer(with_base(_spoiled(tmp_path, fault)))
    # What a site says of a plan leaves it, and the names in a file are its sender's text.
    assert "silo.key" not in str(refusal.value)


def test_base_is_refused_before_it_is_opened_when_it_is_larger_than_the_plan_implies(
    aggregator: DishonestAggregator,
) -> None:
    with pytest.raises(PolicyError) as refusal:
        aggregator.offer(with_base(bytes(3 << 20)))
    assert "bytes of plan/base.safetensors" in refusal.value.subject


def test_base_that_is_not_stated_is_refused(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    plan = with_base(encoded(tmp_path, honest_weights()))

    def without_statement(data: bytes) -> bytes:
        document = json.loads(data)
        del document["base"]
        return json.dumps(document).encode()

    plan_id = aggregator.deliver(plan, rewrite=without_statement)
    with pytest.raises(DocumentError):
        aggregator.receive(plan_id)


def test_base_whose_licence_the_plan_does_not_keep_is_refused(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    """The attack: an operator whose program compares no licences publishes under terms that the base forbids."""
    plan = with_base(encoded(tmp_path, honest_weights()))

    def with_licence(data: bytes) -> bytes:
        document = json.loads(data)
        document["base"]["licence"] = "CC-BY-NC-4.0"
        return json.dumps(document).encode()

    plan_id = aggregator.deliver(plan, rewrite=with_licence)
    with pytest.raises(DocumentError):
        aggregator.receive(plan_id)


def test_base_with_another_digest_than_the_stated_one_is_refused(
    aggregator: DishonestAggregator, tmp_path: Path
) -> None:
    plan = with_base(encoded(tmp_path, honest_weights()))

    def with_other_digest(data: bytes) -> bytes:
        document = json.loads(data)
        document["base"]["digest"] = "0" * 64
        return json.dumps(document).encode()

    plan_id = aggregator.deliver(plan, rewrite=with_other_digest)
    with pytest.raises(ArchipelagoError):
        aggregator.receive(plan_id)
