"""Was this record there? The best attack on every release, against its claim; a quarter of its noise must show."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm

from ddm.privacy.accounting import gaussian_delta
from ddm.statistics.cost import plan_epsilon
from examples.paper.privacy import neighbours
from examples.paper.privacy.attacks import epsilon_bound
from examples.paper.privacy.neighbours import Neighbours, with_quarter_noise

CLAIM = 1.0
DELTA = 1e-2
PATIENT_IMAGES = 50


def patient_counts(epsilon: float) -> Neighbours:
    return neighbours.counts(epsilon, unit="patient", images_each=PATIENT_IMAGES)


def patient_sketches(epsilon: float) -> Neighbours:
    return neighbours.sketches(
        epsilon, DELTA, rank=2, unit="patient", images_each=PATIENT_IMAGES, num=4000
    )


ATTACKS: list[tuple[Callable[[float], Neighbours], float, int]] = [
    (neighbours.counts, 0.0, 4096),
    (neighbours.class_counts, 0.0, 4096),
    (lambda epsilon: neighbours.sketches(epsilon, DELTA), DELTA, 40_000),
    (lambda epsilon: neighbours.sketches(epsilon, DELTA, rank=1), DELTA, 40_000),
    (patient_counts, 0.0, 2048),
    (patient_sketches, DELTA, 8000),
]
NAMES = [
    "counts",
    "class counts",
    "sketch",
    "sketch of one dimension",
    "counts of a patient with 50 images",
    "sketch of a patient with 50 images",
]


@pytest.mark.parametrize(("attack", "delta", "num"), ATTACKS, ids=NAMES)
def test_membership_attack_stays_below_the_claim_but_not_with_a_quarter_of_the_noise(
    attack: Callable[[float], Neighbours], delta: float, num: int
) -> None:
    assert epsilon_bound(*attack(CLAIM).scores(num), delta) <= CLAIM
    assert epsilon_bound(*attack(with_quarter_noise(CLAIM, delta)).scores(num), delta) > CLAIM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "delta", "num", "least"),
    [
        (*ATTACKS[0][:2], 200_000, 0.9),
        (*ATTACKS[1][:2], 200_000, 0.9),
        (*ATTACKS[2][:2], 1_000_000, 0.8),
    ],
    ids=["counts", "class counts", "sketch"],
)
def test_long_membership_attack_comes_close_to_the_claim_and_stays_below(
    attack: Callable[[float], Neighbours], delta: float, num: int, least: float
) -> None:
    assert least < epsilon_bound(*attack(CLAIM).scores(num), delta) <= CLAIM


@pytest.mark.parametrize(
    ("attack", "delta"),
    [
        (neighbours.counts(CLAIM, images_each=PATIENT_IMAGES), 0.0),
        (neighbours.sketches(CLAIM, DELTA, rank=2, num=2000, images_each=PATIENT_IMAGES), DELTA),
    ],
    ids=["counts", "sketch"],
)
def test_patient_with_many_images_is_exposed_where_the_unit_is_the_image(
    attack: Neighbours, delta: float
) -> None:
    assert epsilon_bound(*attack.scores(2000), delta) > 3 * CLAIM


def test_attack_on_a_whole_plan_goes_beyond_each_part_but_not_beyond_the_composed_epsilon() -> None:
    part = 2.0
    delta = 0.05
    attack = neighbours.counts_and_sketches(part, part, delta)
    claim = plan_epsilon(attack.worlds[0].plan)
    assert part < epsilon_bound(*attack.scores(12288), delta) <= claim < 2 * part
    quarter = neighbours.counts_and_sketches(4 * part, with_quarter_noise(part, delta), delta)
    assert epsilon_bound(*quarter.scores(2048), delta) > claim


def test_score_of_the_attack_on_a_whole_plan_is_the_log_likelihood_ratio() -> None:
    first, _ = neighbours.counts_and_sketches(CLAIM, CLAIM, DELTA).scores(8192)

    def deviations(scores: np.ndarray) -> float:
        """How far the mean of q/p under p is from 1, in standard errors."""
        ratio = np.exp(-scores)
        return abs(ratio.mean() - 1) / (ratio.std() / len(ratio) ** 0.5)

    assert deviations(first) < 5
    assert deviations(1.5 * first) > 5


def test_epsilon_bound_holds_as_often_as_it_says_and_the_plain_estimate_does_not() -> None:
    mu = 1.0
    delta = 1e-2
    confidence = 0.9
    num = 400
    rng = np.random.default_rng(0)
    truth = next(
        epsilon for epsilon in np.arange(0, 6, 0.001) if gaussian_delta(mu, float(epsilon)) <= delta
    )
    over_bound = 0
    over_estimate = 0
    for _ in range(300):
        first = rng.standard_normal(num) + mu
        second = rng.standard_normal(num)
        over_bound += epsilon_bound(first, second, delta, confidence) > truth
        threshold = np.linspace(-2, 3, 60)[:, None]
        hits = (first > threshold).mean(1)
        alarms = np.maximum((second > threshold).mean(1), 0.5 / num)
        over_estimate += np.log((hits - delta).clip(1e-9) / alarms).max() > truth
    assert over_bound <= 300 * (1 - confidence)
    assert over_estimate > 150


def test_epsilon_bound_comes_close_to_the_truth_with_many_experiments() -> None:
    mu = 1.0
    delta = 1e-1
    rng = np.random.default_rng(1)
    first = rng.standard_normal(400_000) + mu
    second = rng.standard_normal(400_000)
    best = max(
        np.log((norm.sf(cut - mu) - delta) / norm.sf(cut)) for cut in np.linspace(-1, 2, 300)
    )
    assert 0.9 * best < epsilon_bound(first, second, delta) <= best
    assert epsilon_bound(second, rng.standard_normal(400_000), delta) == 0.0
