"""An attack by the base of a plan: a silo refuses it within bounds, or works with it and shows nothing of one image."""

import json
import pickle
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.errors import ArchipelagoError, DocumentError, PolicyError, TensorFileError
from ddm.io.tensors import save_tensors
from ddm.models import MAX_WEIGHT, build_expert
from ddm.protocol.architecture import Dit
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.distributed import training_process
from ddm.training.objective import TrainingObjective
from ddm.training.private import STEPS_PER_CLIP, PrivateSteps, PrivateTraining, sensitivity
from ddm.training.state import TrainingState
from ddm.training.unit_gradients import UnitLoss, unit_gradient
from silo.audit.document import read_report
from silo.audit.holdout import holdout_mask
from silo.config import AUDIT_REPORT
from silo.plan.acceptance import load_accepted
from silo.worker import stages
from tests.support.dishonest_aggregator import (
    PUBLIC,
    SIDE,
    SILO,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
)
from tests.support.federation import POLICY, TinyFederation, cohort, recipe, write_policy
from tests.support.observed import observe
from tests.support.recipes import training

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


WIDE = {"kind": "dit", "patch": SIDE, "hidden": 64, "depth": 1, "heads": 2}
TARGET = np.ones((1, SIDE, SIDE), np.float32)
NUM_IMAGES = 40
NUM_HELD_OUT = 10
AUDIT = {
    "required": True,
    "min_holdout_units": NUM_HELD_OUT,
    # No figure is above 1, so that the verdict of so few units is always the same.
    "max_mia_auc": 1.0,
    "max_mia_tpr": 1.0,
    "max_near_copy_rate": 1.0,
}


def amplifying_weights(large: float = 0.9 * MAX_WEIGHT) -> dict[str, torch.Tensor]:
    """A base that amplifies an image whose mean is above 0.75, by default beyond float32, and no other image.

    The whole image is one token. Two of its values become the image's mean beside a constant, which the normalisation
    leaves in proportion; the block compares it with the threshold. Its modulations are as large as the time's network
    can make them with weights of this size. By default, whatever GELU lets through overflows; the rest is exactly 0.

    Args:
        large: the size of its weights.
    """
    hidden = 64
    weights = build_expert(Dit.model_validate(WIDE), (1, SIDE, SIDE), seed=1).state_dict()
    embed = weights["embed.weight"]
    embed[:4] = 0.0
    embed[2] = large / embed.shape[1]
    embed[3] = -embed[2]
    weights["embed.bias"][:2] = torch.tensor([large, -large])

    weights["time.mlp.0.weight"].zero_()
    weights["time.mlp.0.bias"].fill_(large)
    weights["time.mlp.2.weight"].fill_(large)
    # The parts of a block's modulation: shift, scale and gate of attention, then those of the two-layer network.
    shift, scale, gate = weights["modulation.weight"][3 * hidden : 6 * hidden].split(hidden)
    threshold = 0.75 * sqrt(hidden / 2 / (1 + 0.75**2))
    scale[2] = large / 4
    shift[2] = -threshold * large / 4
    gate[5] = large

    weights["blocks.0.up.weight"].zero_()
    weights["blocks.0.up.weight"][:, 2] = large
    weights["blocks.0.down.weight"].zero_()
    weights["blocks.0.down.weight"][5] = large
    return weights


def write_images(tiny: TinyFederation, target: int | None) -> torch.Tensor:
    """Write the images of the only silo, with the target in one place or in none; return them."""
    made = cohort(NUM_IMAGES, 0.0, seed=5)
    made["images"] = made["images"] * 0.5
    if target is not None:
        made["images"][target] = TARGET
    np.savez(tiny.path / f"{SILO}.npz", **made)  # type: ignore[arg-type]
    return torch.from_numpy(made["images"])


def is_held_out(tiny: TinyFederation, plan_id: str, images_N: torch.Tensor) -> torch.Tensor:
    """Which images the site held out of its training, by their place in the file."""
    site = tiny.sites[SILO]
    digest = str(tiny.state_of(SILO).plan_digest)
    policy = site.policy()
    here = stages.scan_images(site, load_accepted(site, plan_id, digest), policy)
    # The site keeps images in a secret order.
    held = here.images[torch.nonzero(holdout_mask(here, policy))[:, 0]]
    same_NH = (images_N[:, None] == held[None]).flatten(2).all(2)
    return same_NH.any(1)


