"""The temperature of a router, and the error of its calibration before and after."""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torch import Tensor

from ddm.diffusion.path import CosinePath, LinearPath
from ddm.errors import MathError
from ddm.partition.layout import ExpertPart, Layout
from ddm.protocol.calibration import CalibrationBand, calibration_bands, calibration_rows
from ddm.protocol.partition import SiloPartition
from ddm.protocol.statistics import EXACT
from ddm.routers.base import SketchRouter, posterior
from ddm.routers.calibration import Calibrated, calibrate, halves, reliability
from ddm.routers.counts import CountsRouter
from ddm.routers.evaluation import BANDS
from ddm.routers.public import Evidence, PublicData, PublicWeights
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.router_problems import (
    GROUPS,
    PATH,
    OverconfidentRouter,
    RouterProblem,
    make_problem,
    one_expert_per_silo,
)

SHARES = [[0.7, 0.1, 0.1, 0.1], [0.05, 0.25, 0.3, 0.4]]
PRIOR = [2 / 3, 1 / 3]


@pytest.fixture(scope="module")
def world() -> RouterProblem:
    return make_problem(SHARES, [600, 300])


@pytest.fixture(scope="module")
def public(world: RouterProblem) -> PublicData:
    evidence = Evidence(world.histogram(), world.num_units, 20.0, one_expert_per_silo(2))
    return PublicData(world.public, world.public_group, evidence, PRIOR, PATH, seed=0)


@pytest.fixture(scope="module")
def counts(world: RouterProblem) -> CountsRouter:
    return CountsRouter.from_counts(world.sketch(), world.histogram(), world.num_units, 20.0, PATH)


def test_calibration_recovers_the_temperature_of_an_overconfident_router(
    counts: CountsRouter, public: PublicData
) -> None:
    calibration = calibrate(OverconfidentRouter(counts, 3.0), public)
    assert calibration.temperature == pytest.approx(3.0, rel=0.1)
    for error in calibration.errors[:4]:
        value, low, high = error.after
        assert value < error.before[0]
        assert low <= value <= high
    before = calibration.errors[1].before
    after = calibration.errors[1].after
    assert after[0] < 0.5 * before[0]
    # The intervals do not touch.
    assert after[2] < before[1]


def test_temperature_has_no_effect_at_pure_noise_and_its_full_effect_without_noise(
    counts: CountsRouter, world: RouterProblem
) -> None:
    x = world.silos[0][:5]
    for path in (LinearPath(), CosinePath()):
        warm = Calibrated(counts, 3.0, [1, 1], path)
        for t, temperature in (
            (0.0, 3.0),
            (1.0, 1.0),
            (0.4, 1 + 2 * float(path.alpha(torch.tensor(0.4))) ** 2),
        ):
            at = torch.full((5,), t)
            odds, cooled = (router.log_likelihood(x, at).diff(dim=1) for router in (counts, warm))
            torch.testing.assert_close(temperature * cooled, odds, rtol=1e-4, atol=1e-4)


def test_times_are_those_that_a_router_is_asked_at(public: PublicData) -> None:
    class Clock:
        num_experts = 2

        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return t_B[:, None].expand(-1, 2)

    for index, band in enumerate(BANDS):
        asked_DN = public.log_likelihoods(Clock(), band, index)[..., 0]
        torch.testing.assert_close(asked_DN.float(), public.times(band, index), rtol=0, atol=0)


def test_calibration_recovers_the_temperature_of_a_timid_router(
    counts: CountsRouter, public: PublicData
) -> None:
    assert calibrate(OverconfidentRouter(counts, 0.5), public).temperature == pytest.approx(
        0.5, rel=0.1
    )


def test_calibrated_router_keeps_temperature_1(counts: CountsRouter, public: PublicData) -> None:
    calibration = calibrate(counts, public)
    assert calibration.temperature == 1.0
    assert all(error.before == error.after for error in calibration.errors)


