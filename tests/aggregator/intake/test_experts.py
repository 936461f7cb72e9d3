"""What intake refuses of a silo with several experts and every kind of release, one test an attack."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddm.errors import PolicyError, TensorFileError
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import silo_parts
from ddm.privacy.bounds import cell_noise_bound
from tests.support.federation import POLICY, PlannedFederation, TinyFederation, recipe, write_policy
from tests.support.submissions import SILO, Arrival, arrive

WIDE_STATISTICS = {
    "unit": "patient",
    "total": {"epsilon": 20.0, "delta": 1e-5},
    "counts": {"epsilon": 8.0, "num_groups": 4},
    "class_counts": {"epsilon": 2.0, "num_classes": 2},
    "sketch": {"epsilon": 4.0, "delta": 1e-6, "rank": 2},
}


@pytest.fixture(scope="module")
def sent_wide_once(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A silo of patients, with an expert for each of two clusters and every kind of release, has its submission out."""
    tiny = TinyFederation.create(
        tmp_path_factory.mktemp("wide"), {"north": 300, "south": 30}, patients=True
    )
    write_policy(
        tiny.sites[SILO],
        POLICY | {"privacy": {"unit": "patient", "max_epsilon": 20.0, "budget_epsilon": 20.0}},
    )
    plan_id = tiny.sign(
        recipe(partition={"kind": "silo_cluster", "min_images": 5}, statistics=WIDE_STATISTICS)
    )
    tiny.deliver_plan(SILO, plan_id)
    tiny.work(SILO)
    return PlannedFederation(tiny, plan_id)


@pytest.fixture
def wide(sent_wide_once: PlannedFederation, tmp_path: Path) -> Arrival:
    return arrive(sent_wide_once, tmp_path / "copy")


def test_intake_accepts_every_kind_of_release_with_two_experts_by_patient(wide: Arrival) -> None:
    """The control of all refusals below."""
    document = wide.document()
    assert [release["kind"] for release in document["statistics"]] == [
        "counts",
        "class_counts",
        "sketch",
    ]
    assert [(e["expert_id"], e["cluster"], e["num_images"]) for e in document["experts"]] == [
        ("north-0", 0, None),
        ("north-1", 1, None),
    ]
    wide.rewrite(lambda document: None)
    assert wide.verdict().verdict.kind == "accepted"


@pytest.mark.parametrize("kind", ["counts", "class_counts", "sketch"])
def test_intake_refuses_a_submission_that_keeps_back_a_release(wide: Arrival, kind: str) -> None:
    (wide.folder / f"{kind}.safetensors").unlink()
    document = wide.document()
    kept = [release for release in document["statistics"] if release["kind"] != kind]
    wide.document_path.write_text(json.dumps(document | {"statistics": kept}))
    wide.rewrite(lambda document: None)
    wide.assert_refused(PolicyError, "statistics", kind)


@pytest.mark.parametrize("change", [{"epsilon": 0.5}, {"epsilon": 30.0}, {"delta": 1e-7}])
@pytest.mark.parametrize("number", [1, 2], ids=["class_counts", "sketch"])
def test_intake_refuses_a_release_at_another_cost_than_the_plans(
    wide: Arrival, number: int, change: dict[str, float]
) -> None:
    wide.rewrite(lambda document: document["statistics"][number].update(change))
    wide.assert_refused(PolicyError, "epsilon and delta of")


def test_intake_refuses_releases_by_image_where_the_plan_protects_patients(wide: Arrival) -> None:
    wide.rewrite(lambda document: document["spent"].update(unit="image"))
    wide.assert_refused(PolicyError, "privacy unit", "patient")


def one_cluster_less(wide: Arrival) -> str:
    """Move all units of one cluster to the other one's groups in the histogram; return the expert that this ends."""
    plan, _ = wide.tiny.federation.current_plan()
    clusters = PlanFiles.load(plan, wide.tiny.federation.plan_targets(plan.plan_id)).clusters
    counts = load_file(wide.folder / "counts.safetensors")["counts"]
    lost, kept = (clusters.group_F[clusters.coarse_F == cluster] for cluster in (1, 0))
    moved = counts.clone()
    moved[kept[0]] += counts[lost.unique()].sum()
    moved[lost] = 0
    assert [part.expert_id for part in silo_parts(plan.partition, SILO, clusters, moved)] == [
        "north-0"
    ]
    wide.change_counts(lambda _: moved)
    return "north-1"


def test_intake_refuses_an_expert_for_a_cluster_that_the_noised_histogram_does_not_tell(
    wide: Arrival,
) -> None:
    one_cluster_less(wide)
    wide.assert_refused(PolicyError, "experts", "as its noised counts imply")


def test_intake_accepts_the_experts_that_such_a_histogram_does_tell(wide: Arrival) -> None:
    """The control: the same histogram, without the expert that it does not tell."""
    wide.drop_expert(one_cluster_less(wide))
    assert wide.verdict().verdict.kind == "accepted"


def test_intake_refuses_a_submission_that_keeps_back_an_expert(wide: Arrival) -> None:
    wide.drop_expert("north-1")
    wide.assert_refused(PolicyError, "experts")


def test_intake_refuses_experts_whose_clusters_were_swapped(wide: Arrival) -> None:
    def swap(document: dict) -> None:
        for expert, cluster in zip(document["experts"], (1, 0), strict=True):
            expert["cluster"] = cluster

    wide.rewrite(swap)
    wide.assert_refused(PolicyError, "experts")


def test_intake_refuses_experts_in_another_order(wide: Arrival) -> None:
    wide.rewrite(lambda document: document["experts"].reverse())
    wide.assert_refused(PolicyError, "experts")


def test_intake_refuses_two_experts_that_are_one_file(wide: Arrival) -> None:
    shutil.rmtree(wide.folder / "silos" / SILO / "experts" / "north-1")
    document = wide.document()
    document["experts"][1]["file"] = document["experts"][0]["file"]
    wide.document_path.write_text(json.dumps(document))
    wide.rewrite(lambda document: None)
    wide.assert_refused(PolicyError, "experts")


def test_intake_refuses_the_exact_number_of_an_experts_images_where_only_noise_may_tell(
    wide: Arrival,
) -> None:
    wide.rewrite(lambda document: document["experts"][0].update(num_images=20))
    wide.assert_refused(PolicyError, "images of an expert")


@pytest.mark.parametrize("attack", ["a count below the noise", "units from nowhere"])
def test_intake_refuses_class_counts_that_no_noise_explains(wide: Arrival, attack: str) -> None:
    reach = cell_noise_bound(WIDE_STATISTICS["class_counts"]["epsilon"], 8)
    num_units = wide.document()["num_units"]  # type: ignore[index]
    counts = {
        "a count below the noise": torch.tensor([[-reach - 1, reach + 1, num_units, 0], [0] * 4]),
        "units from nowhere": torch.full((2, 4), num_units + reach),
    }
    wide.change_counts(lambda _: counts[attack], "class_counts")
    wide.assert_refused(
        TensorFileError,
        "class_counts",
        "counts within" if attack == "a count below the noise" else "a sum",
    )


def test_intake_refuses_class_counts_laid_out_by_group_first(wide: Arrival) -> None:
    wide.change_counts(lambda counts: counts.T, "class_counts")
    wide.assert_refused(TensorFileError, "class_counts")
