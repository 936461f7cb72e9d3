import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import RefusedError, ShapeError
from ddm.privacy import discrete_laplace
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import BANDS, Comparison, cross_entropy, public_comparison
from ddm.routers.learned import LearnedRouter, Residual, refit_shares
from tests.ddm.routers.worlds import GROUPS, PATH, RANK, World, make_world

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.05, 0.25, 0.3, 0.4]]
T_R = 0.7


class Flat:
    """A router that knows nothing."""

    num_experts = 2

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return torch.zeros(len(x_B), 2)


class TwoNormals:
    """The exact router of two experts N(-1, 1/4) and N(1, 1/4) in one dimension."""

    num_experts = 2

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        mean = (1 - t_B)[:, None] * torch.tensor([-1.0, 1.0])
        variance = (0.25 * (1 - t_B).square() + t_B.square())[:, None]
        return -0.5 * (x_B.flatten(1) - mean).square() / variance


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(SHARES, [600, 300])


def test_cross_entropy_of_a_flat_router_is_the_entropy_of_the_prior(world: World) -> None:
    x, label = torch.cat(world.silos), torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    for prior in ([600, 300], [0.5, 0.5], [0.9, 0.1]):
        p = np.array(prior) / sum(prior)
        for band in cross_entropy(Flat(), x, label, prior):
            assert band.value == pytest.approx(-(p * np.log(p)).sum(), abs=1e-6)


def test_cross_entropy_of_the_exact_router_matches_numerical_integration() -> None:
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(20_000) % 2
    x = (2 * label - 1)[:, None] + 0.5 * torch.randn(20_000, 1, generator=generator)
    prior = np.array([0.7, 0.3])
    for (low, high), band in zip(BANDS, cross_entropy(TwoNormals(), x, label, prior.tolist()), strict=True):
        grid = np.linspace(-7, 7, 2001)
        total = 0.0
        times = np.linspace(low, high, 41)[:-1] + (high - low) / 80
        for t in times:
            std = math.sqrt(0.25 * (1 - t) ** 2 + t**2)
            density = np.stack([np.exp(-0.5 * ((grid - (1 - t) * m) / std) ** 2) / std for m in (-1, 1)])
            density /= density.sum(1, keepdims=True)
            joint = prior[:, None] * density
            total -= (joint * np.log(joint / joint.sum(0))).sum() / len(times)
        assert abs(band.value - total) < 5 * band.error + 1e-3
    flat = cross_entropy(Flat(), x, label, prior.tolist())
    assert flat[0].value > cross_entropy(TwoNormals(), x, label, prior.tolist())[0].value + 0.3


def test_cross_entropy_refuses_an_expert_without_images() -> None:
    with pytest.raises(ShapeError):
        cross_entropy(Flat(), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), [0.5, 0.5])


def _counts(world: World, noise: Tensor | None = None, epsilon: float = 2.0) -> tuple[CountsRouter, Tensor]:
    noisy = world.histogram() + (0 if noise is None else noise)
    return CountsRouter.from_counts(world.sketch(), noisy, world.num_units, epsilon, PATH), noisy


def _silent(mixture: CountsRouter) -> LearnedRouter:
    return LearnedRouter(mixture, Residual(RANK, 2, 8, 1), T_R)


def _compare(world: World, counts: CountsRouter, learned: LearnedRouter, noisy: Tensor, bands=BANDS) -> Comparison:
    held_out = world.released(counts.sketch, T_R, seed=7)
    return public_comparison(
        counts,
        learned,
        world.public[:240],
        world.public_group[:240],
        noisy,
        world.num_units,
        held_out,
        epsilon=2.0,
        seed=0,
        bands=bands,
    )


def test_public_comparison_finds_the_silos_own_cross_entropy(world: World) -> None:
    counts, noisy = _counts(world)
    found = _compare(world, counts, _silent(counts), noisy)
    x, label = torch.cat(world.silos), torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    for public, silo in zip(found.bands, cross_entropy(counts, x, label, world.num_units), strict=True):
        assert abs(public.counts - silo.value) < 5 * silo.error
        assert public.prior == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)), abs=1e-6)


def test_untrained_router_is_not_published_even_though_it_is_no_worse(world: World) -> None:
    counts, noisy = _counts(world)
    found = _compare(world, counts, _silent(counts), noisy)
    assert not found.trained and not found.publish_learned
    assert all(band.difference == 0 and not band.worse for band in (*found.bands, found.sketches))


def test_router_refitted_on_good_sketches_is_published_when_counts_were_noisy(world: World) -> None:
    counts, noisy = _counts(world, torch.tensor([[8, -6, 3, -4], [-5, 9, -7, 2]]))
    refitted = refit_shares(counts, list(world.released(counts.sketch, 0.2).values()), world.num_units, 0.2)
    found = _compare(world, counts, _silent(refitted), noisy)
    assert found.trained and found.publish_learned


def test_harmful_network_is_not_published(world: World) -> None:
    counts, noisy = _counts(world)
    harmful = _silent(counts)
    with torch.no_grad():
        harmful.residual.layers[-1].bias.copy_(torch.tensor([-4.0, 4.0]))
    found = _compare(world, counts, harmful, noisy)
    assert found.trained and not found.publish_learned
    assert found.sketches.worse and found.bands[-1].worse
    assert not found.bands[0].worse  # below t_release the network is silent


def test_shares_that_were_spoilt_are_not_published(world: World) -> None:
    counts, noisy = _counts(world)
    spoilt = CountsRouter(counts.sketch, counts.log_mass_KG.flip(0), PATH)
    assert not _compare(world, counts, _silent(spoilt), noisy).publish_learned


def test_counts_that_contradict_the_public_data_are_refused(world: World) -> None:
    counts, noisy = _counts(world)
    with pytest.raises(RefusedError, match="prior"):
        _compare(world, counts, _silent(counts), noisy.flip(1))


def test_public_comparison_is_unbiased_and_its_interval_covers_under_the_noise_of_the_release(world: World) -> None:
    exact, histogram = _counts(world)
    fixed = CountsRouter(exact.sketch, torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.2, 0.2, 0.2, 0.4]]).log(), PATH)
    other = _silent(CountsRouter(exact.sketch, torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]).log(), PATH))
    band = BANDS[1:2]
    truth = _compare(world, fixed, other, histogram, band).bands[0].difference
    found, covered = [], 0
    for _ in range(12):
        noise = torch.from_numpy(discrete_laplace(2 * GROUPS, 2.0).reshape(2, GROUPS))
        result = _compare(world, fixed, other, histogram + noise, band).bands[0]
        found.append(result.difference)
        covered += result.difference_low <= truth <= result.difference_high
    assert abs(np.mean(found) - truth) < 6 * np.std(found) / math.sqrt(12) + 1e-6
    assert covered >= 6  # of 12 at 95%: fewer by chance under one time in a million


def test_public_comparison_refuses_releases_of_another_number_of_experts(world: World) -> None:
    counts, noisy = _counts(world)
    with pytest.raises(ShapeError):
        _compare(world, counts, _silent(counts), noisy[:1])
