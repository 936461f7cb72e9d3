"""Several experts on one site: which there are, what each is made of, and a worker killed between two of them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddm.errors import PolicyError
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.partition.layout import ExpertPart
from ddm.protocol.plan import Plan
from silo.config import DataPolicy, Policy, Site, TrainingPolicy
from silo.plan.declared import declared_rules
from silo.plan.workspace import Workspace
from silo.worker.state import load_state, state_path
from silo.worker.training import find_parts, images_of_part
from silo.worker.worker import Worker
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.federation import (
    NUM_STEPS,
    POLICY,
    PlannedFederation,
    TinyFederation,
    recipe,
    write_policy,
)

SILO = "north"
BY_CLUSTER = recipe(
    partition={"kind": "silo_cluster", "min_images": 10},
    statistics={
        "unit": "image",
        "total": {"epsilon": 8.0, "delta": 0.0},
        "counts": {"epsilon": 8.0, "num_groups": 4},
    },
    router={"kind": "counts"},
)
# four fine centroids on a line, two groups and two clusters of two
LINE = Clusters(
    centroids_FD=torch.tensor([[0.0], [1.0], [10.0], [11.0]]),
    coarse_F=torch.tensor([0, 0, 1, 1]),
    group_F=torch.tensor([0, 0, 1, 1]),
)


@pytest.fixture(scope="module")
def assigned_once(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A site that is about to draw its counts, which tell its experts."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("experts"), {SILO: 60})
    plan_id = tiny.sign(BY_CLUSTER)
    tiny.deliver_plan(SILO, plan_id)
    tiny.work(SILO, until="assigned")
    return PlannedFederation(tiny, plan_id)


@pytest.fixture
def assigned(
    assigned_once: PlannedFederation, tmp_path: Path
) -> Callable[[str], tuple[TinyFederation, Path]]:
    """Copies of it, each with the folder of its work."""
    tiny, plan_id = assigned_once

    def copy(name: str) -> tuple[TinyFederation, Path]:
        copied = tiny.copy(tmp_path / name)
        return copied, copied.sites[SILO].private / "checkpoints" / plan_id

    return copy


Assigned = Callable[[str], tuple[TinyFederation, Path]]


def test_expert_is_made_of_its_own_images_when_they_are_enough() -> None:
    fine_N = torch.tensor([0, 2, 1, 3, 0, 2])
    part = ExpertPart("north-0", 0, (0,))
    assert images_of_part(
        part, LINE.coarse_F[fine_N] == 0, fine_N, LINE, min_images=3
    ).tolist() == [
        0,
        2,
        4,
    ]


@pytest.mark.parametrize(
    ("own", "expected"), [([], [1, 5, 3, 6]), ([6], [6, 1, 5, 3]), ([6, 3], [6, 3, 1, 5])]
)
def test_expert_with_too_few_images_is_made_of_the_nearest_others_too(
    own: list[int], expected: list[int]
) -> None:
    """Around the centre of the second cluster, 10.5, lie 1, 3, 5, 6; of equals the first."""
    fine_N = torch.tensor([0, 2, 1, 3, 0, 2, 3])
    own_N = torch.zeros(7, dtype=torch.bool).index_fill(
        0, torch.tensor(own, dtype=torch.int64), True
    )
    chosen = images_of_part(ExpertPart("north-1", 1, (1,)), own_N, fine_N, LINE, min_images=4)
    assert chosen.tolist() == sorted(expected)


def test_counts_alone_are_drawn_before_training_and_tell_the_experts(assigned: Assigned) -> None:
    tiny, work = assigned("copy")
    tiny.work(SILO, until="training")
    drawn = {path.name: path.read_bytes() for path in (work / "statistics").iterdir()}
    assert set(drawn) == {"counts.safetensors"}
    assert load_state(state_path(tiny.sites[SILO].private)).num_steps == 2 * NUM_STEPS
    tiny.work(SILO)
    assert (work / "statistics" / "counts.safetensors").read_bytes() == drawn[
        "counts.safetensors"
    ], "drawn once"


@pytest.mark.parametrize(
    ("size_C", "expected"),
    [((30, 30), [0, 1]), ((60, 0), [0]), ((0, 60), [1]), ((9, 51), [1]), ((10, 50), [0, 1])],
)
def test_experts_are_those_of_the_released_histogram_whatever_the_images_are(
    assigned: Assigned, size_C: tuple[int, int], expected: list[int]
) -> None:
    """The same images, several releases: nothing but the file decides."""
    tiny, work = assigned("copy")
    plan, _ = tiny.federation.current_plan()
    files = PlanFiles.load(plan, tiny.federation.plan_targets(plan.plan_id))
    released_G = torch.zeros(4, dtype=torch.int64)
    for cluster, size in enumerate(size_C):
        released_G[files.clusters.group_F[files.clusters.coarse_F == cluster][0]] = size
    (work / "statistics").mkdir()
    save_file({"counts": released_G}, work / "statistics" / "counts.safetensors")
    assert [part.cluster for part in find_parts(plan, files, Workspace(work), SILO)] == expected


@pytest.mark.parametrize(
    ("partition", "fewest"),
    [
        ({"kind": "silo"}, 50),
        ({"kind": "silo_cluster"}, 50),
        ({"kind": "random", "num_parts": 3}, 150),
    ],
    ids=["silo", "silo_cluster", "random"],
)
def test_site_needs_enough_images_for_every_share_of_a_random_partition(
    partition: dict[str, object], fewest: int
) -> None:
    plan = Plan.parse(
        to_bytes(plan_document(partition=partition | {"min_images": 50})), subject="plan"
    )
    for least, most in ((50, fewest), (70, fewest * 70 // 50)):
        training = TrainingPolicy(min_images=least)
        for declared, fits in ((most, True), (most - 1, False)):
            policy = Policy(training=training, data=DataPolicy(min_images=declared))
            subjects = {subject for subject, _, _ in declared_rules(plan, policy)}
            assert ("fewest images" not in subjects) == fits


def interrupted(tiny: TinyFederation, step: int) -> None:
    """Let the worker stop as a signal would, at the first note of a step beyond `step`."""

    def stop(state: object) -> None:
        if worker.state.step >= step:
            worker.stopping.set()

    worker = Worker(tiny.sites[SILO], tiny.key(SILO), stop)
    worker.begin()
    with pytest.raises(KeyboardInterrupt):
        while worker.state.state != "audited":
            worker.step()


def weights(work: Path) -> dict[str, bytes]:
    return {
        path.parent.name: path.read_bytes()
        for path in sorted(work.glob("experts/*/expert.safetensors"))
    }


@pytest.mark.parametrize(
    "step", [NUM_STEPS, NUM_STEPS + 4], ids=["between two experts", "within the second"]
)
def test_worker_stopped_on_the_way_ends_with_the_same_experts(
    assigned: Assigned, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr("silo.worker.worker.NOTE_S", 0.0)
    monkeypatch.setattr("ddm.training.loop.PROGRESS_STEPS", 1)
    tiny, work = assigned("whole")
    tiny.work(SILO, until="training")
    shutil.copytree(tiny.path, tiny.path.with_name("stopped"))
    stopped_site = Site(tiny.path.with_name("stopped") / SILO)
    stopped = TinyFederation(tiny.path.with_name("stopped"), tiny.federation, {SILO: stopped_site})
    stopped_work = stopped_site.private / "checkpoints" / work.name
    tiny.work(SILO, until="audited")
    interrupted(stopped, step)
    first = stopped_work / "experts" / "north-0" / "expert.safetensors"
    before = first.stat().st_mtime_ns
    assert list(weights(stopped_work)) == ["north-0"]
    stopped.work(SILO, until="audited")
    assert first.stat().st_mtime_ns == before, "an expert that is done is not trained again"
    assert weights(stopped_work) == weights(work)
    assert list(weights(work)) == ["north-0", "north-1"]


def test_time_limit_holds_for_all_experts_of_a_silo_together(
    assigned: Assigned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.worker.worker.NOTE_S", 0.0)
    tiny, work = assigned("copy")
    interrupted(tiny, NUM_STEPS)
    record = Workspace(work).record("north-0")
    limit = float(BY_CLUSTER.limits.train_s)
    for seconds, passes in ((limit, False), (limit / 2, True)):
        training = record.training.model_copy(update={"seconds": seconds})
        Workspace(work).record_path("north-0").write_bytes(
            record.model_copy(update={"training": training}).encode()
        )
        if passes:
            tiny.work(SILO, until="audited")
        else:
            with pytest.raises(PolicyError, check=has_subject("training time")):
                tiny.work(SILO, until="audited")


def test_time_limit_holds_when_the_last_record_was_written_before_anybody_looked(
    assigned: Assigned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.worker.worker.NOTE_S", 0.0)
    tiny, work = assigned("copy")
    interrupted(tiny, NUM_STEPS)
    record = Workspace(work).record("north-0")
    training = record.training.model_copy(update={"seconds": BY_CLUSTER.limits.train_s + 1.0})
    last = record.model_copy(update={"expert_id": "north-1", "training": training})
    Workspace(work).record_path("north-1").parent.mkdir(exist_ok=True)
    Workspace(work).record_path("north-1").write_bytes(last.encode())
    with pytest.raises(PolicyError, check=has_subject("training time")):
        tiny.work(SILO, until="audited")


def test_experts_of_the_same_images_differ_and_none_is_made_of_fewer_than_the_policy_asks(
    assigned: Assigned,
) -> None:
    tiny, work = assigned("copy")
    write_policy(tiny.sites[SILO], POLICY | {"training": {"min_images": 60}})
    tiny.work(SILO, until="audited")
    records = [Workspace(work).record(f"north-{cluster}") for cluster in (0, 1)]
    assert [record.num_images for record in records] == [60, 60]
    one, two = (load_file(Workspace(work).expert_path(record.expert_id)) for record in records)
    assert any(not torch.equal(one[name], two[name]) for name in one)