def test_base_that_overflows_for_one_image_shows_nothing_of_it_in_training_and_audit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: training starts from the base and the audit compares with it; both meet the image, or do not."""
    weights = amplifying_weights()
    save_tensors(tmp_path / "base.safetensors", weights)
    planned = TinyFederation.create(tmp_path / "planned", {SILO: NUM_IMAGES})
    write_policy(planned.sites[SILO], POLICY | {"audit": AUDIT | {"num_samples": 64}})
    described = recipe().model_dump(mode="json", exclude_none=True)["expert"]
    described["architecture"] = WIDE
    described["training"]["num_steps"] = 40
    # Other weights would move by what the base amplifies, and soon overflow for every image.
    described["adaptation"] = {"kind": "partial", "trained": ["head"]}
    chosen = recipe(
        base={"kind": "file", "file": str(tmp_path / "base.safetensors"), "licence": "CC0-1.0"},
        expert=described,
        statistics={
            "unit": "image",
            "total": {"epsilon": 1.0, "delta": 0.0},
            "counts": {"epsilon": 1.0, "num_groups": 4},
        },
        router={"kind": "counts"},
        audit=AUDIT,
    )
    plan_id = planned.sign(chosen)

    images_N = write_images(planned, target=None)
    without = planned.copy(tmp_path / "without")
    observed = {"without": observe(without, SILO, plan_id)}
    assert "no finite gradient" not in caplog.text
    held_N = is_held_out(without, plan_id, images_N)
    assert int(held_N.sum()) == NUM_HELD_OUT

    places = {"learned": int((~held_N).nonzero()[0]), "held out": int(held_N.nonzero()[0])}
    network = build_expert(Dit.model_validate(WIDE), (1, SIDE, SIDE))
    network.load_state_dict(weights)
    for name, place in places.items():
        caplog.clear()
        images_N = write_images(planned, target=place)
        site = planned.copy(tmp_path / name)
        observed[name] = observe(site, SILO, plan_id)
        # The base does tell the image from the others, and training from it meets the image.
        finite_N = network(images_N, torch.zeros(NUM_IMAGES)).isfinite().flatten(1).all(1)
        assert torch.nonzero(~finite_N).tolist() == [[place]]
        assert ("no finite gradient" in caplog.text) == (name == "learned")
        assert bool(is_held_out(site, plan_id, images_N)[place]) == (name == "held out")
        (expert,) = read_report(site.sites[SILO].work_folder(plan_id) / AUDIT_REPORT).experts
        assert expert.num_holdout_units == expert.num_members == NUM_HELD_OUT

    assert observed["learned"] == observed["without"]
    assert observed["held out"] == observed["without"]


def test_base_that_amplifies_the_gradient_of_one_unit_moves_a_private_step_by_no_more_than_the_clip() -> (
    None
):
    """The attack: no value of the base is unusual, and what the expert learns of one unit outweighs all others."""
    architecture = Dit.model_validate(WIDE)
    weights = amplifying_weights(large=100.0)
    # The same at all times. The prediction is the value that the block sets for this image alone.
    weights["time.mlp.2.weight"].zero_()
    weights["time.mlp.2.bias"].fill_(1.0)
    # A small gate, through which other images do not move the block's bias far.
    weights["modulation.weight"][5 * 64 + 5] = 0.01
    weights["head.weight"].zero_()
    weights["head.weight"][:, 5] = 100.0
    assert all(bool((value.abs() <= 0.01 * MAX_WEIGHT).all()) for value in weights.values())
    num_units = 8
    # A unit's draws are one in each eighth of the times, so that one of them is nearly the image itself.
    terms = DpSgd(
        epsilon=8.0, delta=1e-5, clip=1.0, units_per_step=num_units, images_per_unit=1, draws=8
    )
    paid = DpSgdMechanism(noise_multiplier=1.0, rate=1.0, steps=1)
    private = PrivateTraining(terms, paid, torch.arange(num_units), bytes(32))
    images_N = 0.3 * torch.randn(
        num_units, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)
    )
    replaced_N = images_N.clone()
    replaced_N[3] = torch.from_numpy(TARGET)

    norms = []
    gradients = []
    for images in (images_N, replaced_N):
        network = build_expert(architecture, (1, SIDE, SIDE))
        network.load_state_dict(weights)
        state = TrainingState(network, training(), training_process(Engine(device="cpu")), 1)
        steps = PrivateSteps(state, private, Examples(images), TrainingObjective())
        drawn = steps.draw(0)
        loss = UnitLoss(network, state.settings, TrainingObjective())
        gradient, _ = unit_gradient(loss, state.named, drawn[3])
        norms.append(float(torch.cat([part.flatten() for part in gradient.values()]).norm()))
        steps.advance(drawn)
        parts = [weight.grad.flatten() for weight in state.weights if weight.grad is not None]
        gradients.append(torch.cat(parts).double())
    # The control: the image's gradient is far larger than another's, and than the clip.
    assert norms[1] > 100 * norms[0]
    assert norms[1] > 1e6 * terms.clip
    # Noise and the other units' draws are the same, so that the difference is that of the one unit.
    moved = float((gradients[1] - gradients[0]).norm())
    num_weights = len(gradients[0])
    bound = 2 * terms.clip * sensitivity(num_weights) / STEPS_PER_CLIP / num_units
    assert 0 < moved <= bound
