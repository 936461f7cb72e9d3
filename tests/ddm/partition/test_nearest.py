from itertools import product

import pytest
import torch

from ddm.partition import nearest
from ddm.partition.nearest import NearestCentroid
from tests.support.case import case

BFLOAT16 = (torch.bfloat16,)
FLOAT32 = (torch.float32,)


def brute(features: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    blocks = features.double().split(100)
    return torch.cat(
        [(block[:, None] - centroids.double()).square().sum(2).argmin(1) for block in blocks]
    )


def world(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    centroids = torch.randn(97, 33, generator=generator)
    if kind == "close to centroids":
        picked = centroids[torch.randint(97, (600,), generator=generator)]
        return picked + 0.1 * torch.randn(600, 33, generator=generator), centroids
    features = torch.randn(600, 33, generator=generator)
    if kind == "far from the origin":
        return features + 1000, centroids + 1000
    if kind == "far from the centroids":
        return features * 300, centroids
    if kind == "of tiny size":
        return features * 1e-18, centroids * 1e-18
    if kind == "halfway":  # between the first centroid and another, but for rounding
        return (centroids[:1] + centroids[1:]) / 2, centroids
    return features, centroids


def test_nearest_is_that_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for (dtypes, by_numpy), kind in product(
        [(BFLOAT16, False), (FLOAT32, False), (FLOAT32, True), ((*BFLOAT16, *FLOAT32), True)],
        [
            "noise",
            "close to centroids",
            "far from the origin",
            "far from the centroids",
            "of tiny size",
            "halfway",
        ],
    ):
        with case(dtypes=dtypes, by_numpy=by_numpy, kind=kind):
            features, centroids = world(kind)
            monkeypatch.setattr(nearest, "_BLOCK", 250)
            monkeypatch.setattr(nearest, "_CHUNK", 30)
            search = NearestCentroid(centroids, dtypes)
            search.multiplies_by_numpy = by_numpy
            assert torch.equal(search.find(features), brute(features, centroids))


def test_bfloat16_alone_would_not_do() -> None:
    features, centroids = world("noise")
    half = (
        centroids.square().sum(1) / 2 - (features.bfloat16() @ centroids.T.bfloat16()).float()
    ).argmin(1)
    assert not torch.equal(half, brute(features, centroids))


@pytest.mark.parametrize("dtypes", [BFLOAT16, FLOAT32])
def test_bound_on_rounding_is_needed_to_be_exact(
    dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    features, centroids = world("halfway")
    monkeypatch.setattr(
        NearestCentroid, "_rounding", lambda self, energy_B, dim, dtype: torch.zeros_like(energy_B)
    )
    assert not torch.equal(
        NearestCentroid(centroids, dtypes).find(features), brute(features, centroids)
    )


@pytest.mark.parametrize("dtypes", [BFLOAT16, FLOAT32])
def test_equal_centroids_answer_with_the_lowest_index(dtypes: tuple[torch.dtype, ...]) -> None:
    features, centroids = world("noise")
    doubled = torch.cat([centroids, centroids.flip(0)])
    assert torch.equal(NearestCentroid(doubled, dtypes).find(features), brute(features, centroids))
    same = torch.ones(50, 33)
    assert NearestCentroid(same, dtypes).find(features).tolist() == [0] * len(features)


def test_no_features_have_no_nearest() -> None:
    assert NearestCentroid(torch.ones(2, 3)).find(torch.zeros(0, 3)).shape == (0,)
