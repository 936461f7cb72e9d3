import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from ddm.errors import NumericalError, ShapeError
from ddm.privacy import discrete_laplace
from ddm.routers.base import Router, posterior
from ddm.routers.counts import CountsRouter, counts_router_specs, expected_counts
from ddm.sketch import Sketch
from ddm.tensors import load_tensors, save_tensors
from tests.ddm.routers.worlds import GROUPS, PATH, RANK, make_world

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
WORLD = make_world(SHARES, [300, 200, 100])
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


@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_counts_likelihood_matches_the_mixture_written_out(t: float) -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(40, RANK, generator=generator, dtype=torch.float64)
    found = router.sketch_log_likelihood(s, torch.full((40,), t, dtype=torch.float64)).numpy()
    shares = np.array(SHARES) / np.array(SHARES).sum(1, keepdims=True)
    expected = _brute(SKETCH, shares, s.numpy(), t)

    def ratios(log: np.ndarray) -> np.ndarray:
        return log - log.mean(1, keepdims=True)

    np.testing.assert_allclose(ratios(found), ratios(expected), atol=1e-6)
    wrong = _brute(SKETCH, shares[[1, 0, 2]], s.numpy(), t)
    if t < 0.9:
        assert np.abs(ratios(found) - ratios(wrong)).max() > 0.1  # swapped shares would show


def test_counts_router_takes_images_with_a_time_each() -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    assert isinstance(router, Router)
    x = WORLD.silos[0][:6]
    t = torch.linspace(0, 1, 6)
    together = router.log_likelihood(x, t)
    alone = torch.cat([router.log_likelihood(x[i : i + 1], t[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together - together[:, :1], alone - alone[:, :1], atol=1e-5, rtol=1e-4)
    assert together.shape == (6, 3)


def test_counts_router_answers_the_prior_at_pure_noise_after_its_file(tmp_path) -> None:
    router = CountsRouter(SKETCH, LOG_MASS, PATH)
    save_tensors(tmp_path / "router.safetensors", router.tensors())
    loaded = load_tensors(tmp_path / "router.safetensors", counts_router_specs(3, GROUPS), max_bytes=10_000)
    again = CountsRouter.from_tensors(loaded, SKETCH, PATH)
    x = 3 * torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
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


def test_expected_counts_sum_to_the_public_number_and_are_positive() -> None:
    noisy = np.array([-40, 3, 900, -2])
    mean, deviation = expected_counts(noisy, 100, 1.0, np.full(4, 0.25))
    assert mean.sum() == pytest.approx(100)
    assert mean.min() > 0
    assert np.isfinite(deviation).all()


def test_expected_counts_match_bayes_by_enumeration(monkeypatch) -> None:
    monkeypatch.setattr("ddm.routers.counts._CONCENTRATIONS", np.array([8.0]))
    noisy, weight, num, epsilon = np.array([9, -1, 4]), np.array([0.5, 0.2, 0.3]), 12, 0.8
    means, deviations = [], []
    for y, w in zip(noisy, weight, strict=True):
        rate = np.linspace(0, 1, 200_001)[1:-1]
        density = rate ** (8 * w - 1) * (1 - rate) ** (8 * (1 - w) - 1)
        density /= density.sum()
        n = np.arange(num + 1)
        prior = np.array([math.comb(num, k) * (density * rate**k * (1 - rate) ** (num - k)).sum() for k in n])
        posterior_n = prior * np.exp(-epsilon / 2 * np.abs(y - n))
        posterior_n /= posterior_n.sum()
        means.append((posterior_n * n).sum())
        deviations.append(math.sqrt((posterior_n * (n - means[-1]) ** 2).sum()))
    expected = np.array(means) * num / sum(means)
    found, found_deviation = expected_counts(noisy, num, epsilon, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    np.testing.assert_allclose(found_deviation, deviations, rtol=1e-3)


def test_expected_counts_describe_a_small_silo_better_than_clipping() -> None:
    rng = np.random.default_rng(0)
    weight = rng.dirichlet(np.full(32, 5.0))

    def surprise(estimate: np.ndarray, true: np.ndarray) -> float:
        """What a router loses: the divergence of the true shares from the estimated ones."""
        held = true > 0
        return float((true[held] / 130 * np.log(true[held] / estimate[held])).sum())

    ours, clipped = 0.0, 0.0
    for _ in range(40):
        true = rng.multinomial(130, rng.dirichlet(0.7 * 32 * weight))
        noisy = true + discrete_laplace(32, 1.0)
        clip = np.maximum(noisy, 0.5)
        ours += surprise(expected_counts(noisy, 130, 1.0, weight)[0], true)
        clipped += surprise(clip * 130 / clip.sum(), true)
    assert ours < clipped  # by 7% on average, with a deviation of 1%
