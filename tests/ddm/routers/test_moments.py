import json

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors
from ddm.privacy.accounting import gaussian_mu, moments_sensitivity
from ddm.protocol.plan import Plan
from ddm.routers.base import Router, SketchRouter, posterior
from ddm.routers.evaluation import cross_entropy
from ddm.routers.moments import (
    MomentsRouter,
    expected_moments,
    moments_noise_std,
    moments_router_specs,
    moments_specs,
)
from ddm.routers.sketch import Sketch
from tests.support.documents import plan_document
from tests.support.router_problems import GROUPS, PATH, World, dealt, make_world

RANK = 3
SHARES = [[0.8, 0.1, 0.05, 0.05], [0.05, 0.05, 0.1, 0.8]]


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(SHARES, [500, 400])


@pytest.fixture(scope="module")
def sketch(world: World) -> Sketch:
    return Sketch.fit(world.public, world.public_group, 6, GROUPS, released_rank=RANK)


def _released(sketch: Sketch, images: Tensor, std: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sums with the release's noise: symmetric, of twice the variance on the diagonal."""
    rng = np.random.default_rng(seed)
    s = sketch.head(RANK).project(images)
    noise = np.triu(rng.standard_normal((RANK, RANK)), 1)
    noise = noise + noise.T + np.diag(np.sqrt(2) * rng.standard_normal(RANK))
    return s.sum(0) + std * torch.from_numpy(
        rng.standard_normal(RANK)
    ), s.T @ s + std * torch.from_numpy(noise)


def _router(sketch: Sketch, world: World, std: float) -> MomentsRouter:
    released = [_released(sketch, silo, std, seed) for seed, silo in enumerate(world.silos)]
    sums, seconds = (torch.stack(part) for part in zip(*released, strict=True))
    return MomentsRouter.from_moments(sketch, sums, seconds, world.num_units, std, PATH)


@pytest.mark.parametrize("t", [0.0, 0.4, 0.95])
def test_moments_likelihood_matches_the_gaussians_written_out(
    sketch: Sketch, world: World, t: float
) -> None:
    router = _router(sketch, world, 1.0)
    assert isinstance(router, Router) and isinstance(router, SketchRouter)
    s = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = router.sketch_log_likelihood(s, torch.full((30,), t, dtype=torch.float64)).numpy()
    noise = (t / sketch.scale) ** 2 * np.eye(RANK)
    logs = [
        multivariate_normal((1 - t) * mean.numpy(), (1 - t) ** 2 * cov.numpy() + noise).logpdf(
            s[:, :RANK].numpy()
        )
        for mean, cov in zip(router.mean_KR, router.cov_KRR, strict=True)
    ]
    ratio = found[:, 0] - found[:, 1]
    np.testing.assert_allclose(ratio, logs[0] - logs[1], rtol=1e-5, atol=1e-5)
    assert np.abs(ratio - (logs[1] - logs[0])).max() > 0.01  # swapped silos would show


def test_moments_of_many_images_without_noise_are_the_silos_own(
    sketch: Sketch, world: World
) -> None:
    for silo in world.silos:
        total, second = (1000 * part for part in _released(sketch, silo, 0.0))
        mean, cov = expected_moments(sketch.head(RANK), total, second, 1000 * len(silo), 0.0)
        s = sketch.head(RANK).project(silo)
        torch.testing.assert_close(mean, s.mean(0), atol=1e-3, rtol=0)
        torch.testing.assert_close(cov, s.T.cov(), atol=2e-3, rtol=0)
        public = sketch.head(RANK).project(world.public)
        assert float((mean - public.mean(0)).abs().max()) > 0.1  # not simply the public images'


def test_moments_drowned_in_noise_tell_no_silos_apart(sketch: Sketch, world: World) -> None:
    public = sketch.head(RANK).of(world.public, torch.zeros(800), PATH).double()
    prior = torch.tensor([0.5, 0.5], dtype=torch.float64)
    w = []
    for std in (1e4, 1.0):
        router = _router(sketch, world, std)
        w.append(posterior(router, torch.cat(world.silos).double(), torch.zeros(900), prior.log()))
        if std == 1e4:
            assert float(((router.mean_KR - public.mean(0)) / public.std(0)).abs().max()) < 0.1
    assert float((w[0] - 0.5).abs().mean()) < 0.05
    assert float((w[1] - 0.5).abs().mean()) > 0.3


def test_moments_of_a_tiny_silo_make_a_gaussian_where_the_raw_ones_make_none(
    sketch: Sketch, world: World
) -> None:
    std, raw_is_none = 4.0, 0
    for seed in range(20):
        total, second = _released(sketch, world.silos[0][:15], std, seed)
        raw = second / 15 - torch.outer(total / 15, total / 15)
        raw_is_none += float(torch.linalg.eigvalsh(raw).min()) <= 0
        mean, cov = expected_moments(sketch.head(RANK), total, second, 15, std)
        assert float(torch.linalg.eigvalsh(cov).min()) > 0
        torch.testing.assert_close(cov, cov.T)
        MomentsRouter(sketch, mean[None].float(), cov[None].float(), PATH)
    assert raw_is_none >= 10
    with pytest.raises(NumericalError, match="covariances"):
        MomentsRouter(sketch, torch.zeros(1, RANK), -torch.eye(RANK)[None], PATH)


def test_noise_costs_the_router_little_where_raw_moments_would_ruin_it(
    sketch: Sketch, world: World
) -> None:
    std, prior = 20.0, [500 / 900, 400 / 900]
    released = [_released(sketch, silo, std, seed) for seed, silo in enumerate(world.silos)]
    means, covs = [], []
    for (total, second), n in zip(released, world.num_units, strict=True):
        ratio, axes = torch.linalg.eigh(second / n - torch.outer(total / n, total / n))
        means.append(total / n)
        covs.append(axes @ (ratio.clamp(min=1e-3)[:, None] * axes.T))
    raw = MomentsRouter(sketch, torch.stack(means), torch.stack(covs), PATH)
    x, label = (
        torch.cat(world.silos),
        torch.arange(2).repeat_interleave(torch.tensor(world.num_units)),
    )
    found = [
        cross_entropy(router, x, label, prior, [(0.0, 0.2)])[0].value
        for router in (_router(sketch, world, 0.0), _router(sketch, world, std), raw)
    ]
    entropy = -sum(p * np.log(p) for p in prior)
    assert found[0] < entropy - 0.1
    assert found[1] < found[0] + 0.15
    assert found[2] > entropy


def test_moments_router_tells_silos_apart_and_answers_the_prior_at_pure_noise(
    sketch: Sketch, world: World, tmp_path
) -> None:
    router = _router(sketch, world, 2.0)
    save_tensors(tmp_path / "router.safetensors", router.tensors())
    loaded = load_tensors(
        tmp_path / "router.safetensors", moments_router_specs(2, RANK), max_bytes=10_000
    )
    again = MomentsRouter.from_tensors(loaded, sketch, PATH)
    x, label = (
        torch.cat(world.silos),
        torch.arange(2).repeat_interleave(torch.tensor(world.num_units)),
    )
    bands = cross_entropy(again, x, label, world.num_units)
    entropy = -sum(n / 900 * np.log(n / 900) for n in world.num_units)
    assert bands[0].value < entropy - 0.1
    prior = torch.tensor([0.7, 0.3], dtype=torch.float64)
    w = posterior(again, 3 * x.double(), torch.ones(900, dtype=torch.float64), prior.log())
    torch.testing.assert_close(w, prior.expand(900, 2), atol=1e-9, rtol=0)


def test_experts_of_a_silo_share_its_gaussian_and_a_head_sees_less(
    sketch: Sketch, world: World
) -> None:
    router = _router(sketch, world, 2.0)
    s, at = torch.randn(9, RANK, generator=torch.Generator().manual_seed(0)), torch.full((9,), 0.2)
    whole = router.sketch_log_likelihood(s, at)
    torch.testing.assert_close(
        router.split(dealt()).sketch_log_likelihood(s, at), whole[:, [0, 0, 1, 1]]
    )
    assert (whole[:, 0] - whole[:, 1]).abs().min() > 1e-2
    assert router.head(2).rank == 2 and router.head(50).rank == RANK
    assert router.head(2).sketch_log_likelihood(s, at).shape == (9, 2)


def test_plan_says_what_moments_are_released_with_how_much_noise() -> None:
    document = plan_document(router={"kind": "moments"})
    document["statistics"] |= {"moments": {"epsilon": 2.0, "delta": 1e-6, "rank": 5}}
    plan = Plan.model_validate_json(json.dumps(document))
    assert moments_specs(plan) == {
        "sum": TensorSpec("F32", (5,)),
        "second": TensorSpec("F32", (5, 5)),
    }
    assert moments_noise_std(plan) == pytest.approx(moments_sensitivity(5) / gaussian_mu(2.0, 1e-6))
    with pytest.raises(ShapeError, match="plan"):
        moments_noise_std(Plan.model_validate_json(json.dumps(plan_document())))
