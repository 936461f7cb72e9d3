import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import RefusedError, ShapeError
from ddm.partition.layout import ExpertPart, Layout
from ddm.privacy.noise import discrete_laplace
from ddm.protocol.partition import SiloPartition
from ddm.protocol.statistics import EXACT
from ddm.routers.base import Router
from ddm.routers.calibration import Calibrated
from ddm.routers.comparison import Comparison, HeldOut, compare, refuse_worse_than_prior
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import BANDS, cross_entropy
from ddm.routers.learned import LearnedRouter
from ddm.routers.public import Evidence, PublicData
from ddm.routers.refit import refit_shares
from ddm.routers.residual import Residual
from tests.support.errors import has_subject
from tests.support.router_problems import (
    GROUPS,
    PATH,
    RANK,
    RouterProblem,
    clustered_layout,
    make_problem,
    one_expert_per_silo,
    random_layout,
)
from tests.support.seeded import SeededNoise

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.05, 0.25, 0.3, 0.4]]
T_R = 0.7
NUM_PUBLIC = 240


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [600, 300])


def _counts(
    world: RouterProblem, noise: Tensor | None = None, epsilon: float = 2.0
) -> tuple[CountsRouter, Tensor]:
    noisy = world.histogram() + (0 if noise is None else noise)
    return CountsRouter.from_counts(world.sketch(), noisy, world.num_units, epsilon, PATH), noisy


def _silent(mixture: CountsRouter) -> LearnedRouter:
    return LearnedRouter(mixture, Residual(mixture.sketch, 2, 8, 1, PATH))


def _plain(router: Router) -> Calibrated:
    return Calibrated(router, 1.0, [1.0] * router.num_experts, PATH)


def _public(
    world: RouterProblem,
    noisy: Tensor,
    layout: Layout | None = None,
    prior: Sequence[float] | None = None,
) -> PublicData:
    evidence = Evidence(noisy, world.num_units, 2.0, layout or one_expert_per_silo(2))
    images = world.public[:NUM_PUBLIC]
    group = world.public_group[:NUM_PUBLIC]
    return PublicData(images, group, evidence, prior or [2 / 3, 1 / 3], PATH, seed=0)


def _compare(
    world: RouterProblem, counts: CountsRouter, candidate: Router, noisy: Tensor, bands=BANDS
) -> Comparison:
    held_out = HeldOut(
        list(world.released(counts.sketch, T_R, seed=7).values()), counts.sketch, T_R
    )
    return compare(_plain(counts), _plain(candidate), _public(world, noisy), held_out, bands=bands)


def test_public_comparison_finds_the_silos_own_cross_entropy(world: RouterProblem) -> None:
    counts, noisy = _counts(world)
    comparison = _compare(world, counts, _silent(counts), noisy)
    x = torch.cat(world.silos)
    label = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    for public, silo in zip(
        comparison.bands, cross_entropy(counts, x, label, world.num_units), strict=True
    ):
        assert abs(public.counts - silo.value) < 5 * silo.error
        assert public.prior == pytest.approx(
            -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)), abs=1e-6
        )


def test_router_is_not_worse_than_itself(world: RouterProblem) -> None:
    counts, noisy = _counts(world)
    comparison = _compare(world, counts, _silent(counts), noisy)
    assert comparison.sketches is not None and not comparison.worse
    assert all(band.difference == 0 for band in (*comparison.bands, comparison.sketches))
    assert not _silent(counts).differs(counts)


def test_router_refitted_on_good_sketches_is_nowhere_worse_when_counts_were_noisy(
    world: RouterProblem,
) -> None:
    counts, noisy = _counts(world, torch.tensor([[8, -6, 3, -4], [-5, 9, -7, 2]]))
    refitted = refit_shares(counts, list(world.released(counts.sketch, 0.2).values()), 0.2)
    assert not _compare(world, counts, _silent(refitted), noisy).worse
    assert _silent(refitted).differs(counts)


def test_harmful_network_is_found_worse_where_it_speaks(world: RouterProblem) -> None:
    counts, noisy = _counts(world)
    harmful = _silent(counts)
    with torch.no_grad():
        harmful.residual.layers[-1].bias.copy_(torch.tensor([-4.0, 4.0]))
    comparison = _compare(world, counts, harmful, noisy)
    assert harmful.differs(counts)
    assert comparison.worse[0] == comparison.bands[0]  # near the data it speaks loudest
    # the network needs more than is released
    assert comparison.sketches is not None and not comparison.sketches.worse


def test_spoilt_router_of_any_family_is_found_worse(world: RouterProblem) -> None:
    counts, noisy = _counts(world)

    class Opposite:
        """A router that needs the image itself, and is wrong."""

        num_experts = 2

        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return counts.log_likelihood(x_B, t_B).flip(1)

    assert _compare(
        world, counts, CountsRouter(counts.sketch, counts.log_mass_KG.flip(0), PATH), noisy
    ).worse
    comparison = _compare(world, counts, Opposite(), noisy)
    assert comparison.worse and comparison.sketches is None


def test_router_that_public_data_contradict_is_refused(world: RouterProblem) -> None:
    counts, noisy = _counts(world)
    value, low, high = refuse_worse_than_prior("counts", counts, _public(world, noisy))
    assert low < value < high < 0
    with pytest.raises(RefusedError, check=has_subject("counts router on public data")):
        refuse_worse_than_prior("counts", counts, _public(world, noisy.flip(1)))


