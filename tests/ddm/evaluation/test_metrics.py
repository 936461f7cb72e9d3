"""The metrics against closed forms and against other implementations: torch-fidelity and prdc."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import MathError, NumericalError, ShapeError
from ddm.evaluation.copies import num_pixel_values, pixel_rows
from ddm.evaluation.frechet import (
    Moments,
    fid_infinity_of,
    frechet_distance,
    frechet_terms,
    transport,
)
from ddm.evaluation.intervals import bootstrap_estimate, proportion, wilson
from ddm.evaluation.metrics import FeatureSet, measure, measure_floor, metrics_bytes
from ddm.evaluation.neighbours import nearest
from ddm.evaluation.shares import share_error
from tests.support.errors import has_subject

K = 5


def rows(num: int, dim: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(
        dim, dim, generator=torch.Generator().manual_seed(99)
    ) / dim**0.5 + torch.eye(dim)
    return (scale * torch.randn(num, dim, generator=generator) @ mixing + shift).float()


@pytest.fixture(scope="module")
def others() -> SimpleNamespace:
    """The other implementations; importing them warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import prdc
        from torch_fidelity import metric_fid, metric_kid, metric_prc

    return SimpleNamespace(prdc=prdc, fid=metric_fid, kid=metric_kid, prc=metric_prc)


@pytest.fixture(scope="module")
def pair() -> tuple[Tensor, Tensor]:
    return rows(400, 12, 1, shift=0.2, scale=0.9), rows(500, 12, 2)


def figures(samples: Tensor, reference: Tensor, k: int = K) -> dict[str, float]:
    metrics, _ = measure(FeatureSet.of(samples, k), FeatureSet.of(reference, k))
    return {name: estimate.value for name, estimate in metrics.items()}


def test_distance_of_two_gaussians_is_the_closed_form() -> None:
    """Of commuting covariances ``|m|^2 + sum (sqrt a - sqrt b)^2``; one rotation of both changes nothing."""
    a, b, apart = (
        torch.tensor(part, dtype=torch.float64)
        for part in ([4.0, 1.0, 0.25], [1.0, 9.0, 0.25], [1, 0, 2])
    )
    turn, _ = torch.linalg.qr(
        torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    first = Moments(10, torch.zeros(3, dtype=torch.float64), turn @ a.diag() @ turn.T)
    second = Moments(10, apart, turn @ b.diag() @ turn.T)
    expected = float(apart.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-10)
    maps = transport(first, second)
    assert maps.distance == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(maps.map_to_b_DD, turn @ (b / a).sqrt().diag() @ turn.T)
    torch.testing.assert_close(
        maps.map_to_a_DD @ maps.map_to_b_DD, torch.eye(3, dtype=torch.float64)
    )
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-9)


def test_fid_is_that_of_torch_fidelity(
    pair: tuple[Tensor, Tensor], others: SimpleNamespace
) -> None:
    parts = [part.double().numpy() for part in pair]
    sides = [{"mu": part.mean(0), "sigma": np.cov(part, rowvar=False)} for part in parts]
    (expected,) = others.fid.fid_statistics_to_metric(*sides, verbose=False).values()
    assert figures(*pair)["fid"] == pytest.approx(expected, rel=1e-6)