def test_calibration_error_matches_its_definition_written_out(world: RouterProblem) -> None:
    group = torch.tensor([0, 0, 1, 1, 2, 3])
    weights = PublicWeights(
        Evidence(world.histogram(), world.num_units, 20.0, one_expert_per_silo(2)), group, 0
    )
    first = np.random.default_rng(0).random((2, 6))
    w_DNE = torch.from_numpy(np.stack([first, 1 - first], -1))
    gaps = np.zeros(15)
    for w_NE in w_DNE.numpy():
        for w_E, weight_E in zip(w_NE, weights.weight_NE, strict=True):
            gaps[min(int(15 * w_E.max()), 14)] += (
                w_E.max() * weight_E.sum() - weight_E[w_E.argmax()]
            ) / 2
    (value, low, high), _ = reliability(weights, w_DNE)
    assert value == pytest.approx(np.abs(gaps).sum())
    assert 0 <= low < high


def test_calibration_error_of_labelled_images_is_that_of_scikit_learn_in_every_band(
    counts: CountsRouter,
) -> None:
    """Islands judge a router on images of known islands, as many of each as it has: the plain error."""
    # seven of ten of island 0: shares inside a bin of confidence, not between two
    label_N = torch.arange(300) % 10 // 7
    size = torch.bincount(label_N)
    parts = [[ExpertPart(f"{k}", None, (0, 1))] for k in range(2)]
    layout = Layout.of(SiloPartition(min_images=1), parts)
    evidence = Evidence(torch.diag(size), size.tolist(), EXACT, layout)
    images = torch.randn(300, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = PublicData(images, label_N, evidence, (size.double() / 300).tolist(), PATH, seed=0)
    calibration = calibrate(OverconfidentRouter(counts, 2.0), data)
    _, judge_N = halves(label_N, 0)
    log_prior_E = (size.double() / 300).log()
    assert [(band.low, band.high) for band in calibration.errors] == list(
        BANDS
    ) and calibration.temperature != 1.0
    for index, band in enumerate(BANDS):
        log_DNE = data.log_likelihoods(OverconfidentRouter(counts, 2.0), band, index)[:, judge_N]
        for temperature, error in (
            (1.0, calibration.errors[index].before),
            (calibration.temperature, calibration.errors[index].after),
        ):
            divisor_DN = (
                1 + (temperature - 1) * (1 - data.times(band, index)[:, judge_N].double()).square()
            )
            w_DNE = (log_DNE / divisor_DN[..., None] + log_prior_E).softmax(2)
            confidence, top = (part.flatten().numpy() for part in w_DNE.max(2))
            hit = top == label_N[judge_N].repeat(len(w_DNE)).numpy()
            right, claimed = calibration_curve(hit, confidence, n_bins=15)
            share, _ = np.histogram(confidence, np.linspace(0, 1, 16))
            theirs = float((share[share > 0] / share.sum() * np.abs(right - claimed)).sum())
            assert error[0] == pytest.approx(theirs, abs=1e-6) and error[1] <= error[0] <= error[2]
        # the diagram is of the published temperature, the last one
        seen = share[share > 0] / share.sum() >= 0.01
        bins = calibration.errors[index].bins
        assert [calibration_bin.confidence for calibration_bin in bins] == pytest.approx(
            list(claimed[seen]), abs=1e-6
        )
        assert [calibration_bin.accuracy[0] for calibration_bin in bins] == pytest.approx(
            list(right[seen]), abs=1e-6
        )
        assert all(
            0
            <= calibration_bin.accuracy[1]
            <= calibration_bin.accuracy[0]
            <= calibration_bin.accuracy[2]
            <= 1
            for calibration_bin in bins
        )
        assert sum(calibration_bin.share for calibration_bin in bins) == pytest.approx(1, abs=0.05)


def test_interval_of_a_small_calibration_error_is_around_the_error() -> None:
    """The router is right as often as it says, and the counts are noisy: every resample has a greater error than it."""
    group_N = torch.arange(400) % 10
    share_G = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    histogram = (1000 * torch.stack([share_G, 1 - share_G])).round().long()
    parts = [[ExpertPart(f"{k}", None, tuple(range(10)))] for k in range(2)]
    layout = Layout.of(SiloPartition(min_images=1), parts)
    mechanism_mu = 0.1
    evidence = Evidence(histogram, histogram.sum(1).tolist(), mechanism_mu, layout)
    weights = PublicWeights(evidence, group_N, 0)
    right_N = share_G[group_N]
    (value, low, high), _ = reliability(weights, torch.stack([right_N, 1 - right_N], 1)[None])
    assert value < 1e-6
    assert low <= value <= high


def test_calibration_is_read_back_from_a_manifest_as_it_was_measured() -> None:
    bands = [
        CalibrationBand(low=low, high=high, before=(0.2, 0.1, 0.3), after=(low / 9, 0.0, high / 9))
        for low, high in BANDS
    ]
    listed = [figure for band in reversed(bands) for figure in band.evaluations()]
    other = listed[0].model_copy(
        update={"metric": "router_cross_entropy_counts_minus_prior_t_0.00_0.20"}
    )
    assert calibration_bands([other, *listed]) == bands
    assert calibration_bands(listed[1:])[-1] == bands[-2]  # half of a band is none
    rows = calibration_rows(bands)
    assert rows[1] == ("t 0.2 to 0.4", "0.0222 [0.0000, 0.0444]", "0.2000 [0.1000, 0.3000]")


def test_weights_are_the_silos_shares_spread_over_the_images_of_a_group(
    world: RouterProblem,
) -> None:
    histogram = world.histogram().double()
    weights = PublicWeights(
        Evidence(world.histogram(), world.num_units, 20.0, one_expert_per_silo(2)),
        world.public_group,
        0,
    )
    expected = (
        histogram / histogram.sum() / torch.bincount(world.public_group, minlength=GROUPS)
    ).T
    np.testing.assert_allclose(weights.weight_NE, expected[world.public_group].numpy())


def test_temperature_and_training_prior_are_taken_off(
    counts: CountsRouter, world: RouterProblem
) -> None:
    x = world.silos[0][:50]
    at = torch.full((50,), 0.3)
    rho = torch.tensor([0.9, 0.1])

    class Biased:
        """What a network trained on nine images of the first expert for each of the second answers."""

        num_experts = 2

        def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
            return counts.log_likelihood(x_B, t_B).log_softmax(1) + rho.log()

    log_prior = torch.tensor(PRIOR).log()
    truth = posterior(counts, x, at, log_prior)
    torch.testing.assert_close(
        posterior(Calibrated(Biased(), 1.0, [9, 1], PATH), x, at, log_prior),
        truth,
        atol=1e-5,
        rtol=0,
    )
    assert (
        float(
            (posterior(Calibrated(Biased(), 1.0, [1, 1], PATH), x, at, log_prior) - truth)
            .abs()
            .max()
        )
        > 0.1
    )
    sharp = Calibrated(OverconfidentRouter(counts, 3.0), 3.0, [1, 1], PATH)
    torch.testing.assert_close(posterior(sharp, x, at, log_prior), truth, atol=1e-5, rtol=0)
    pure = torch.ones(50, dtype=torch.float64)
    for router in (
        Calibrated(Biased(), 4.0, [9, 1], PATH),
        sharp,
        Calibrated(counts, 0.2, [1, 1], PATH),
    ):
        w = posterior(router, x.double(), pure, log_prior.double())
        torch.testing.assert_close(w, log_prior.double().exp().expand(50, 2), atol=1e-6, rtol=0)


def test_calibrated_router_answers_for_sketches_as_for_images(
    counts: CountsRouter, world: RouterProblem
) -> None:
    assert isinstance(counts, SketchRouter)
    router = Calibrated(counts, 2.0, [1, 1], PATH)
    answer = router.on_sketches(counts.sketch.rank)
    assert (
        answer is not None
        and Calibrated(OverconfidentRouter(counts, 1.0), 1.0, [1, 1], PATH).on_sketches(2) is None
    )
    x = world.silos[0][:20]
    at = torch.full((20,), 0.4)
    torch.testing.assert_close(
        answer(counts.sketch.of(x, at, PATH), at), router.log_likelihood(x, at)
    )


def test_manipulated_temperature_is_refused(counts: CountsRouter) -> None:
    for temperature in [0.0, -1.0, 0.04, 21.0, math.nan, math.inf]:
        with (
            case(temperature=temperature),
            pytest.raises(MathError, check=has_subject("router temperature")),
        ):
            Calibrated(counts, temperature, [1, 1], PATH)


@pytest.mark.parametrize("prior", [[1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0]])
def test_manipulated_training_prior_is_refused(counts: CountsRouter, prior: list[float]) -> None:
    with pytest.raises(MathError, check=has_subject("prior")):
        Calibrated(counts, 1.0, prior, PATH)
