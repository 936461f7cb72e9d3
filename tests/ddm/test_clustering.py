import pytest
import torch

from ddm.clustering import Clusters, cluster_specs, fit_clustering
from ddm.errors import DataError, PolicyError, SetupError, ShapeError
from ddm.tensors import load_tensors, save_tensors


def _blobs(num_each: int = 20, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Six tight blobs in the plane, in three pairs."""
    centres = torch.tensor([[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [0.0, 10.0], [0.0, 11.0]])
    generator = torch.Generator().manual_seed(1)
    label = torch.arange(6).repeat_interleave(num_each)
    return centres[label] + 0.05 * torch.randn(len(label), 2, generator=generator) + offset, label


def test_fine_clusters_recover_the_blobs_and_coarse_clusters_their_pairs() -> None:
    features, label = _blobs()
    clusters = fit_clustering(features, 6, 3, 3, seed=0)
    fine = clusters.assign(features)
    for blob in range(6):
        assert len(fine[label == blob].unique()) == 1
    assert len(fine.unique()) == 6
    for pair in range(3):
        members = fine[label // 2 == pair].unique()
        assert len(clusters.coarse_F[members].unique()) == 1
        assert len(clusters.groups(features)[label // 2 == pair].unique()) == 1
    assert len(clusters.coarse_F.unique()) == 3


def test_assignment_is_the_nearest_centroid_when_features_lie_far_from_the_origin(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(2)
    centroids = torch.randn(40, 8, generator=generator) + 1000
    features = torch.randn(500, 8, generator=generator) + 1000
    clusters = Clusters(centroids, torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=torch.int64))
    brute = (features[:, None].double() - centroids.double()).norm(dim=2).argmin(1)
    assert torch.equal(clusters.assign(features), brute)
    monkeypatch.setattr("ddm.clustering._BLOCK", 33)
    assert torch.equal(clusters.assign(features), brute)
    naive = (centroids.square().sum(1) / 2 - features @ centroids.T).argmin(1)
    assert not torch.equal(naive, brute)  # the shortcut without centring does get this wrong


def test_clustering_is_the_same_for_the_same_seed() -> None:
    features, _ = _blobs()
    one, two = (fit_clustering(features, 5, 2, 4, seed=3) for _ in range(2))
    assert torch.equal(one.centroids_FD, two.centroids_FD)
    assert torch.equal(one.group_F, two.group_F)


def test_clustering_refuses_more_fine_centroids_than_distinct_images() -> None:
    features = torch.ones(50, 2)
    features[:3, 0] = torch.arange(3.0)
    with pytest.raises(DataError, match="at least 4"):
        fit_clustering(features, 4, 2, 2, seed=0)


@pytest.mark.parametrize(("num_coarse", "num_groups"), [(7, 3), (3, 7)])
def test_clustering_refuses_more_groups_than_fine_centroids(num_coarse: int, num_groups: int) -> None:
    with pytest.raises(SetupError, match="at most 6"):
        fit_clustering(_blobs()[0], 6, num_coarse, num_groups, seed=0)


def test_groups_are_the_fine_centroids_themselves_when_as_many() -> None:
    clusters = fit_clustering(_blobs()[0], 6, 1, 6, seed=0)
    assert sorted(clusters.group_F.tolist()) == list(range(6))
    assert clusters.coarse_F.tolist() == [0] * 6


def test_clusters_with_an_index_outside_the_plan_are_refused() -> None:
    clusters = fit_clustering(_blobs()[0], 6, 3, 3, seed=0)
    clusters.check(3, 3)
    with pytest.raises(PolicyError, match="group"):
        clusters.check(3, 2)
    with pytest.raises(PolicyError, match="coarse"):
        clusters.check(2, 3)
    broken = Clusters(clusters.centroids_FD * float("nan"), clusters.coarse_F, clusters.group_F)
    with pytest.raises(PolicyError, match="finite"):
        broken.check(3, 3)


def test_assignment_refuses_features_of_another_dimension() -> None:
    with pytest.raises(ShapeError):
        fit_clustering(_blobs()[0], 6, 3, 3, seed=0).assign(torch.zeros(4, 3))


def test_clusters_survive_their_file(tmp_path) -> None:
    features, _ = _blobs()
    clusters = fit_clustering(features, 6, 3, 3, seed=0)
    save_tensors(tmp_path / "centroids.safetensors", clusters.tensors())
    loaded = load_tensors(tmp_path / "centroids.safetensors", cluster_specs(6, 2), max_bytes=10_000)
    assert torch.equal(Clusters.from_tensors(loaded).groups(features), clusters.groups(features))
