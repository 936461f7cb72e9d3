"""Every family and every partition through `train_router` and back from its file; the silos' statistics are made up."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aggregator.router import train as under_test
from aggregator.router.statistics import AcceptedStatistics
from aggregator.router.train import train_router
from ddm.encoders import PcaEncoder
from ddm.errors import RefusedError
from ddm.io.tensors import save_tensors
from ddm.loading.plan import PlanFiles
from ddm.models import build_expert
from ddm.partition.clustering import fit_clustering
from ddm.partition.layout import Layout, silo_parts
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.manifest import PublishedExpert, PublishedRouter
from ddm.protocol.plan import Plan
from ddm.protocol.router_report import RouterReport
from ddm.publishing.router_table import describe_router
from ddm.routers.base import posterior
from ddm.routers.calibration import Calibrated
from ddm.routers.evaluation import cross_entropy
from ddm.routers.loading import load_router
from ddm.routers.sketch import Sketch
from tests.support.documents import plan_document
from tests.support.errors import has_subject
from tests.support.router_problems import GROUPS, RouterProblem, make_problem

SHARES = [[0.8, 0.1, 0.05, 0.05], [0.05, 0.05, 0.2, 0.7]]
RANK = 6
RELEASED = 3
T_R = 0.5
NUM_CLASSES = 2
ROUTERS: dict[str, dict[str, Any]] = {
    "counts": {"kind": "counts"},
    "learned": {"kind": "learned", "hidden": 8, "depth": 1, "num_steps": 20},
    "samples": {
        "kind": "samples",
        "patch": 2,
        "hidden": 16,
        "depth": 1,
        "heads": 2,
        "num_steps": 10,
        "images_per_expert": 20,
    },
}


LABELLED = ROUTERS["samples"] | {"num_steps": 80, "learning_rate": 0.006, "warmup_steps": 5}
ROUTERS |= {
    f"samples by {labels}": LABELLED
    | {"labels": labels, "conditional": True, "images_per_expert": 40}
    for labels in ("group", "class", "silo", "experts")
}


@dataclass(frozen=True)
class Statistics:
    """Stands for the inventory: what two silos released."""

    plan: Plan
    files: PlanFiles
    world: RouterProblem
    silos: dict[str, Any]

    @property
    def num_units(self) -> dict[str, int]:
        return dict(zip(self.silos, self.world.num_units, strict=True))

    @property
    def counted_units(self) -> dict[str, int]:
        return self.num_units

    @property
    def digests(self) -> dict[str, str]:
        return dict.fromkeys(self.silos, "0" * 64)

    def _groups(self) -> dict[str, Tensor]:
        images = zip(self.silos, self.world.silos, strict=True)
        return {
            silo: self.files.clusters.groups(self.files.encoder.encode(x)) for silo, x in images
        }

    def counts(self) -> dict[str, Tensor]:
        return {
            silo: torch.bincount(group, minlength=GROUPS) for silo, group in self._groups().items()
        }

    def class_counts(self) -> dict[str, Tensor]:
        """Odd images are of class 1."""
        counts_by_silo = {}
        for silo, group in self._groups().items():
            cell = group + GROUPS * (torch.arange(len(group)) % NUM_CLASSES)
            counts_by_silo[silo] = torch.bincount(cell, minlength=NUM_CLASSES * GROUPS).view(
                NUM_CLASSES, GROUPS
            )
        return counts_by_silo

    def sketches(self) -> dict[str, Tensor]:
        released = self.world.released(self.files.sketch.head(RELEASED), T_R)
        return dict(zip(self.silos, released.values(), strict=True))

    def t_release(self) -> float:
        return T_R

    def layout(self) -> Layout:
        counts = self.counts().items()
        return Layout.of(
            self.plan.partition,
            [
                silo_parts(self.plan.partition, silo, self.files.clusters, noisy)
                for silo, noisy in counts
            ],
        )

    def read(self) -> AcceptedStatistics:
        return AcceptedStatistics(
            files=self.files,
            counts=self.counts(),
            class_counts=self.class_counts(),
            sketches=self.sketches(),
            t_release=self.t_release(),
            layout=self.layout(),
        )


@dataclass(frozen=True)
class Folder:
    """Stands for the federation: where the plan's files lie."""

    path: Path

    @property
    def decisions(self) -> Path:
        return self.path / "decisions.jsonl"

    @property
    def screening(self) -> Path:
        return self.path / "screening"

    @property
    def keys(self) -> Path:
        folder = self.path / "keys"
        folder.mkdir(exist_ok=True)
        return folder

    def plan_folder(self, plan_id: str) -> Path:
        return self.path

    def plan_targets(self, plan_id: str) -> Path:
        return self.path

    def settings(self) -> SimpleNamespace:
        return SimpleNamespace(max_influence=0.5)


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [300, 200])


