import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from ddm.errors import NumericalError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.routers.base import Router, posterior
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.sketch import Sketch
from tests.support.case import case
from tests.support.router_problems import (
    GROUPS,
    PATH,
    RANK,
    clustered_layout,
    make_problem,
    random_layout,
)

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
WORLD = make_problem(SHARES, [300, 200, 100])
SKETCH = WORLD.sketch()
LOG_MASS = torch.tensor(SHARES).log()


def _brute(sketch: Sketch, mass: np.ndarray, s: np.ndarray, t: float) -> np.ndarray:
    """The equation of the module, term by term, with scipy's density."""
    noise = (t / sketch.scale) ** 2 * np.eye(RANK)
    logs = []
    for c in range(GROUPS):
        mean = (1 - t) * sketch.group_mean_GR[c].double().numpy()
        cov = (1 - t) ** 2 * sketch.group_cov_GRR[c].double().numpy() + noise
        logs.append(multivariate_normal(mean, cov).logpdf(s))
    return logsumexp(np.stack(logs, 1)[:, None, :] + np.log(mass), axis=2)


def test_counts_likelihood_matches_the_mixture_written_out() -> None:
    for t in [0.0, 0.1, 0.5, 0.9, 0.999]:
        with case(t=t):
            router = CountsRouter(SKETCH, LOG_MASS, PATH)
            generator = torch.Generator().manual_seed(1)
            s = torch.randn(40, RANK, generator=generator, dtype=torch.float64)
            actual = router.sketch_log_likelihood(
                s, torch.full((40,), t, dtype=torch.float64)
            ).numpy()
            shares = np.array(SHARES) / np.array(SHARES).sum(1, keepdims=True)
            expected = _brute(SKETCH, shares, s.numpy(), t)

            def ratios(log: np.ndarray) -> np.ndarray:
                return log - log.mean(1, keepdims=True)

            np.testing.assert_allclose(ratios(actual), ratios(expected), atol=1e-6)
            wrong = _brute(SKETCH, shares[[1, 0, 2]], s.numpy(), t)
            if t < 0.9:
                # swapped shares would show
                assert np.abs(ratios(actual) - ratios(wrong)).max() > 0.1


