"""Training on from a silo's own expert of an earlier plan, at a higher resolution: what it gains, what is verified."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from aggregator.planning.sign import sign_plan
from ddm.errors import DigestError, MissingFileError, ReplayError, SetupError
from ddm.io.tensors import load_tensors
from ddm.models import build_expert, expected_tensors
from ddm.protocol.architecture import Dit
from ddm.protocol.continuation import check_continuation, grid_of
from ddm.protocol.learning import Training
from ddm.protocol.plan import Plan
from ddm.protocol.submission import submission_path
from ddm.training.batches import Examples
from ddm.training.loop import TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.planned import PlannedExpert
from silo.plan.acceptance import load_accepted
from silo.plan.own_experts import own_experts
from tests.conftest import PublishedRelease
from tests.support.federation import PASSPHRASE, POLICY, TinyFederation, declare, make_draft, recipe

ARCHITECTURE = Dit(patch=2, hidden=32, depth=2, heads=2)


def blobs(num: int, side: int, seed: int) -> Tensor:
    """One bright blob an image, the same scene at every resolution."""
    centre = torch.rand(num, 2, 1, 1, generator=torch.Generator().manual_seed(seed)) * 0.6 + 0.2
    place = (torch.arange(side) + 0.5) / side
    square = (place[:, None] - centre[:, 0]) ** 2 + (place[None, :] - centre[:, 1]) ** 2
    return (2 * torch.exp(-square / 0.02) - 1)[:, None].float()


def training(num_steps: int) -> Training:
    return Training(
        num_steps=num_steps,
        batch_size=32,
        learning_rate=0.002,
        weight_decay=0.0,
        ema_decay=0.9,
    )


def trained(
    expert: torch.nn.Module, images: Tensor, num_steps: int, folder: Path
) -> dict[str, Tensor]:
    result = train(
        expert,
        Examples(images),
        training(num_steps),
        TrainingObjective(),
        TrainingRun(folder),
    )
    return result.ema


@torch.no_grad()
def loss(architecture: Dit, weights: dict[str, Tensor], images: Tensor) -> float:
    """The mean squared error of the velocity at fixed times and noise."""
    expert = build_expert(architecture, images.shape[1:])
    expert.load_state_dict(weights)
    generator = torch.Generator().manual_seed(9)
    t = torch.rand(len(images), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    x = (1 - t[:, None, None, None]) * images + t[:, None, None, None] * noise
    return float((expert(x, t) - (noise - images)).square().mean())


def test_expert_trained_on_at_twice_the_resolution_is_ahead_of_one_from_random_weights(
    tmp_path: Path,
) -> None:
    small = blobs(256, 8, seed=0)
    large = blobs(256, 16, seed=0)
    held_out = blobs(128, 16, seed=1)
    gridded = ARCHITECTURE.model_copy(update={"position_grid": (4, 4)})
    base = trained(build_expert(ARCHITECTURE, (1, 8, 8)), small, 250, tmp_path / "base")
    known = build_expert(gridded, (1, 16, 16))
    known.load_state_dict(base)
    fine_tuned = trained(known, large, 30, tmp_path / "on")
    fresh = trained(build_expert(gridded, (1, 16, 16)), large, 30, tmp_path / "fresh")
    ahead = loss(gridded, fine_tuned, held_out)
    behind = loss(gridded, fresh, held_out)
    assert ahead < 0.7 * behind
    # The control: without the rescaled places the weights meet positions that they never saw.
    assert loss(gridded, base, held_out) < loss(ARCHITECTURE, base, held_out)


Grown = tuple[TinyFederation, str, str]


@pytest.fixture(scope="module")
def resumed_once(
    published_once: PublishedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Grown:
    """A plan at twice the resolution, in the inbox of a silo that trains on its own expert; and the earlier plan."""
    tiny = published_once.tiny.copy(tmp_path_factory.mktemp("resumed") / "copy")
    site = tiny.sites["east"]
    with np.load(tiny.path / "east.npz") as archive:
        np.savez(
            tiny.path / "east.npz",
            images=archive["images"].repeat(2, -1).repeat(2, -2),
            labels=archive["labels"],
        )
    settings = site.path / "silo.toml"
    settings.write_text(settings.read_text().replace(str(published_once.tiny.path), str(tiny.path)))
    declare(site, {**POLICY, "privacy": {"budget_epsilon": 100.0}})
    public = torch.from_numpy(
        np.random.default_rng(0).uniform(-1, 1, (240, 1, 8, 8)).astype(np.float32)
    )
    scratch = tiny.path / "scratch"
    draft = make_draft(tiny.federation, larger(published_once.plan_id), public, scratch)
    sign_plan(tiny.federation, draft, PASSPHRASE)
    tiny.deliver_plan("east", draft.plan.plan_id)
    return tiny, draft.plan.plan_id, published_once.plan_id


def larger(old_id: str, **changes: object):  # type: ignore[no-untyped-def]
    expert = recipe().expert.model_dump(mode="json") | {
        "adaptation": {"kind": "own", "plan_id": old_id}
    }
    return recipe(
        **({"data": {"shape": [1, 8, 8], "range": [-1.0, 1.0]}, "expert": expert} | changes)
    )


def test_plan_names_each_silos_submission_and_the_places_that_its_expert_knows(
    resumed_once: Grown,
) -> None:
    tiny, plan_id, old_id = resumed_once
    plan, _ = tiny.federation.current_plan()
    own = plan.expert.adaptation
    assert (plan.plan_id, own.kind, own.plan_id, sorted(own.submissions)) == (
        plan_id,
        "own",
        old_id,
        ["east", "north"],
    )
    assert plan.expert.architecture.position_grid == (2, 2)
    old = Plan.parse(
        (tiny.federation.plan_targets(old_id) / "plan.json").read_bytes(), subject="plan"
    )
    assert grid_of(plan) == grid_of(old) == (2, 2)


def test_silo_trains_on_its_own_expert_and_the_submission_is_accepted(
    resumed_once: Grown, tmp_path: Path
) -> None:
    tiny = resumed_once[0].copy(tmp_path / "copy")
    plan_id, old_id = resumed_once[1:]
    settings = tiny.sites["east"].path / "silo.toml"
    settings.write_text(settings.read_text().replace(str(resumed_once[0].path), str(tiny.path)))
    tiny.work("east", until="plan_accepted")
    site = tiny.sites["east"]
    accepted = load_accepted(site, plan_id, tiny.state_of("east").plan_digest or "")
    own = own_experts(site, accepted.plan, "east")
    start = PlannedExpert(accepted.plan, "east", 0, own["east"], site.settings().training).start()
    before = load_tensors(
        site.private / "checkpoints" / old_id / "experts" / "east" / "expert.safetensors",
        None,
        max_bytes=1 << 20,
    )
    assert all(torch.equal(value, before[name]) for name, value in start.state_dict().items())
    assert all(parameter.requires_grad for parameter in start.parameters())
    tiny.work("east")
    tiny.collect("east", plan_id)
    (receipt,) = tiny.take_in()
    assert receipt.verdict.kind == "accepted", receipt.verdict


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        ("expert", DigestError),
        ("no expert", MissingFileError),
        ("submission", MissingFileError),
        ("plan", DigestError),
    ],
)
def test_plan_is_refused_where_the_own_expert_is_not_the_one_that_was_accepted(
    resumed_once: Grown, tmp_path: Path, spoil: str, error: type[Exception]
) -> None:
    tiny = resumed_once[0].copy(tmp_path / "copy")
    old_id = resumed_once[2]
    site = tiny.sites["east"]
    expert = site.private / "checkpoints" / old_id / "experts" / "east" / "expert.safetensors"
    if spoil == "expert":
        data = bytearray(expert.read_bytes())
        data[-1] ^= 1
        expert.unlink()
        expert.write_bytes(data)
    elif spoil == "no expert":
        expert.unlink()
    elif spoil == "submission":
        shutil.rmtree(site.outbox / old_id)
    else:
        path = site.private / "plans" / old_id / "targets" / old_id / "plan.json"
        document = path.read_bytes()
        path.unlink()
        path.write_bytes(document.replace(b'"rank"', b'"Rank"', 1))
    problem = tiny.work("east", until="plan_refused").problem
    assert problem is not None
    assert problem.code == error.exit_code  # type: ignore[attr-defined]
    assert not (site.private / "checkpoints" / resumed_once[1]).exists()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"heads": 4}, "expert.architecture"),
        ({"position_grid": (4, 4)}, "position_grid"),
        ({"objective": {"path": "linear", "prediction": "eps"}}, "objective"),
        ({"partition": {"kind": "random", "min_images": 10, "num_parts": 2}}, "partition"),
    ],
)
def test_expert_is_not_trained_on_where_its_weights_mean_something_else(
    resumed_once: Grown, changes: dict[str, object], field: str
) -> None:
    tiny, _, old_id = resumed_once
    plan, _ = tiny.federation.current_plan()
    old = Plan.parse(
        (tiny.federation.plan_targets(old_id) / "plan.json").read_bytes(), subject="plan"
    )
    check_continuation(old, plan, "east")
    fields = plan.model_dump(mode="json")
    of_expert = {
        name: value for name, value in changes.items() if name in ("heads", "position_grid")
    }
    fields["expert"]["architecture"] |= of_expert
    fields |= {name: value for name, value in changes.items() if name not in of_expert}
    with pytest.raises(ReplayError, match=field):
        check_continuation(old, Plan.model_validate_json(json.dumps(fields)), "east")


def test_recipe_without_an_earlier_expert_of_any_silo_is_refused(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    for silo_id in tiny.sites:
        shutil.rmtree(tiny.federation.accepted / published.plan_id / silo_id)
    public = torch.zeros(240, 1, 8, 8).uniform_(-1, 1)
    with pytest.raises(SetupError, match="accepted submission"):
        make_draft(tiny.federation, larger(published.plan_id), public, tmp_path)
    with pytest.raises(MissingFileError, match="tiny-00000000"):
        make_draft(tiny.federation, larger("tiny-00000000"), public, tmp_path)


def test_submission_of_a_silo_that_does_not_train_is_refused(resumed_once: Grown) -> None:
    fields = resumed_once[0].federation.current_plan()[0].model_dump(mode="json")
    fields["expert"]["adaptation"]["submissions"]["stranger"] = "0" * 64
    with pytest.raises(ValueError, match="submissions must be"):
        Plan.model_validate_json(json.dumps(fields))


def test_weights_of_the_earlier_plan_fit_at_every_size() -> None:
    gridded = ARCHITECTURE.model_copy(update={"position_grid": (4, 4)})
    assert expected_tensors(ARCHITECTURE, (1, 8, 8)) == expected_tensors(gridded, (1, 16, 16))
    assert submission_path("east") == "silos/east/submission.json"
