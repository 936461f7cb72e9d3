"""Several experts a silo, by cluster and at random, every kind of release: from the plan to samples, in process."""

import json
from pathlib import Path

import pytest
import torch

from aggregator.intake.inventory import take_inventory
from aggregator.planning.recipe import Recipe
from aggregator.router.statistics import read_statistics
from ddm import Ensemble, open_ensemble
from ddm.errors import TrustError
from ddm.loading.release import Release, open_release
from ddm.protocol.manifest import Manifest
from tests.support.federation import POLICY, TinyFederation, recipe, write_policy
from tests.support.publishing import publish_changed_manifest

SIZES = {"east": 60, "north": 90}
EXPERT = recipe().model_dump(mode="json")["expert"]
EXPERT["training"] |= {"num_steps": 3}
CLUSTERED = recipe(
    partition={"kind": "silo_cluster", "min_images": 10},
    expert=EXPERT,
    statistics={
        "unit": "image",
        "total": {"epsilon": 8.0, "delta": 0.0},
        "counts": {"epsilon": 8.0, "num_groups": 4},
    },
    router={"kind": "counts"},
)
RANDOM = recipe(
    partition={"kind": "random", "min_images": 20, "num_parts": 2},
    expert=EXPERT,
    statistics={
        "unit": "patient",
        "total": {"epsilon": 8.0, "delta": 1e-5},
        "counts": {"epsilon": 2.0, "num_groups": 4},
        "class_counts": {"epsilon": 2.0, "num_classes": 2},
        "sketch": {"epsilon": 2.0, "delta": 1e-6, "rank": 3},
    },
    router={"kind": "counts"},
)


def published(tiny: TinyFederation, chosen: Recipe, out: Path) -> tuple[Release, Ensemble]:
    tiny.complete(out, chosen)
    ensemble = open_ensemble(out, root=tiny.root)
    drawn = ensemble.sample(8, strategy="sample", steps=2, seed=0)
    assert torch.isfinite(drawn.images).all()
    return open_release(out, root=tiny.root, state=None), ensemble


def check_priors_are_refused(
    tiny: TinyFederation, monkeypatch: pytest.MonkeyPatch, priors: list[float], out: Path, who: str
) -> None:
    """Publish, properly signed, the same experts with other priors."""

    def lie(manifest: Manifest) -> Manifest:
        pairs = zip(manifest.experts, priors, strict=True)
        experts = tuple(expert.model_copy(update={"prior": prior}) for expert, prior in pairs)
        return manifest.model_copy(update={"experts": experts})

    publish_changed_manifest(monkeypatch, lie)
    with pytest.raises(TrustError, match=who):
        tiny.publish_only(out)


def test_federation_with_an_expert_for_each_silo_and_cluster_ends_in_a_release_that_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES)
    release, ensemble = published(tiny, CLUSTERED, tmp_path / "release")
    expected = ["east-0", "east-1", "north-0", "north-1"]
    assert (
        [expert.expert_id for expert in release.manifest.experts]
        == expected
        == list(ensemble.expert_ids)
    )
    assert [expert.cluster for expert in release.manifest.experts] == [0, 1, 0, 1]
    assert all(e.num_images is None for one in release.submissions.values() for e in one.experts)
    statistics = read_statistics(tiny.federation, take_inventory(tiny.federation))
    assert (statistics.sketches, statistics.class_counts) == ({}, {})
    assert statistics.t_release is None
    check_priors_follow_the_released_counts(tiny, release)
    one, two, three, four = ensemble.prior
    check_priors_are_refused(
        tiny, monkeypatch, [one + 0.1, two, three, four - 0.1], tmp_path / "lie", "silo east"
    )


def check_priors_follow_the_released_counts(tiny: TinyFederation, release: Release) -> None:
    """With noise of a quarter of an image, an expert's prior is its clusters' share of all units, almost."""
    statistics = read_statistics(tiny.federation, take_inventory(tiny.federation))
    clusters = statistics.files.clusters
    groups_of = dict(zip(clusters.group_F.tolist(), clusters.coarse_F.tolist(), strict=True))
    for expert in release.manifest.experts:
        noisy_G = statistics.counts[expert.silo_id].tolist()
        mine = sum(
            count for group, count in enumerate(noisy_G) if groups_of[group] == expert.cluster
        )
        assert expert.prior == pytest.approx(mine / sum(SIZES.values()), abs=0.03)
    by_silo = {
        silo: sum(e.prior for e in release.manifest.experts if e.silo_id == silo) for silo in SIZES
    }
    assert by_silo == pytest.approx({silo: size / 150 for silo, size in SIZES.items()}, abs=1e-9)


def test_federation_of_patients_dealt_at_random_ends_in_a_release_that_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", SIZES, patients=True)
    for site in tiny.sites.values():
        declared = (
            site.policy().data.model_copy(update={"min_images": 40}).model_dump(exclude_none=True)
        )
        write_policy(site, POLICY | {"privacy": {"unit": "patient"}, "data": declared})
    release, _ = published(tiny, RANDOM, tmp_path / "release")
    assert [expert.expert_id for expert in release.manifest.experts] == [
        "east-0",
        "east-1",
        "north-0",
        "north-1",
    ]
    assert [expert.prior for expert in release.manifest.experts] == pytest.approx(
        [0.2, 0.2, 0.3, 0.3]
    )
    assert {silo: one.num_units for silo, one in release.submissions.items()} == {
        "east": 24,
        "north": 36,
    }
    for submission in release.submissions.values():
        assert [expert.num_images for expert in submission.experts] == [None, None]
        assert (submission.spent.unit, submission.spent.epsilon) == ("patient", 8.0)
        assert [one.kind for one in submission.statistics] == ["counts", "class_counts", "sketch"]
    statistics = read_statistics(tiny.federation, take_inventory(tiny.federation))
    assert {tensor.shape for tensor in statistics.class_counts.values()} == {(2, 4)}
    assert {tensor.shape for tensor in statistics.sketches.values()} == {(24, 3), (36, 3)}
    kept = json.loads((tmp_path / "tiny/north/private/state.json").read_bytes())
    assert kept["num_steps"] == 6, "progress counts the steps of both experts"
    check_priors_are_refused(
        tiny, monkeypatch, [0.1, 0.3, 0.3, 0.3], tmp_path / "lie", "expert east-0"
    )
