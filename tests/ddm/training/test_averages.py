"""Averages over the steps of a run, against their definitions written out."""

import numpy as np
import pytest

from ddm.errors import MathError
from ddm.training.averages import Profile, average_of, exponent_of, newest_weight, power_weight
from tests.support.errors import has_subject
from tests.support.recipes import training

VALUES = np.random.default_rng(0).normal(size=400)


def running(weight_of_step: list[float]) -> float:
    average = 123.0  # does not count
    for value, weight in zip(VALUES, weight_of_step, strict=True):
        average += weight * (value - average)
    return average


def test_half_life_in_images_halves_what_came_before() -> None:
    recipe = training(batch_size=8, ema_decay=None, ema_half_life=160.0)  # 20 steps
    weights = 0.5 ** (np.arange(399, -1, -1) / 20)
    average = running([newest_weight(recipe, n) for n in range(1, 401)])
    assert average == pytest.approx((weights * VALUES).sum() / weights.sum())


@pytest.mark.parametrize(("width", "published"), [(0.05, 16.97), (0.10, 6.94)])
def test_exponents_of_the_published_widths(width: float, published: float) -> None:
    assert exponent_of(width) == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.25])
def test_average_of_a_width_has_that_width(width: float) -> None:
    num = 20_000
    left = 1.0
    weights = np.empty(num)
    for n in range(num, 0, -1):  # the weight of step n after all later ones
        weights[n - 1] = left * power_weight(exponent_of(width), n)
        left *= 1 - power_weight(exponent_of(width), n)
    assert weights.sum() == pytest.approx(1.0)
    t = np.arange(1, num + 1) / num
    std = np.sqrt((weights * t**2).sum() - (weights * t).sum() ** 2)
    assert std == pytest.approx(width, rel=0.01)


@pytest.mark.parametrize("width", [0.0, -1.0, 0.3, float("nan")])
def test_width_that_no_average_has_is_refused(width: float) -> None:
    with pytest.raises(MathError, check=has_subject("width of an average")):
        exponent_of(width)


def test_recipe_has_exactly_one_average() -> None:
    with pytest.raises(ValueError, match="not 2"):
        training(ema_width=0.1)
    with pytest.raises(ValueError, match="not 0"):
        training(ema_decay=None)


def averages_of(exponent: float) -> np.ndarray:  # type: ignore[type-arg]
    """Return the running average after every step."""
    averages = []
    average = 0.0
    for n, value in enumerate(np.cumsum(VALUES), start=1):
        average += power_weight(exponent, n) * (value - average)
        averages.append(average)
    return np.array(averages)


@pytest.mark.parametrize("width", [0.06, 0.08, 0.12, 0.15])
def test_other_widths_are_found_afterwards(width: float) -> None:
    """As in the source: two widths kept every 25 steps of 400 give the others of the whole run."""
    tracks = {
        exponent: averages_of(exponent) for exponent in (exponent_of(0.05), exponent_of(0.10))
    }
    kept = [Profile(exponent, float(step)) for exponent in tracks for step in range(25, 401, 25)]
    factors = average_of(kept, Profile(exponent_of(width), 400.0))
    combined = sum(
        f * tracks[average.exponent][int(average.step) - 1]
        for f, average in zip(factors, kept, strict=True)
    )
    true = averages_of(exponent_of(width))[-1]
    last = np.cumsum(VALUES)[-1]
    assert abs(true - last) > 0.5, "the average must not be the last value"
    assert combined == pytest.approx(true, abs=0.02 * abs(true - last))


def test_kept_average_is_itself() -> None:
    kept = [Profile(16.97, 100.0), Profile(6.94, 100.0), Profile(6.94, 200.0)]
    assert average_of(kept, kept[2]) == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)
