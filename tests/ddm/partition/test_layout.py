import pytest
import torch

from ddm.partition.clustering import Clusters, fit_clustering
from ddm.partition.layout import Layout, known_parts, part_of_images, silo_parts
from ddm.protocol.partition import RandomPartition, SiloClusterPartition, SiloPartition

SILO = SiloPartition(min_images=10)
CLUSTERS = SiloClusterPartition(min_images=10)
RANDOM = RandomPartition(min_images=10, num_parts=3)


def _clusters() -> Clusters:
    """Six groups, one fine centroid each, in three coarse clusters at 0, 1 and 10 on a line."""
    centroids = torch.tensor([[0.0], [0.1], [1.0], [1.1], [10.0], [10.1]])
    return Clusters(centroids, torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6))


def test_a_silo_partition_has_one_expert_that_answers_for_every_group() -> None:
    (part,) = silo_parts(SILO, "north", _clusters(), torch.zeros(6, dtype=torch.int64))
    assert (part.expert_id, part.cluster, part.groups) == ("north", None, tuple(range(6)))


def test_every_cluster_with_enough_noised_images_has_an_expert() -> None:
    parts = silo_parts(CLUSTERS, "north", _clusters(), torch.tensor([5, 5, 20, 0, 9, 1]))
    assert [(part.expert_id, part.cluster, part.groups) for part in parts] == [
        ("north-0", 0, (0, 1)),
        ("north-1", 1, (2, 3)),
        ("north-2", 2, (4, 5)),
    ]


def test_a_cluster_with_too_few_noised_images_joins_the_nearest_that_has_enough() -> None:
    parts = silo_parts(CLUSTERS, "north", _clusters(), torch.tensor([5, 4, 20, 0, 30, 1]))
    assert [(part.cluster, part.groups) for part in parts] == [(1, (0, 1, 2, 3)), (2, (4, 5))]


@pytest.mark.parametrize(
    "noisy", [[5, 5, 20, 0, 9, 1], [5, 4, 20, 0, 30, 1], [-5, -4, 3, 0, -8, 1]]
)
def test_parts_follow_from_the_clusters_with_an_expert_as_well_as_from_the_histogram(
    noisy: list[int],
) -> None:
    parts = silo_parts(CLUSTERS, "north", _clusters(), torch.tensor(noisy))
    kept = [part.cluster for part in parts if part.cluster is not None]
    assert known_parts(CLUSTERS, "north", _clusters(), kept) == parts


def test_noise_that_takes_every_cluster_below_the_least_leaves_the_largest() -> None:
    parts = silo_parts(CLUSTERS, "north", _clusters(), torch.tensor([-5, -4, 3, 0, -8, 1]))
    assert [(part.expert_id, part.groups) for part in parts] == [("north-1", tuple(range(6)))]


def test_images_go_to_the_expert_of_their_group() -> None:
    parts = silo_parts(CLUSTERS, "north", _clusters(), torch.tensor([5, 4, 20, 0, 30, 1]))
    group_N = torch.tensor([5, 0, 3, 1, 4])
    assert part_of_images(CLUSTERS, parts, group_N, seed=0).tolist() == [1, 0, 0, 0, 1]


def test_a_random_partition_deals_images_evenly_whatever_their_group() -> None:
    parts = silo_parts(RANDOM, "north", _clusters(), torch.zeros(6, dtype=torch.int64))
    assert [part.expert_id for part in parts] == ["north-0", "north-1", "north-2"]
    group_N = torch.arange(3000) % 6
    dealt = part_of_images(RANDOM, parts, group_N, seed=1)
    assert torch.bincount(dealt).tolist() == [1000, 1000, 1000]
    table = torch.zeros(3, 6).index_put_((dealt, group_N), torch.ones(3000), accumulate=True)
    assert float((table - 1000 / 6).abs().max()) < 60  # five standard deviations
    assert torch.equal(dealt, part_of_images(RANDOM, parts, group_N, seed=1))
    assert not torch.equal(dealt, part_of_images(RANDOM, parts, group_N, seed=2))


@pytest.mark.parametrize("partition", [SILO, CLUSTERS, RANDOM])
def test_split_mixtures_add_up_to_the_silos(
    partition: SiloPartition | SiloClusterPartition | RandomPartition,
) -> None:
    noisy = [torch.tensor([5, 4, 20, 0, 30, 1]), torch.tensor([50, 4, 0, 0, 0, 1])]
    layout = Layout.of(
        partition, [silo_parts(partition, f"s{k}", _clusters(), row) for k, row in enumerate(noisy)]
    )
    mass_KG = (
        torch.rand(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    )
    mass_KG = mass_KG / mass_KG.sum(1, keepdim=True)
    mass_EG, share_E = layout.split(mass_KG)
    torch.testing.assert_close(mass_EG.sum(1), torch.ones(len(layout.parts), dtype=torch.float64))
    for k in range(2):
        own = torch.tensor(layout.silo_E) == k
        torch.testing.assert_close((mass_EG[own] * share_E[own, None]).sum(0), mass_KG[k])


def test_groups_of_fitted_clusters_never_straddle_experts() -> None:
    features = torch.randn(400, 3, generator=torch.Generator().manual_seed(3))
    clusters = fit_clustering(features, 40, 4, 12, seed=0)
    group_N = clusters.groups(features)
    noisy_G = torch.bincount(group_N, minlength=12)
    parts = silo_parts(CLUSTERS, "north", clusters, noisy_G)
    part_N = part_of_images(CLUSTERS, parts, group_N, seed=0)
    coarse_N = clusters.coarse_F[clusters.assign(features)]
    assert len(parts) == 4
    assert [parts[number].cluster for number in part_N.tolist()] == coarse_N.tolist()
