"""AUC, true positives and their intervals against counting, and against normal scores whose answers are known."""

from math import sqrt
from statistics import NormalDist

import pytest
import torch

from ddm.audit.measures import auc, true_positives
from ddm.evaluation.intervals import wilson


def test_auc_is_the_share_of_pairs_in_which_the_member_is_above_with_ties_half() -> None:
    random = torch.Generator().manual_seed(0)
    member_M, other_N = (
        torch.randint(0, 6, (size,), generator=random).double() for size in (13, 17)
    )
    above = (member_M[:, None] > other_N).double() + (member_M[:, None] == other_N).double() / 2
    assert auc(member_M, other_N).value == pytest.approx(float(above.mean()), abs=1e-12)


def test_auc_of_shifted_normal_scores_is_that_of_the_closed_form_and_within_its_interval() -> None:
    random = torch.Generator().manual_seed(1)
    member_M = torch.randn(4000, generator=random) + 0.5
    other_N = torch.randn(4000, generator=random)
    expected = NormalDist().cdf(0.5 / sqrt(2))
    estimate = auc(member_M, other_N)
    assert estimate.value == pytest.approx(expected, abs=0.01)
    assert estimate.low < expected < estimate.high


def test_interval_of_the_auc_covers_the_truth_95_times_in_100() -> None:
    random = torch.Generator().manual_seed(2)
    inside = 0
    for _ in range(400):
        estimate = auc(torch.randn(40, generator=random), torch.randn(60, generator=random))
        inside += estimate.low <= 0.5 <= estimate.high
    assert 0.91 <= inside / 400 <= 0.98


def test_interval_of_separated_scores_keeps_a_width() -> None:
    estimate = auc(torch.arange(10.0) + 100, torch.arange(20.0))
    assert (
        estimate.value == 1.0
        and estimate.low == pytest.approx(wilson(10, 10)[0])
        and estimate.high == pytest.approx(1.0)
    )


def test_true_positives_count_members_above_all_but_one_percent_of_the_others() -> None:
    other_N = torch.arange(200.0)  # two of them may lie above: the threshold is 197
    estimate = true_positives(torch.tensor([196.0, 197.0, 197.5, 300.0]), other_N)
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == wilson(2, 4)


def test_true_positives_with_few_others_allow_no_false_one() -> None:
    assert true_positives(
        torch.tensor([9.0, 9.5, 10.0]), torch.arange(10.0)
    ).value == pytest.approx(2 / 3)