def test_counts_router_takes_images_with_a_time_each() -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    assert isinstance(router, Router)
    x = WORLD.silos[0][:6]
    t = torch.linspace(0, 1, 6)
    together = router.log_likelihood(x, t)
    alone = torch.cat([router.log_likelihood(x[i : i + 1], t[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(
        together - together[:, :1], alone - alone[:, :1], atol=1e-5, rtol=1e-4
    )
    assert together.shape == (6, 3)


def test_counts_router_answers_the_prior_at_pure_noise_after_its_file(tmp_path) -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    save_tensors(tmp_path / "router.safetensors", router.tensors())
    loaded = load_tensors(
        tmp_path / "router.safetensors", counts_router_specs(3, GROUPS), max_bytes=10_000
    )
    again = CountsRouter.from_tensors(loaded, SKETCH, PATH)
    x = 3 * torch.randn(
        50, 1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    for candidate in (router, again):
        w = posterior(candidate, x, torch.ones(50, dtype=torch.float64), prior.log())
        torch.testing.assert_close(w, prior.expand(50, 3), atol=1e-12, rtol=0)
        w = posterior(candidate, x, torch.full((50,), 0.5, dtype=torch.float64), prior.log())
        assert float((w - prior).abs().max()) > 0.1


def test_counts_router_stays_finite_far_from_all_public_data() -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    x = torch.full((3, 1, 4, 4), 1e4)
    assert bool(torch.isfinite(router.log_likelihood(x, torch.tensor([0.0, 0.5, 1.0]))).all())


def test_counts_router_refuses_shares_that_are_none() -> None:
    with pytest.raises(ShapeError):
        CountsRouter(SKETCH, LOG_MASS[:, :3], PATH)
    with pytest.raises(NumericalError):
        CountsRouter(SKETCH, LOG_MASS + 1, PATH)
    with pytest.raises(NumericalError):
        CountsRouter(SKETCH, LOG_MASS * math.nan, PATH)


def test_counts_router_from_exact_counts_has_the_silos_shares() -> None:
    router = CountsRouter.from_counts(SKETCH, WORLD.histogram(), WORLD.num_units, 200.0, PATH)
    expected = WORLD.histogram() / torch.tensor(WORLD.num_units)[:, None]
    torch.testing.assert_close(router.log_mass_KG.exp(), expected.double(), atol=1e-3, rtol=0)
    assert float(router.error_KG.max()) < 1e-3


def _wide(groups: int, rank: int) -> Sketch:
    """Public images whose variances fall over three orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(40 * groups) % groups
    spread = torch.logspace(0, -1.5, 2 * rank)
    centre = torch.randn(groups, 2 * rank, generator=generator)[group]
    x = spread * (centre + torch.randn(len(group), 2 * rank, generator=generator))
    return Sketch.fit(x.view(-1, 1, 2, rank), group, rank, groups, released_rank=4)


def test_float32_answers_of_a_wide_sketch_are_those_of_float64() -> None:
    for t in [0.0, 1e-4, 0.05, 0.5, 1.0]:
        with case(t=t):
            sketch = _wide(groups=32, rank=48)
            share = torch.from_numpy(
                np.random.default_rng(0).dirichlet(np.full(32, 0.3), size=5)
            ).clamp(min=1e-9)
            router = CountsRouter(sketch, (share / share.sum(1, keepdim=True)).log(), PATH)
            s = torch.cat([sketch.group_mean_GR, sketch.group_mean_GR + 0.5]).repeat(20, 1)
            s = (1 - t) * s + t / sketch.scale * torch.randn(
                s.shape, generator=torch.Generator().manual_seed(1)
            )
            at = torch.full((len(s),), t)
            single = router.sketch_log_likelihood(s, at)
            double = router.sketch_log_likelihood(s.double(), at.double())
            assert single.dtype == torch.float32
            torch.testing.assert_close(
                single.softmax(1).double(), double.softmax(1), atol=5e-4, rtol=0
            )
            # the tolerance would show a lower precision
            half = router.group_log_density(s.half().float(), at)
            if t < 1:
                assert float((half - router.group_log_density(s, at)).abs().max()) > 1e-2


def test_blocks_do_not_change_the_answer(monkeypatch) -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    s = torch.randn(50, RANK, generator=torch.Generator().manual_seed(0))
    at = torch.linspace(0, 1, 50)
    whole = router.sketch_log_likelihood(s, at)
    monkeypatch.setattr("ddm.routers.gaussians._BLOCK", 3 * GROUPS * RANK)
    torch.testing.assert_close(router.sketch_log_likelihood(s, at), whole, atol=1e-5, rtol=1e-5)


def test_expert_far_from_a_sample_keeps_a_finite_likelihood() -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH).split(clustered_layout(3))
    far = 40 * SKETCH.group_mean_GR[:1].float()
    actual = router.sketch_log_likelihood(far, torch.zeros(1))
    assert bool(torch.isfinite(actual).all())
    assert float(actual.max() - actual.min()) > 200  # beyond what float32 can exponentiate


@pytest.mark.parametrize("layout", [clustered_layout(3), random_layout(3)])
def test_experts_of_a_silo_together_are_the_silo(layout, tmp_path) -> None:
    silos = CountsRouter.from_counts(SKETCH, WORLD.histogram(), WORLD.num_units, 1.0, PATH)
    experts = silos.split(layout)
    save_tensors(tmp_path / "router.safetensors", experts.tensors())
    loaded = load_tensors(
        tmp_path / "router.safetensors", counts_router_specs(6, GROUPS), max_bytes=10_000
    )
    again = CountsRouter.from_tensors(loaded, SKETCH, PATH)
    _, share = layout.split(silos.log_mass_KG.exp())
    s = torch.randn(40, RANK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = torch.full((40,), 0.3, dtype=torch.float64)
    joint = (again.sketch_log_likelihood(s, at) + share.log()).view(40, 3, 2)
    torch.testing.assert_close(
        joint.logsumexp(2), silos.sketch_log_likelihood(s, at), atol=1e-5, rtol=0
    )
    swapped = (again.sketch_log_likelihood(s, at) + share.flip(0).log()).view(40, 3, 2)
    if share.std() > 0:
        assert float((swapped.logsumexp(2) - silos.sketch_log_likelihood(s, at)).abs().max()) > 0.05
