"""An attack on private training that knows each step's noised sum: how much epsilon it shows in a single run.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one training run", for replace-one: each of many canaries is a
unit whose gradient is the clip norm along an axis of its own, in a direction that a secret coin chooses. The attacker
sees every step's sum, and guesses the coins of which it is surest. The units that enter, the grid, the sensitivity and
the noise are the product's; the canaries' gradients are given, so that no model has to produce them.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize, stats

from ddm.privacy.accounting import noise_multiplier_for
from ddm.privacy.secret_stream import SecretStream
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.private import STEPS_PER_CLIP, PrivateTraining, noise_of, sensitivity
from tests.support.case import case

CANARIES = 200_000
STEPS = 8
DELTA = 1e-8
CONFIDENCE = 0.95
# fixed beforehand, and paid for: each bound holds with a quarter of the doubt
GUESSES = (
    300,
    1000,
    3000,
    10_000,
)


@cache
def scores(
    epsilon: float, rate: float, share: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each canary's coin, +1 or -1, and the attacker's log-likelihood ratio of it, after all steps.

    Args:
        epsilon: what the training claims.
        rate: the probability with which a unit enters a step.
        share: of the noise that the claim needs, which is added.
    """
    noise = noise_multiplier_for(epsilon, DELTA, rate, STEPS)
    terms = DpSgd(epsilon=epsilon, delta=DELTA, units_per_step=round(rate * CANARIES))
    secret = bytes(range(32))  # known, so that the figures are the same in every run
    paid = DpSgdMechanism(noise_multiplier=noise, rate=rate, steps=STEPS)
    source = PrivateTraining(terms, paid, torch.arange(CANARIES), secret)
    coins = np.where(np.random.default_rng(0).random(CANARIES) < 0.5, 1.0, -1.0)
    ratio = np.zeros(CANARIES)
    largest = sensitivity(CANARIES)
    for step in range(STEPS):
        entered = source.sampled(step)
        total = np.zeros(CANARIES)
        total[entered] = coins[entered] * STEPS_PER_CLIP
        for start, block in noise_of(
            CANARIES, share * noise * largest, SecretStream(secret, "noise", step)
        ):
            total[start : start + len(block)] += block.numpy()
        y = total / STEPS_PER_CLIP
        variance = noise**2
        seen = [np.log1p(rate * np.expm1((sign * y - 0.5) / variance)) for sign in (1, -1)]
        ratio += seen[0] - seen[1]
    return coins, ratio


def shown(coins: NDArray[np.float64], ratio: NDArray[np.float64]) -> float:
    """Return the epsilon that the run shows at `DELTA`, with `CONFIDENCE`: Theorem 5.2 of the paper."""
    surest = np.argsort(-np.abs(ratio))
    doubt = (1 - CONFIDENCE) / len(GUESSES)
    right = np.sign(ratio[surest]) == coins[surest]
    return max(_bound(num, int(right[:num].sum()), doubt) for num in GUESSES)


def _bound(num: int, right: int, doubt: float) -> float:
    """Return the largest epsilon that so many right guesses of `num` refute."""

    def chance(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        beta = stats.binom.sf(right - 1, num, q)
        below = stats.binom.cdf(right - 1, num, q) - stats.binom.cdf(
            right - 1 - np.arange(1, right + 1), num, q
        )
        alpha = float((below / np.arange(1, right + 1)).max(initial=0.0))
        return float(beta) + 2 * alpha * CANARIES * DELTA - doubt

    if chance(0.0) > 0:
        return 0.0
    return float(optimize.brentq(chance, 0.0, 30.0))


@pytest.mark.slow
def test_attack_on_each_step_shows_at_least_half_of_the_claimed_epsilon_and_never_more() -> None:
    for epsilon, rate in ((4.0, 1.0), (4.0, 0.5), (8.0, 1.0)):
        with case(epsilon, rate):
            bound = shown(*scores(epsilon, rate, 1.0))
            assert epsilon / 2 <= bound <= epsilon


@pytest.mark.slow
def test_training_with_half_of_its_noise_is_caught() -> None:
    for epsilon, rate in ((1.0, 1.0), (4.0, 1.0), (4.0, 0.5)):
        with case(epsilon, rate):
            bound = shown(*scores(epsilon, rate, 0.5))
            assert bound > epsilon
