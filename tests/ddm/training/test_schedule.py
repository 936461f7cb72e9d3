from math import cos, pi

import numpy as np
import pytest

from ddm.training.schedule import learning_rate, travel
from tests.support.recipes import training

PUBLISHED = {
    "constant": lambda n: 1.0,
    "cosine": lambda n: 0.1 + 0.9 * 0.5 * (1 + cos(pi * n / 1000)),
    "linear": lambda n: 0.1 + 0.9 * (1 - n / 1000),
}


@pytest.mark.parametrize("schedule", PUBLISHED)
def test_rate_warms_up_and_falls_to_its_end(schedule: str) -> None:
    end = {} if schedule == "constant" else {"final_rate": 0.1}
    recipe = training(num_steps=1000, learning_rate=0.5, warmup_steps=50, schedule=schedule, **end)
    for n in range(1000):
        expected = 0.5 * min(1.0, (n + 1) / 50) * PUBLISHED[schedule](n)
        assert learning_rate(recipe, n) == pytest.approx(expected, rel=1e-12)


def test_rate_is_whole_at_once_without_warm_up() -> None:
    assert learning_rate(training(learning_rate=0.5, warmup_steps=0), 0) == 0.5


@pytest.mark.parametrize("num_steps", [1, 7, 1000, 9_999, 30_001])
def test_travel_is_the_sum_of_the_rates(num_steps: int) -> None:
    recipe = training(num_steps=num_steps, schedule="cosine", learning_rate=0.01, warmup_steps=30)
    assert travel(recipe) == pytest.approx(
        sum(learning_rate(recipe, n) for n in range(num_steps)), rel=1e-3
    )


def test_travel_of_the_longest_run_is_computed_as_fast() -> None:
    recipe = training(num_steps=10**9, schedule="linear", learning_rate=0.01)
    assert travel(recipe) == pytest.approx(0.01 * 10**9 / 2, rel=1e-3)


def test_falling_rate_ends_where_the_recipe_says() -> None:
    recipe = training(num_steps=10**6, schedule="cosine", final_rate=0.25, learning_rate=1.0)
    assert learning_rate(recipe, 10**6 - 1) == pytest.approx(0.25, abs=1e-6)
    rates = np.array([learning_rate(recipe, n) for n in range(100, 10**6, 997)])
    assert (np.diff(rates) < 0).all()