@pytest.fixture(scope="module")
def files(world: RouterProblem) -> PlanFiles:
    fit = world.public[:600]
    encoder = PcaEncoder.fit(fit, 8)
    clusters = fit_clustering(encoder.encode(fit), GROUPS, 2, GROUPS, seed=0)
    group = clusters.groups(encoder.encode(fit))
    return PlanFiles(
        encoder, clusters, Sketch.fit(fit, group, RANK, GROUPS, released_rank=RELEASED)
    )


@pytest.fixture(autouse=True)
def opened_files(files: PlanFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Screening and training open the plan's files and the silos' statistics, which are in no folder here."""
    monkeypatch.setattr(PlanFiles, "load", lambda *_: files)
    monkeypatch.setattr(under_test, "read_statistics", lambda _, drawn: drawn.read())


def _plan(kind: str, partition: str) -> Plan:
    document = plan_document(router=ROUTERS[kind], silos=["east", "north"])
    if ROUTERS[kind].get("conditional"):
        document["condition"] = {"kind": "class", "num_classes": NUM_CLASSES, "drop": 0.1}
    document["data"] = {"shape": [1, 4, 4], "range": [-4.0, 4.0]}
    document["sketch"] = {"path": "plan/sketch.safetensors", "rank": RANK}
    document["clustering"] |= {"num_fine": GROUPS, "num_coarse": 2}
    document["partition"] = {"kind": partition, "min_images": 5} | (
        {"num_parts": 2} if partition == "random" else {}
    )
    document["expert"]["architecture"] |= {"hidden": 16, "depth": 1, "heads": 2}
    document["statistics"] |= {
        "counts": {"epsilon": 1.0, "num_groups": GROUPS},
        "sketch": {"epsilon": 5.0, "delta": 1e-6, "rank": RELEASED},
        "class_counts": {"epsilon": 0.5, "num_classes": NUM_CLASSES},
    }
    return Plan.model_validate_json(json.dumps(document))


def _statistics(
    folder: Path, kind: str, partition: str, files: PlanFiles, world: RouterProblem
) -> Statistics:
    """Lay out what the aggregator finds: public images, and experts of fresh weights."""
    group = world.public_group[:600].numpy()
    columns = {}
    if kind.startswith("samples by"):
        columns["fitted_classes"] = np.arange(600) // GROUPS % NUM_CLASSES
        columns["fitted_silos"] = np.array(["east", "", "nobody", "north"])[group]
    arrays = {"fitted": world.public[:600].numpy(), "holdout": world.public[600:].numpy()} | columns
    np.savez(folder / "public.npz", **arrays)  # type: ignore[arg-type]
    plan = _plan(kind, partition)
    statistics = Statistics(plan, files, world, {"east": None, "north": None})
    layout = statistics.layout()
    for k, silo in enumerate(statistics.silos):
        experts = []
        for e in [e for e, silo_k in enumerate(layout.silo_E) if silo_k == k]:
            built = build_expert(
                plan.expert.architecture, plan.data.shape, condition=plan.condition, seed=e
            )
            weights = built.state_dict()
            save_tensors(folder / f"{e}.safetensors", weights)
            file = File.of(f"{e}.safetensors", folder / f"{e}.safetensors")
            experts.append(SimpleNamespace(expert_id=silo, file=file))
        statistics.silos[silo] = SimpleNamespace(
            document=silo.encode(),
            digest=sha256_hex(silo.encode()),
            folder=folder,
            submission=SimpleNamespace(experts=experts),
            admitted=False,
        )
    return statistics


def _open(folder: Path, report: RouterReport, drawn: Statistics) -> Calibrated:
    """What a researcher does with the manifest."""
    file = File.of("router.safetensors", folder / "router" / "router.safetensors")
    published = PublishedRouter(
        kind=report.published,
        t_release=report.t_release,
        training_prior=report.training_prior,
        temperature=report.temperature,
        file=file,
    )
    names = list(drawn.silos)
    layout = drawn.layout()
    experts = [
        PublishedExpert(
            expert_id=part.expert_id, silo_id=names[k], cluster=part.cluster, prior=prior, file=file
        )
        for k, part, prior in zip(layout.silo_E, layout.parts, report.expert_priors, strict=True)
    ]
    plan = drawn.plan
    sketch = drawn.files.sketch
    return load_router(published, folder / "router", plan=plan, sketch=sketch, experts=experts)


CASES = [
    ("counts", "silo"),
    ("counts", "silo_cluster"),
    ("learned", "silo_cluster"),
    ("learned", "random"),
    ("learned", "silo"),
    ("samples", "silo_cluster"),
]


@pytest.mark.parametrize(("kind", "partition"), CASES)
def test_trained_router_is_published_judged_and_loaded(
    kind: str, partition: str, files: PlanFiles, world: RouterProblem, tmp_path: Path
) -> None:
    drawn = _statistics(tmp_path, kind, partition, files, world)
    report = train_router(Folder(tmp_path), drawn, seed=0)  # type: ignore[arg-type]
    layout = drawn.layout()
    assert report.candidate == kind and report.published in ("counts", kind)
    assert report.t_release == (T_R if report.published == "learned" else None)
    assert sum(report.expert_priors) == pytest.approx(1)
    for k, units in enumerate(world.num_units):
        own = sum(
            p for p, silo in zip(report.expert_priors, layout.silo_E, strict=True) if silo == k
        )
        assert own == pytest.approx(units / 500)
    assert report.minus_prior[2] < 0  # better than the prior, by the whole interval
    assert (report.sketches is not None) == (kind == "learned")
    assert len(report.bands) == (0 if kind == "counts" else 5)
    assert report.published in describe_router(report)
    names = [evaluation.metric for evaluation in report.evaluations()]
    assert len(set(names)) == len(names)
    router = _open(tmp_path, report, drawn)
    w = posterior(
        router, world.silos[0], torch.zeros(300), torch.tensor(report.expert_priors).log()
    )
    east = w[:, torch.tensor(layout.silo_E) == 0].sum(1)
    assert float(east.mean()) > 0.7  # the prior would say 0.6


@pytest.mark.parametrize(
    ("labels", "partition"),
    [("group", "silo_cluster"), ("class", "silo_cluster"), ("silo", "silo")],
)
def test_samples_router_learns_whose_public_images_are_from_their_labels(
    labels: str,
    partition: str,
    files: PlanFiles,
    world: RouterProblem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object) -> None:
        raise AssertionError("no expert is asked for images where public ones are labelled")

    monkeypatch.setattr("aggregator.router.images.accepted_experts", none)
    monkeypatch.setattr(under_test, "_fault", lambda *_: None)
    drawn = _statistics(tmp_path, f"samples by {labels}", partition, files, world)
    report = train_router(Folder(tmp_path), drawn, seed=0)  # type: ignore[arg-type]
    assert report.candidate == report.published == "samples"
    router = _open(tmp_path, report, drawn)
    assert router.knows_shares
    layout = drawn.layout()
    of_east = torch.tensor(layout.silo_E) == 0
    for condition_B in (None, torch.ones(300, dtype=torch.int64)):
        own = router if condition_B is None else router.given(condition_B)
        uniform = torch.zeros(len(layout.parts))
        w = posterior(own, world.silos[0], torch.full((300,), 0.1), uniform)
        assert float(w[:, of_east].sum(1).mean()) > 0.7


def test_samples_router_reads_the_class_that_experts_were_told_to_draw(
    files: PlanFiles, world: RouterProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_fault", lambda *_: None)
    monkeypatch.setattr(under_test, "refuse_worse_than_prior", lambda *_: (0.0, 0.0, 0.0))
    drawn = _statistics(tmp_path, "samples by experts", "silo", files, world)
    report = train_router(Folder(tmp_path), drawn, seed=0)  # type: ignore[arg-type]
    router = _open(tmp_path, report, drawn)
    assert report.published == "samples" and not router.knows_shares
    at = torch.full((300,), 0.3)
    one = torch.ones(300, dtype=torch.int64)
    assert router.given(one).log_likelihood(world.silos[0], at).shape == (300, 2)


def test_interrupted_training_of_a_samples_router_goes_on_with_the_same_seed_alone(
    files: PlanFiles, world: RouterProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A checkpoint is due after every step.
    monkeypatch.setattr("ddm.routers.samples.CHECKPOINT_S", 0.0)
    statistics = _statistics(tmp_path, "samples by group", "silo", files, world)
    interruption = 40
    seen: list[int] = []

    def interrupt(step: int, total: int, loss: float) -> None:
        seen.append(step)
        if step == interruption and seen.count(step) == 1:
            raise KeyboardInterrupt

    def train(seed: int) -> RouterReport:
        seen.clear()
        return train_router(Folder(tmp_path), statistics, seed=seed, on_progress=interrupt)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        train(seed=0)
    interruption = 0
    train(seed=1)
    assert seen[0] == 8
    # The finished training removed all checkpoints, so that this one begins again.
    interruption = 40
    with pytest.raises(KeyboardInterrupt):
        train(seed=0)
    assert seen[0] == 8
    interruption = 0
    train(seed=0)
    assert seen[0] == 40
    assert not (tmp_path / "router" / "checkpoints").exists()


def test_learned_router_of_clusters_tells_silos_apart_as_the_one_of_silos(
    files: PlanFiles, world: RouterProblem, tmp_path: Path
) -> None:
    losses = []
    for partition in ("silo", "silo_cluster"):
        (tmp_path / partition).mkdir()
        drawn = _statistics(tmp_path / partition, "learned", partition, files, world)
        report = train_router(Folder(tmp_path / partition), drawn, seed=0)  # type: ignore[arg-type]
        prior = report.expert_priors

        class Silos:
            """The silos' likelihoods, from those of their experts."""

            num_experts = 2
            router = _open(tmp_path / partition, report, drawn)
            log_E = torch.tensor(prior).log()
            silo_E = torch.tensor(drawn.layout().silo_E)

            def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
                joint = self.router.log_likelihood(x_B, t_B) + self.log_E
                return torch.stack([joint[:, self.silo_E == k].logsumexp(1) for k in (0, 1)], 1)

        label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
        losses.append(
            [
                band.value
                for band in cross_entropy(Silos(), torch.cat(world.silos), label, [0.5, 0.5])
            ]
        )
    np.testing.assert_allclose(losses[1], losses[0], atol=0.1)


def test_harmful_candidate_is_not_published_and_the_report_says_why(
    files: PlanFiles, world: RouterProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = _statistics(tmp_path, "learned", "silo", files, world)
    sketches = drawn.sketches()
    swapped = {"east": sketches["north"], "north": sketches["east"]}
    monkeypatch.setattr(Statistics, "sketches", lambda self: swapped)
    report = train_router(Folder(tmp_path), drawn, seed=0)  # type: ignore[arg-type]
    assert report.published == "counts"
    assert "learned is worse than counts" in report.reason and report.sketches is not None
    assert max(band.difference_low for band in report.bands) > 0


def test_releases_that_contradict_the_public_data_are_refused_and_nothing_is_written(
    files: PlanFiles, world: RouterProblem, tmp_path: Path
) -> None:
    drawn = _statistics(tmp_path, "counts", "silo", files, world)
    east, north = (int(counts.argmax()) for counts in drawn.counts().values())
    swap = list(range(GROUPS))
    swap[east], swap[north] = north, east
    flipped = replace(files.sketch, group_mean_GR=files.sketch.group_mean_GR[swap])
    spoilt = Statistics(
        drawn.plan, PlanFiles(files.encoder, files.clusters, flipped), world, drawn.silos
    )
    with pytest.raises(RefusedError, check=has_subject("counts router on public data")):
        train_router(Folder(tmp_path), spoilt, seed=0)  # type: ignore[arg-type]
    assert not under_test.router_path(Folder(tmp_path), "x").exists()  # type: ignore[arg-type]