def test_kid_is_that_of_torch_fidelity_over_all_images_at_once(
    pair: tuple[Tensor, Tensor], others: SimpleNamespace
) -> None:
    samples = pair[0]
    reference = pair[1][: len(pair[0])]  # its estimate wants sets of one size
    whole = {"kid_subsets": 1, "kid_subset_size": len(samples), "rng_seed": 0, "verbose": False}
    theirs = others.kid.kid_features_to_metric(samples.double(), reference.double(), **whole)
    assert figures(samples, reference)["kid"] == pytest.approx(
        theirs["kernel_inception_distance_mean"], rel=1e-9
    )


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of fewer draws, for experiments that are repeated many times."""
    monkeypatch.setattr("ddm.evaluation.intervals.DRAWS", 400)


def test_kid_of_one_distribution_is_zero_on_average_and_never_bounded_by_it(
    few_draws: None,
) -> None:
    kids = [figures(rows(60, 4, 2 * n), rows(60, 4, 2 * n + 1))["kid"] for n in range(60)]
    assert abs(np.mean(kids)) < 5 * np.std(kids) / 60**0.5
    assert min(kids) < 0  # the biased estimate never is


@pytest.mark.parametrize("k", [1, 5])
def test_precision_recall_density_and_coverage_are_those_of_prdc(
    pair: tuple[Tensor, Tensor], others: SimpleNamespace, k: int
) -> None:
    samples, reference = pair
    expected = others.prdc.compute_prdc(
        real_features=reference.numpy(), fake_features=samples.numpy(), nearest_k=k
    )
    metrics = figures(samples, reference, k)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-9), name
    swapped = figures(reference, samples, k)
    assert (
        swapped["precision"] == pytest.approx(metrics["recall"])
        and swapped["density"] != metrics["density"]
    )


def test_precision_and_recall_are_those_of_torch_fidelity(
    pair: tuple[Tensor, Tensor], others: SimpleNamespace
) -> None:
    theirs = others.prc.prc_features_to_metric(
        *pair, prc_neighborhood=3, prc_batch_size=100, verbose=False
    )
    ours = figures(*pair, 3)
    assert theirs["precision"] == pytest.approx(ours["precision"], abs=1e-6)
    assert theirs["recall"] == pytest.approx(ours["recall"], abs=1e-6)


def test_identical_sets_are_perfect_and_disjoint_ones_share_nothing(
    pair: tuple[Tensor, Tensor],
) -> None:
    same = figures(pair[0], pair[0].clone())
    assert same["fid"] == pytest.approx(0.0, abs=1e-8)
    assert same["precision"] == same["recall"] == same["coverage"] == 1.0
    assert same["kid"] < 0  # unbiased: equal pairs are left out on one side only
    apart = figures(pair[0] + 1000.0, pair[0])
    assert apart["precision"] == apart["recall"] == apart["density"] == apart["coverage"] == 0.0
    assert apart["fid"] == pytest.approx(12 * 1000.0**2, rel=1e-5)


def test_collapse_loses_recall_and_coverage_but_no_precision() -> None:
    """The control that tells the four apart: samples of one of two modes."""
    left = rows(300, 4, 1)
    right = rows(300, 4, 2, shift=40.0)
    metrics = figures(rows(300, 4, 3), torch.cat([left, right]))
    assert (
        metrics["precision"] > 0.9
        and 0.35 < metrics["recall"] < 0.55
        and 0.35 < metrics["coverage"] < 0.55
    )


def test_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Tensor, Tensor]
) -> None:
    whole = figures(*pair)
    for module, name, value in (
        ("neighbours", "_BLOCK_BYTES", 8 * 500 * 7),
        ("neighbours", "_TILE_ROWS", 33),
    ):
        monkeypatch.setattr(f"ddm.evaluation.{module}.{name}", value)
    monkeypatch.setattr("ddm.evaluation.frechet.BLOCK", 17)
    parts = figures(*pair)
    for name in whole:
        assert parts[name] == pytest.approx(whole[name], rel=1e-9), name


def test_terms_are_the_derivative_of_the_distance(pair: tuple[Tensor, Tensor]) -> None:
    """Give one image a little more weight: the distance moves by its term, compared with the mean term."""
    samples, reference = (part.double() for part in pair)
    a = Moments.of(samples)
    b = Moments.of(reference)
    terms = frechet_terms(samples, a, b, transport(a, b).map_to_b_DD)
    terms = terms - terms.mean()
    step = 1e-5
    for index in (0, 7, 100):
        weight = torch.full((len(samples),), (1 - step) / len(samples), dtype=torch.float64)
        weight[index] += step
        mean = weight @ samples
        moved = Moments(len(samples), mean, ((samples - mean).T * weight) @ (samples - mean))
        biased = Moments(
            len(samples), a.mean_D, a.covariance_DD * (len(samples) - 1) / len(samples)
        )
        slope = (frechet_distance(moved, b) - frechet_distance(biased, b)) / step
        assert slope == pytest.approx(float(terms[index]), rel=0.02, abs=0.02 * float(terms.std()))


def test_intervals_are_as_wide_as_repeating_the_experiment(few_draws: None) -> None:
    """Their width over 3.92 is the spread of the metric over fresh images."""
    runs = [
        measure(
            FeatureSet.of(rows(200, 4, n, 0.3), K), FeatureSet.of(rows(200, 4, 500 + n), K), seed=n
        )[0]
        for n in range(60)
    ]
    for name in ("fid", "kid", "precision", "recall"):
        spread = float(np.std([run[name].value for run in runs]))
        width = float(np.mean([(run[name].high - run[name].low) / 3.92 for run in runs]))
        assert 0.6 < width / spread < 1.6, name  # a spread of 60 runs is known to 9%


def test_extrapolation_removes_most_of_the_bias() -> None:
    pairs = [(rows(100, 8, n), rows(100, 8, 1000 + n)) for n in range(20)]
    plain = [frechet_distance(*(Moments.of(part) for part in pair)) for pair in pairs]
    limits = [
        fid_infinity_of(value, *pair, seed=0) for value, pair in zip(plain, pairs, strict=True)
    ]
    assert np.mean(plain) > 0.5  # of one distribution: all of it is bias
    assert abs(np.mean(limits)) < 0.25 * np.mean(plain)
    assert fid_infinity_of(1.0, rows(100, 60, 0), rows(100, 60, 1), seed=0) is None


def test_floor_compares_as_many_samples_with_the_same_half_of_the_reference() -> None:
    reference = FeatureSet.of(rows(400, 6, 0), K)
    floor = measure_floor(FeatureSet.of(rows(150, 6, 1), K), reference)
    assert floor is not None
    assert (floor.num, floor.num_reference) == (150, 200)
    assert floor.metrics.keys() == floor.samples.keys()
    for metrics in (floor.metrics, floor.samples):
        assert metrics["precision"].value > 0.8 and metrics["kid"].low < 0 < metrics["kid"].high


def test_floor_is_absent_when_a_side_has_no_more_images_than_features() -> None:
    many = FeatureSet.of(rows(200, 30, 0), K)
    few = FeatureSet.of(rows(40, 30, 1), K)
    assert measure_floor(many, few) is None
    assert measure_floor(FeatureSet.of(rows(30, 30, 1), K), many) is None


def test_floor_of_perfect_samples_is_what_they_score_and_worse_samples_score_more() -> None:
    dim = 8
    num = 200
    num_seeds = 12
    floors = []
    perfect = []
    whole = []
    shifted = []
    for seed in range(num_seeds):
        generator = torch.Generator().manual_seed(seed)
        real = torch.randn(2 * num, dim, generator=generator)
        drawn = torch.randn(5 * num, dim, generator=generator)
        reference = FeatureSet.of(real, K)
        samples = FeatureSet.of(drawn, K)
        floor = measure_floor(samples, reference, seed=seed)
        assert floor is not None and (floor.num, floor.num_reference) == (num, num)
        floors.append(floor.metrics["fid"].value)
        perfect.append(floor.samples["fid"].value)
        whole.append(measure(samples, reference)[0]["fid"].value)
        moved = FeatureSet.of(drawn + 0.2, K)
        floor_of_moved = measure_floor(moved, reference, seed=seed)
        assert floor_of_moved is not None
        shifted.append(floor_of_moved.samples["fid"].value)
    # For two samples of one Gaussian with unit covariance the means contribute D (1/n + 1/m), and the covariances, of
    # which |S_a - S_b|^2 / 4 remains to second order, D (D + 1) / 4 (1/n + 1/m).
    expected = (dim + dim * (dim + 1) / 4) * 2 / num
    standard_error = float(np.std(floors)) / num_seeds**0.5
    assert np.mean(floors) == pytest.approx(expected, abs=4 * standard_error + 0.05 * expected)
    assert np.mean(perfect) == pytest.approx(np.mean(floors), abs=6 * standard_error)
    # The figure of all samples against the whole reference looks better than perfect: it has more images.
    assert np.mean(whole) < 0.5 * np.mean(floors)
    # The shift adds its squared length, 0.04 D, to the distance.
    assert np.mean(shifted) - np.mean(perfect) == pytest.approx(0.04 * dim, abs=0.1)


def test_share_error_and_what_chance_makes_of_it() -> None:
    silo_N = torch.tensor([0] * 700 + [1] * 200 + [2] * 100)
    error = share_error(silo_N, [6, 3, 1])
    assert error.error.value == pytest.approx(0.1)
    assert error.error.low < 0.1 < error.error.high and error.error.high - error.error.low < 0.08
    assert error.by_chance < error.error.low
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(1000, [0.6, 0.3, 0.1], size=20_000) / 1000
    assert error.by_chance == pytest.approx(
        np.quantile(np.abs(drawn - [0.6, 0.3, 0.1]).sum(1) / 2, 0.975), rel=0.1
    )
    assert share_error(torch.zeros(50).long(), [1.0, 0.0]).error.value == 0.0


def test_interval_of_a_share_is_wilsons_and_of_a_mean_its_standard_error() -> None:
    from scipy.stats import binomtest

    for count, num in ((0, 40), (13, 40), (40, 40)):
        expected = binomtest(count, num).proportion_ci(method="wilson")
        assert wilson(count, num) == pytest.approx((expected.low, expected.high), abs=1e-6)
        assert proportion(torch.arange(num) < count).value == count / num
    term_N = torch.randn(500, generator=torch.Generator().manual_seed(0))
    estimate = bootstrap_estimate(2.0, [term_N], seed=0)
    assert estimate.high - estimate.low == pytest.approx(
        2 * 1.96 * float(term_N.std()) / 500**0.5, rel=0.1
    )


def test_nearest_is_brute_force(pair: tuple[Tensor, Tensor]) -> None:
    apart = torch.cdist(pair[0].double(), pair[1].double())
    distance, which = nearest(*pair)
    torch.testing.assert_close(distance.sqrt(), apart.min(1).values)
    assert torch.equal(which, apart.argmin(1))


def test_what_cannot_be_measured_is_refused(pair: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(MathError, match="at least 8"):
        FeatureSet.of(pair[0][:7], 1)
    with pytest.raises(MathError, match="at least 21"):
        FeatureSet.of(pair[0][:20], 20)
    with pytest.raises(ShapeError):
        FeatureSet.of(pair[0][None], 1)
    with pytest.raises(NumericalError):
        FeatureSet.of(torch.full((10, 2), torch.nan), 1)
    with pytest.raises(ShapeError, check=has_subject("features")):
        measure(FeatureSet.of(pair[0][:, :3], 1), FeatureSet.of(pair[1], 1))


MEMORY = """
import resource, torch
from ddm.evaluation.metrics import FeatureSet, measure, metrics_bytes
torch.manual_seed(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
samples, reference = torch.randn(10_000, 2048), torch.randn(10_000, 2048)
measure(FeatureSet.of(samples, 5), FeatureSet.of(reference, 5))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, metrics_bytes(10_000, 10_000, 2048, 0))
"""


@pytest.mark.slow
def test_ten_thousand_features_of_2048_values_fit_one_and_a_half_gibibytes() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    peak, foreseen = (int(word) for word in finished.stdout.split())
    assert peak < 1.5 * 2**30
    assert metrics_bytes(10_000, 10_000, 2048, 0) == foreseen < 1.5 * 2**30


@pytest.mark.parametrize(
    ("shape", "num_values"),
    [
        ((1, 28, 28), 784),
        ((3, 224, 40), 3 * 32 * 32),
        ((8, 32, 64), 8 * 32 * 32),
        ((2, 20, 64, 12), 2 * 16 * 16 * 12),
        ((4, 64, 64, 64), 4 * 16**3),
    ],
)
def test_memory_of_a_search_for_copies_counts_the_values_that_it_holds(
    shape: tuple[int, ...], num_values: int
) -> None:
    assert num_pixel_values(shape) == num_values
    assert pixel_rows(torch.zeros(2, *shape)).shape == (2, num_values)
