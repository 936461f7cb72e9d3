"""Chosen and combined attacks against normal scores, whose best attack is known in closed form."""

from math import sqrt
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from ddm.audit.crossfit import best_combination, cross_fitted_scores, strongest_attack
from ddm.audit.measures import auc

NUM_ATTACKS = 15


def normal(num: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num, NUM_ATTACKS, generator=random, dtype=torch.float64)


def test_combination_of_independent_attacks_reaches_the_likelihood_ratio() -> None:
    shift = 0.4
    member_M, other_N = cross_fitted_scores(
        normal(2000, 0) + shift, normal(2000, 1), best_combination
    )
    # Of normal scores with the identity as covariance, by the distance of the means.
    distance = shift * sqrt(NUM_ATTACKS)
    expected = NormalDist().cdf(distance / sqrt(2))
    assert auc(member_M, other_N).value == pytest.approx(expected, abs=0.02)


def test_strongest_attack_is_the_one_that_knows_something() -> None:
    member_MA = normal(300, 2)
    member_MA[:, 7] += 1.5
    member_M, other_N = cross_fitted_scores(member_MA, normal(300, 3), strongest_attack)
    expected = NormalDist().cdf(1.5 / sqrt(2))
    assert auc(member_M, other_N).value == pytest.approx(expected, abs=0.03)


def test_one_extreme_unit_moves_no_other_units_score_by_much() -> None:
    member_MA = normal(200, 4) + 0.5
    other_NA = normal(200, 5)
    before_M, before_N = cross_fitted_scores(member_MA, other_NA, best_combination)
    other_NA[0] = -1e30
    after_M, after_N = cross_fitted_scores(member_MA, other_NA, best_combination)
    area_before = auc(before_M, before_N).value
    area_after = auc(after_M, after_N).value
    assert area_after == pytest.approx(area_before, abs=0.03)


def test_attack_that_says_the_same_of_every_unit_spoils_no_combination() -> None:
    member_MA = normal(200, 6) + 1.0
    other_NA = normal(200, 7)
    member_MA[:, 3] = 0.25
    other_NA[:, 3] = 0.25
    member_M, other_N = cross_fitted_scores(member_MA, other_NA, best_combination)
    assert auc(member_M, other_N).value > 0.95


def test_units_have_no_say_in_the_choice_by_which_they_are_measured() -> None:
    member_MA = normal(50, 8)
    other_NA = normal(50, 9)
    before_M, _ = cross_fitted_scores(member_MA, other_NA, strongest_attack)
    # One fold stands out by an attack that is not chosen on the others: whoever looked at all units would pick it.
    chosen = int(strongest_attack(member_MA[_others(50)], other_NA[_others(50)]).argmax())
    member_MA[::5, (chosen + 1) % NUM_ATTACKS] += 1e3
    after_M, _ = cross_fitted_scores(member_MA, other_NA, strongest_attack)
    assert torch.equal(before_M[::5], after_M[::5])
    assert not torch.equal(before_M, after_M)


def _others(num: int) -> Tensor:
    """Return which units are not in the first fold."""
    return torch.arange(num) % 5 != 0
