import pytest
import torch

from ddm.errors import DataError, PolicyError, SetupError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.partition.clustering import Clusters, cluster_specs, fit_clustering
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.threads import THREADS


def _blobs(num_each: int = 20, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Six tight blobs in the plane, in three pairs."""
    centres = torch.tensor(
        [[0.0, 0.0], [0.0, 1.0], [10.0, 0.0], [10.0, 1.0], [0.0, 10.0], [0.0, 11.0]]
    )
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


def test_assignment_is_the_nearest_centroid_when_features_lie_far_from_the_origin(
    monkeypatch,
) -> None:
    generator = torch.Generator().manual_seed(2)
    centroids = torch.randn(40, 8, generator=generator) + 1000
    features = torch.randn(500, 8, generator=generator) + 1000
    clusters = Clusters(
        centroids, torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    )
    brute = (features[:, None].double() - centroids.double()).norm(dim=2).argmin(1)
    assert torch.equal(clusters.assign(features), brute)
    monkeypatch.setattr("ddm.partition.nearest._BLOCK", 33)
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
    with pytest.raises(DataError, check=has_subject("public images")):
        fit_clustering(features, 4, 2, 2, seed=0)


@pytest.mark.parametrize(("num_coarse", "num_groups"), [(4, 3), (3, 7)])
def test_clustering_refuses_more_clusters_than_groups_than_fine_centroids(
    num_coarse: int, num_groups: int
) -> None:
    with pytest.raises(SetupError, check=has_subject("clustering")):
        fit_clustering(_blobs()[0], 6, num_coarse, num_groups, seed=0)


def test_groups_are_the_fine_centroids_themselves_when_as_many() -> None:
    clusters = fit_clustering(_blobs()[0], 6, 1, 6, seed=0)
    assert sorted(clusters.group_F.tolist()) == list(range(6))
    assert clusters.coarse_F.tolist() == [0] * 6


def test_clusters_with_an_index_outside_the_plan_are_refused() -> None:
    clusters = fit_clustering(_blobs()[0], 6, 3, 3, seed=0)
    clusters.check(3, 3)
    with pytest.raises(PolicyError, check=has_subject("the plan's group indices")):
        clusters.check(3, 2)
    with pytest.raises(PolicyError, check=has_subject("the plan's coarse cluster indices")):
        clusters.check(2, 3)
    broken = Clusters(clusters.centroids_FD * float("nan"), clusters.coarse_F, clusters.group_F)
    with pytest.raises(PolicyError, check=has_subject("the plan's centroids")):
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


def test_clusters_whose_group_lies_in_two_coarse_clusters_are_refused() -> None:
    fitted = fit_clustering(_blobs()[0], 6, 2, 3, seed=0)
    fitted.check(2, 3)
    coarse_F = fitted.coarse_F.clone()
    coarse_F[0] = 1 - coarse_F[0]
    with pytest.raises(PolicyError, check=has_subject("the plan's groups")):
        Clusters(fitted.centroids_FD, coarse_F, fitted.group_F).check(2, 3)


def test_balanced_clusters_hold_about_as_many_images_and_plain_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(4)
    dense = 0.2 * torch.randn(900, 2, generator=generator)
    thin = torch.randn(100, 2, generator=generator) + 6.0
    features = torch.cat([dense, thin])
    sizes = {}
    for balanced in (False, True):
        clusters = fit_clustering(features, 60, 2, 40, seed=0, balanced=balanced)
        clusters.check(2, 40)
        sizes[balanced] = torch.bincount(clusters.coarse_F[clusters.assign(features)], minlength=2)
    largest_group = int(torch.bincount(clusters.groups(features)).max())
    assert int((sizes[True] - 500).abs().max()) <= largest_group
    assert int(sizes[False].min()) == 100


def _clusters(centroids: torch.Tensor) -> Clusters:
    index = torch.zeros(len(centroids), dtype=torch.int64)
    return Clusters(centroids, index, index)


def test_assignment_is_exact_on_near_ties_that_float32_scores_get_wrong(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(5)
    centroids = torch.randn(70, 24, generator=generator)
    pairs = torch.randint(70, (2, 600), generator=generator)
    # on the borders of cells
    features = centroids[pairs].mean(0) + 1e-7 * torch.randn(600, 24, generator=generator)
    brute = (features[:, None].double() - centroids.double()).square().sum(2).argmin(1)
    scores = centroids.square().sum(1) / 2 - features @ centroids.T
    assert not torch.equal(scores.argmin(1), brute)  # rounding decides there
    for block in (1, 7, 512):
        monkeypatch.setattr("ddm.partition.nearest._BLOCK", block)
        assert torch.equal(_clusters(centroids).assign(features), brute)


def test_assignment_is_the_same_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(6)
    centroids = torch.randn(130, 48, generator=generator)
    features = torch.cat(
        [torch.randn(700, 48, generator=generator), (centroids[:65] + centroids[65:]) / 2]
    )
    assignments = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            assignments.append(_clusters(centroids).assign(features))
        finally:
            torch.set_num_threads(THREADS)
    assert all(torch.equal(assignments[0], other) for other in assignments[1:])


def test_assignment_gives_ties_to_the_lowest_index() -> None:
    for num_fine in [1, 31, 32, 33, 100]:
        with case(num_fine=num_fine):
            generator = torch.Generator().manual_seed(7)
            # many of them twice
            centroids = torch.randint(-2, 3, (num_fine, 3), generator=generator).float()
            features = torch.randint(-5, 6, (400, 3), generator=generator) / 2
            brute = (features[:, None].double() - centroids.double()).square().sum(2)
            if num_fine > 31:
                assert int((brute == brute.amin(1, keepdim=True)).sum(1).max()) > 1
            assert torch.equal(_clusters(centroids).assign(features), brute.argmin(1))


def test_assignment_of_no_features_is_empty() -> None:
    assert _clusters(torch.eye(3)).assign(torch.empty(0, 3)).shape == (0,)
