"""True counts behind noise: Bayes by enumeration, better than clipping, and better still where like groups agree."""

import math

import numpy as np
import pytest
import torch

from ddm.privacy.noise import discrete_laplace
from ddm.routers.histograms import expected_by_likeness, expected_counts
from tests.support.seeded import SeededNoise


def _surprise(estimate: np.ndarray, true: np.ndarray) -> float:
    """What a router loses: the divergence of the true shares from the estimated ones."""
    held = true > 0
    return float((true[held] / true.sum() * np.log(true[held] / estimate[held])).sum())


def test_expected_counts_sum_to_the_public_number_and_are_positive() -> None:
    noisy = np.array([-40, 3, 900, -2])
    estimate = expected_counts(noisy, 100, 1.0, np.full(4, 0.25))
    assert estimate.mean_G.sum() == pytest.approx(100)
    assert estimate.mean_G.min() > 0
    assert np.isfinite(estimate.deviation_G).all()


def test_expected_counts_match_bayes_by_enumeration(monkeypatch) -> None:
    monkeypatch.setattr("ddm.routers.histograms._CONCENTRATIONS", np.array([8.0]))
    noisy = np.array([9, -1, 4])
    weight = np.array([0.5, 0.2, 0.3])
    num = 12
    epsilon = 0.8
    means = []
    deviations = []
    for y, w in zip(noisy, weight, strict=True):
        rate = np.linspace(0, 1, 200_001)[1:-1]
        density = rate ** (8 * w - 1) * (1 - rate) ** (8 * (1 - w) - 1)
        density /= density.sum()
        n = np.arange(num + 1)
        prior = np.array(
            [math.comb(num, k) * (density * rate**k * (1 - rate) ** (num - k)).sum() for k in n]
        )
        posterior_n = prior * np.exp(-epsilon / 2 * np.abs(y - n))
        posterior_n /= posterior_n.sum()
        means.append((posterior_n * n).sum())
        deviations.append(math.sqrt((posterior_n * (n - means[-1]) ** 2).sum()))
    expected = np.array(means) * num / sum(means)
    estimate = expected_counts(noisy, num, epsilon, weight)
    np.testing.assert_allclose(estimate.mean_G, expected, rtol=1e-3)
    np.testing.assert_allclose(estimate.deviation_G, deviations, rtol=1e-3)


def test_expected_counts_describe_a_small_silo_better_than_clipping() -> None:
    rng = np.random.default_rng(0)
    weight = rng.dirichlet(np.full(32, 5.0))

    ours = 0.0
    clipped = 0.0
    noise = SeededNoise(0)
    for _ in range(40):
        true = rng.multinomial(130, rng.dirichlet(0.7 * 32 * weight))
        noisy = true + discrete_laplace(32, 1.0, noise)
        clip = np.maximum(noisy, 0.5)
        ours += _surprise(expected_counts(noisy, 130, 1.0, weight).mean_G, true)
        clipped += _surprise(clip * 130 / clip.sum(), true)
    assert ours < 0.97 * clipped  # over other noise by 6%, with a deviation of 2%


def _world(*, alike: bool) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
    """Public shares, where 60 groups lie, and a silo's shares, which are those of five kinds if `alike`."""
    rng = np.random.default_rng(1)
    kind = np.arange(60) % 5
    mean = np.eye(5)[kind] * 8 + rng.standard_normal((60, 5))
    weight = rng.dirichlet(np.full(60, 5.0))
    ratio = rng.gamma(0.7, size=5)[kind] if alike else rng.gamma(0.7, size=60)
    return weight, torch.from_numpy(mean), weight * ratio / (weight * ratio).sum()


@pytest.mark.parametrize("alike", [True, False])
def test_like_groups_tell_what_noise_hides_and_change_little_where_they_do_not_agree(
    alike: bool,
) -> None:
    weight, mean, share = _world(alike=alike)
    rng = np.random.default_rng(2)
    noise = SeededNoise(0)
    plain = 0.0
    ours = 0.0
    for _ in range(20):
        true = rng.multinomial(400, share)
        noisy = true + discrete_laplace(60, 0.5, noise)
        plain += _surprise(expected_counts(noisy, 400, 0.5, weight).mean_G, true)
        (estimate,) = expected_by_likeness(noisy[None], [400], 0.5, weight, mean)
        assert estimate.mean_G.sum() == pytest.approx(400) and estimate.mean_G.min() > 0
        ours += _surprise(estimate.mean_G, true)
    assert ours < (0.75 if alike else 1.1) * plain


def test_a_single_group_and_groups_at_one_place_are_estimated() -> None:
    (estimate,) = expected_by_likeness(np.array([[93]]), [100], 1.0, np.ones(1), torch.zeros(1, 3))
    assert estimate.mean_G == pytest.approx([100])
    (estimate,) = expected_by_likeness(
        np.array([[93, 2]]), [100], 1.0, np.full(2, 0.5), torch.zeros(2, 3)
    )
    assert estimate.mean_G.sum() == pytest.approx(100) and np.isfinite(estimate.deviation_G).all()
    some = torch.tensor([[0.0], [0.0], [0.0], [5.0]], dtype=torch.float64)
    (estimate,) = expected_by_likeness(
        np.array([[40, 30, 20, 10]]), [100], 1.0, np.full(4, 0.25), some
    )
    assert estimate.mean_G.sum() == pytest.approx(100)
