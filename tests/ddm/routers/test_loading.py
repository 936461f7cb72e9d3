import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddm.errors import DigestError, DocumentError, TensorFileError
from ddm.io.tensors import save_tensors
from ddm.protocol.base import File
from ddm.protocol.manifest import PublishedExpert, PublishedRouter
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import Router, posterior
from ddm.routers.calibration import Calibrated
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.learned import LearnedRouter
from ddm.routers.loading import load_router
from ddm.routers.residual import Residual
from ddm.routers.samples import SamplesRouter, fit_samples
from ddm.routers.sketch import Sketch
from tests.support.documents import plan_document
from tests.support.errors import has_subject
from tests.support.router_problems import GROUPS, PATH, clustered_layout, make_problem

RANK = 6
RELEASED = 3
T_R = 0.7
WORLD = make_problem([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]], [60, 40])
SKETCH = Sketch.fit(WORLD.public, WORLD.public_group, RANK, GROUPS, released_rank=RELEASED)
SETTINGS: dict[str, dict[str, Any]] = {
    "counts": {"kind": "counts"},
    "learned": {"kind": "learned", "hidden": 8, "depth": 1, "num_steps": 1},
    "samples": {
        "kind": "samples",
        "patch": 2,
        "hidden": 8,
        "depth": 1,
        "heads": 2,
        "num_steps": 1,
        "images_per_expert": 4,
    },
}


def _plan(kind: str, **statistics: object) -> Plan:
    document = plan_document(router=SETTINGS[kind])
    document["data"] = {"shape": [1, 4, 4], "range": [-1.0, 1.0]}
    document["sketch"] = {"path": "plan/sketch.safetensors", "rank": RANK}
    document["clustering"] |= {"num_coarse": 2}
    document["statistics"] |= {
        "counts": {"epsilon": 1.0, "num_groups": GROUPS},
        "sketch": {"epsilon": 6.0, "delta": 1e-5, "rank": RELEASED},
        **statistics,
    }
    return Plan.model_validate_json(json.dumps(document))


def _experts(silo_ids: Sequence[str]) -> list[PublishedExpert]:
    file = File(path="silos/x/experts/x/expert.safetensors", bytes=1, digest="a" * 64)
    numbered = [
        f"{silo}-{sum(other == silo for other in silo_ids[:e])}" for e, silo in enumerate(silo_ids)
    ]
    return [
        PublishedExpert(expert_id=name, silo_id=silo, prior=1 / len(silo_ids), file=file)
        for name, silo in zip(numbered, silo_ids, strict=True)
    ]


def _counts() -> CountsRouter:
    return CountsRouter.from_counts(SKETCH, WORLD.histogram(), WORLD.num_units, 5.0, PATH)


def _learned() -> LearnedRouter:
    residual = Residual(SKETCH, 2, 8, 1, PATH)
    with torch.no_grad():
        residual.layers[-1].bias.copy_(torch.tensor([1.0, -1.0]))
    return LearnedRouter(_counts(), residual)


