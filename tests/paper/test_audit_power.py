"""Simulated audits: the scores have the area that the table names, and the verdicts follow from it."""

import pytest
import torch

from examples.paper.leaks.power import _scores, simulated_verdict


@pytest.mark.parametrize("area", [0.5, 0.65])
def test_sum_of_drawn_losses_has_the_area_that_was_asked_for(area: float) -> None:
    score_SIA = _scores(3000, area, torch.Generator().manual_seed(0))
    num_losses = 10
    member_M, other_N = score_SIA[:, :, :num_losses].sum(2)
    drawn_area = float((member_M[:, None] > other_N).double().mean())
    # The standard deviation of an area of 3,000 and 3,000 units is 0.0075.
    assert drawn_area == pytest.approx(area, abs=0.03)


def test_many_units_decide_and_few_do_not() -> None:
    assert simulated_verdict(1000, 0.5, 0) == "pass"
    assert simulated_verdict(1000, 0.7, 0) == "fail"
    # An interval of 50 and 50 units is wider than the distance from chance to the limit.
    assert simulated_verdict(50, 0.5, 0) == "inconclusive"