@pytest.mark.parametrize("layout", [clustered_layout(), random_layout()])
def test_experts_of_silos_are_judged_by_their_own_part_of_the_public_images(
    world: RouterProblem, layout: Layout
) -> None:
    counts, noisy = _counts(world)
    _, share = layout.split(counts.log_mass_KG.exp())
    prior = [p * float(s) for p, s in zip([2 / 3, 2 / 3, 1 / 3, 1 / 3], share, strict=True)]
    public = _public(world, noisy, layout, prior)
    experts = _plain(counts.split(layout))
    comparison = compare(experts, experts, public)
    x = torch.cat([world.silos[k] for k in (0, 1)])
    group = torch.cat(world.silo_group)
    silo = torch.arange(2).repeat_interleave(torch.tensor(world.num_units))
    half = (
        (group >= GROUPS // 2).long() if layout == clustered_layout() else torch.arange(len(x)) % 2
    )
    for band, truth in zip(
        comparison.bands, cross_entropy(experts, x, 2 * silo + half, prior), strict=True
    ):
        assert abs(band.counts - truth.value) < 5 * truth.error + 0.01
    swapped = _plain(
        CountsRouter(counts.sketch, counts.split(layout).log_mass_KG[[1, 0, 3, 2]], PATH)
    )
    assert bool(compare(experts, swapped, public).worse) == (layout == clustered_layout())


def test_public_comparison_is_unbiased_and_its_interval_covers_under_the_noise_of_the_release(
    world: RouterProblem,
) -> None:
    exact, histogram = _counts(world)
    fixed = CountsRouter(
        exact.sketch, torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.2, 0.2, 0.2, 0.4]]).log(), PATH
    )
    other = CountsRouter(
        exact.sketch, torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]).log(), PATH
    )
    band = BANDS[1:2]

    def difference(noisy: Tensor) -> tuple[float, float, float]:
        first_band = compare(_plain(fixed), _plain(other), _public(world, noisy), bands=band).bands[
            0
        ]
        return first_band.difference, first_band.difference_low, first_band.difference_high

    truth = difference(histogram)[0]
    noise = (
        torch.from_numpy(discrete_laplace(2 * GROUPS, 2.0, SeededNoise(n)).reshape(2, GROUPS))
        for n in range(12)
    )
    intervals = [difference(histogram + one) for one in noise]
    values = [value for value, _, _ in intervals]
    assert abs(np.mean(values) - truth) < 6 * np.std(values) / math.sqrt(12) + 1e-6
    # of 12 at 95%: fewer in one of a million
    assert sum(low <= truth <= high for _, low, high in intervals) >= 6


def test_intervals_widen_with_the_number_of_looks(world: RouterProblem) -> None:
    counts, noisy = _counts(world)
    other = CountsRouter(
        counts.sketch, torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]).log(), PATH
    )
    alone = compare(_plain(counts), _plain(other), _public(world, noisy), bands=BANDS[:1]).bands[0]
    among = compare(_plain(counts), _plain(other), _public(world, noisy)).bands[0]
    assert among.difference == pytest.approx(alone.difference)
    ratio = (among.difference_high - among.difference_low) / (
        alone.difference_high - alone.difference_low
    )
    # the normal quantiles at 5% / 5 and at 5%
    assert ratio == pytest.approx(2.576 / 1.960, rel=0.15)


def test_public_comparison_refuses_releases_of_another_number_of_experts(
    world: RouterProblem,
) -> None:
    counts, noisy = _counts(world)
    with pytest.raises(ShapeError, check=has_subject("statistics")):
        _compare(world, counts, _silent(counts), noisy[:1])
    three = CountsRouter(counts.sketch, counts.log_mass_KG[[0, 1, 1]], PATH)
    with pytest.raises(ShapeError, check=has_subject("routers")):
        _compare(world, counts, three, noisy)
    held_out = HeldOut([torch.zeros(4, RANK)], counts.sketch, T_R)
    with pytest.raises(ShapeError, check=has_subject("held-out sketches")):
        compare(_plain(counts), _plain(counts), _public(world, noisy), held_out)


def test_bootstrap_of_exact_counts_is_the_limit_of_that_of_noised_ones() -> None:
    """Two ways to the same numbers: exact counts leave the images to resample, noise next to none hardly more."""
    size = torch.arange(10, 22)
    group_N = torch.arange(60) * 7 % 12
    layout = Layout.of(
        SiloPartition(min_images=1),
        [[ExpertPart(f"{k}", None, tuple(range(12)))] for k in range(12)],
    )
    figure_MNE = np.random.default_rng(0).random((2, 60, 12))
    exact, noised = (
        Evidence(torch.diag(size), size.tolist(), epsilon, layout).weights(group_N, 0)
        for epsilon in (EXACT, 60.0)
    )
    np.testing.assert_allclose(exact.means(figure_MNE), noised.means(figure_MNE), atol=1e-12)
    ends = [
        np.quantile(weights.bootstrap(figure_MNE), [0.025, 0.5, 0.975], axis=0)
        for weights in (exact, noised)
    ]
    assert float(np.abs(ends[0] - ends[1]).max()) < 0.05 * float((ends[0][2] - ends[0][0]).min())