def _samples(num_experts: int) -> SamplesRouter:
    drawn = torch.randn(num_experts, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    settings = SamplesSettings.model_validate(SETTINGS["samples"])
    router = fit_samples(Labelled.drawn(drawn), settings, PATH, 0)
    with torch.no_grad():
        router.net.head.bias.copy_(torch.linspace(-1, 1, num_experts))
    return router


def _publish(
    folder: Path, kind: str, tensors: dict[str, Tensor], num_experts: int, **changes: object
) -> PublishedRouter:
    save_tensors(folder / "router.safetensors", tensors)
    fields = {
        "kind": kind,
        "t_release": T_R if kind == "learned" else None,
        "training_prior": (1 / num_experts,) * num_experts,
        "temperature": 1.0,
        "file": File.of("router.safetensors", folder / "router.safetensors"),
    }
    return PublishedRouter.model_validate(fields | changes)


FAMILIES: list[tuple[str, Callable[[], Any]]] = [
    ("counts", lambda: _counts().split(clustered_layout())),
    ("learned", lambda: _learned().split(clustered_layout())),
    ("samples", lambda: _samples(4)),
]


@pytest.mark.parametrize(("kind", "build"), FAMILIES)
def test_router_of_every_family_answers_after_its_file_as_before(
    kind: str, build: Callable[[], Any], tmp_path
) -> None:
    router = build()
    published = _publish(tmp_path, kind, router.tensors(), 4)
    experts = _experts(["east", "east", "north", "north"])
    loaded = load_router(published, tmp_path, plan=_plan(kind), sketch=SKETCH, experts=experts)
    assert isinstance(loaded, Router) and loaded.num_experts == 4
    x = torch.cat(WORLD.silos)
    prior = torch.full((4,), 0.25)
    for t in (0.1, 0.85, 1.0):
        at = torch.full((len(x),), t)
        expected = posterior(router, x, at, prior.log())
        torch.testing.assert_close(
            posterior(loaded, x, at, prior.log()), expected, atol=2e-4, rtol=0
        )
        assert (float((expected - 0.25).abs().max()) > 0.01) == (t < 1)


def test_temperature_and_training_prior_of_the_manifest_are_applied(tmp_path) -> None:
    counts = _counts()
    experts = _experts(["east", "north"])
    published = _publish(
        tmp_path, "counts", counts.tensors(), 2, temperature=2.5, training_prior=(0.8, 0.2)
    )
    loaded = load_router(published, tmp_path, plan=_plan("counts"), sketch=SKETCH, experts=experts)
    x = torch.cat(WORLD.silos)
    at = torch.full((100,), 0.4)
    expected = Calibrated(counts, 2.5, [0.8, 0.2], PATH).log_likelihood(x, at)
    torch.testing.assert_close(loaded.log_likelihood(x, at), expected, atol=1e-4, rtol=0)
    assert float((loaded.log_likelihood(x, at) - counts.log_likelihood(x, at)).abs().max()) > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.01},
        {"temperature": 50.0},
        {"training_prior": (1.0, 0.0)},
        {"training_prior": (0.5, 0.3, 0.2)},
    ],
)
def test_manifest_with_an_absurd_calibration_is_refused(
    changes: dict[str, object], tmp_path
) -> None:
    published = _publish(tmp_path, "counts", _counts().tensors(), 2, **changes)
    with pytest.raises(DocumentError, check=has_subject("manifest.json")):
        load_router(
            published,
            tmp_path,
            plan=_plan("counts"),
            sketch=SKETCH,
            experts=_experts(["east", "north"]),
        )


def test_router_of_another_family_than_the_plans_is_refused(tmp_path) -> None:
    published = _publish(tmp_path, "samples", _samples(2).tensors(), 2)
    experts = _experts(["east", "north"])
    with pytest.raises(TensorFileError, match="samples"):
        load_router(published, tmp_path, plan=_plan("learned"), sketch=SKETCH, experts=experts)
    learned = _publish(tmp_path, "learned", _learned().tensors(), 2, t_release=None)
    with pytest.raises(TensorFileError, match="t_release"):
        load_router(learned, tmp_path, plan=_plan("learned"), sketch=SKETCH, experts=experts)


def test_router_for_another_number_of_experts_or_silos_is_refused(tmp_path) -> None:
    three = _experts(["east", "east", "north"])
    counts = _publish(tmp_path, "counts", _counts().tensors(), 3)
    with pytest.raises(TensorFileError, check=has_subject("router.safetensors, tensor mass")):
        load_router(counts, tmp_path, plan=_plan("counts"), sketch=SKETCH, experts=three)
    learned = _publish(tmp_path, "learned", _learned().split(clustered_layout()).tensors(), 4)
    four_silos = _experts(["east", "north", "south", "west"])
    with pytest.raises(
        TensorFileError, check=has_subject("router.safetensors, tensor residual.layers.2.bias")
    ):
        load_router(learned, tmp_path, plan=_plan("learned"), sketch=SKETCH, experts=four_silos)


def test_exchanged_file_and_numbers_that_are_no_router_are_refused(tmp_path) -> None:
    experts = _experts(["east", "north"])
    published = _publish(tmp_path, "counts", _counts().tensors(), 2)
    _publish(
        tmp_path, "counts", {name: tensor + 0.01 for name, tensor in _counts().tensors().items()}, 2
    )
    with pytest.raises(DigestError):
        load_router(published, tmp_path, plan=_plan("counts"), sketch=SKETCH, experts=experts)
    spoilt = _counts().tensors() | {"mass": torch.full((2, GROUPS), 0.9)}
    zeros = _publish(tmp_path, "counts", spoilt, 2)
    with pytest.raises(TensorFileError, check=has_subject("router.safetensors, mass")):
        load_router(zeros, tmp_path, plan=_plan("counts"), sketch=SKETCH, experts=experts)
