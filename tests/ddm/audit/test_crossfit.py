"""Chosen and combined attacks against normal scores, whose best attack is known in closed form."""

from math import sqrt
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from ddm.audit.crossfit import (
    FitDirection,
    best_combination,
    cross_fitted_scores,
    strongest_attack,
)
from ddm.audit.measures import auc, true_positives

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


def test_members_beyond_the_outliers_among_units_held_out_are_recognised() -> None:
    """The fault: cut at 8 deviations, outliers and members were equal, and none of 51 was above the threshold."""
    inner = torch.linspace(-1.0, 1.0, 97, dtype=torch.float64)
    outliers = torch.tensor([20.0, 30.0, 40.0], dtype=torch.float64)
    # Two attacks that agree.
    other_N2 = torch.cat([inner, outliers])[:, None].expand(-1, 2)
    recognisable = torch.linspace(60.0, 90.0, 51, dtype=torch.float64)
    member_M2 = torch.cat([recognisable, inner[:49]])[:, None].expand(-1, 2)
    assert true_positives(member_M2[:, 0], other_N2[:, 0]).value == 0.51
    for fit_direction in (strongest_attack, best_combination):
        member_M, other_N = cross_fitted_scores(member_M2, other_N2, fit_direction)
        assert true_positives(member_M, other_N).value == 0.51


@pytest.mark.parametrize("fit_direction", [strongest_attack, best_combination])
def test_hostile_values_give_finite_scores_that_are_far_from_their_size(
    fit_direction: FitDirection,
) -> None:
    member_MA = normal(100, 10) + 1.0
    other_NA = normal(100, 11)
    member_MA[0] = torch.inf
    member_MA[1] = -torch.inf
    other_NA[0, ::2] = 1e308
    other_NA[1, ::2] = -1e308
    for score_U in cross_fitted_scores(member_MA, other_NA, fit_direction):
        assert torch.isfinite(score_U).all()
        # The logarithm of the largest float64 is 710; weights are a few hundredths of the whole.
        assert score_U.abs().max() < 1e5


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


@pytest.mark.slow
def test_interval_of_the_strongest_attack_is_too_short_when_attacks_are_independent() -> None:
    num_runs = 100
    num_chosen_contain = 0
    num_single_contain = 0
    for run in range(num_runs):
        member_MA = normal(100, 2 * run)
        other_NA = normal(100, 2 * run + 1)
        member_M, other_N = cross_fitted_scores(member_MA, other_NA, strongest_attack)
        chosen = auc(member_M, other_N)
        num_chosen_contain += chosen.low <= 0.5 <= chosen.high
        # The control: one attack, which nobody chose.
        single = auc(member_MA[:, 0].contiguous(), other_NA[:, 0].contiguous())
        num_single_contain += single.low <= 0.5 <= single.high
    # 85% in 200 runs; the standard deviation of 100 is 3.6 percentage points.
    assert 0.74 <= num_chosen_contain / num_runs <= 0.93
    assert num_single_contain / num_runs >= 0.89


def _others(num: int) -> Tensor:
    """Return which units are not in the first fold."""
    return torch.arange(num) % 5 != 0
