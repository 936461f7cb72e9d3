"""The ledger's filter against the worst adversary there is: every tree of adaptively chosen mechanisms, enumerated.

A mechanism is the list of its outcomes, each with its probability under one data set and under its neighbour.
"""

import math
from collections.abc import Callable
from functools import cache

import pytest

from ddm.privacy.accounting import Curve, filter_epsilon

DELTA = 0.1
Outcomes = tuple[tuple[float, float], ...]
# steps in order: which plan, and whether its second part was drawn
State = tuple[tuple[int, bool], ...]
NOTHING: Outcomes = ((1.0, 1.0),)


def randomized_response(epsilon: float, reveals: float) -> Outcomes:
    """Says everything with probability `reveals`, else answers truly with odds of exp(epsilon)."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    hidden = 1 - reveals
    return (
        (reveals, 0.0),
        (hidden * truth, hidden * (1 - truth)),
        (hidden * (1 - truth), hidden * truth),
        (0.0, reveals),
    )


MENU: tuple[Outcomes, ...] = (
    randomized_response(0.3, 0.02),
    randomized_response(0.5, 0.05),
    randomized_response(0.8, 0.0),
    ((0.1, 0.02), (0.9, 0.98)),
    ((0.05, 0.005), (0.95, 0.995)),
)


def product(*parts: Outcomes) -> Outcomes:
    whole = NOTHING
    for part in parts:
        whole = tuple((p * a, q * b) for p, q in whole for a, b in part)
    return whole


def divergence(outcomes: Outcomes, epsilon: float) -> float:
    """The smallest delta at `epsilon`."""
    return sum(max(0.0, p - math.exp(epsilon) * q) for p, q in outcomes)


def exact_curve(outcomes: Outcomes) -> Curve:
    """The smallest epsilon at a delta, exactly: the divergence is linear in exp(epsilon) between losses."""
    losses = sorted({math.log(p / q) for p, q in outcomes if p > q > 0})

    def epsilon(delta: float) -> float:
        low = 0.0
        for high in (*losses, math.inf):
            if divergence(outcomes, low) <= delta:
                return low
            over = [
                (p, q) for p, q in outcomes if p > 0 and (q == 0 or math.log(p / q) > low + 1e-12)
            ]
            p_over = sum(p for p, _ in over)
            q_over = sum(q for _, q in over)
            if (
                q_over > 0
                and p_over > delta
                and (epsilon := math.log((p_over - delta) / q_over)) <= high
            ):
                return epsilon
            low = high
        return math.inf

    return epsilon


def worst_divergence(
    allowed: Callable[[tuple[int, ...]], float], budget: float, depth: int = 4
) -> float:
    """The largest delta at `budget` over every way to choose from the menu, one after another, or to stop."""

    def go(history: tuple[int, ...], p: float, q: float) -> float:
        worst = max(0.0, p - math.exp(budget) * q)
        if p == 0 or len(history) == depth:
            return worst
        for index, mechanism in enumerate(MENU):
            longer = (*history, index)
            if allowed(longer) <= budget + 1e-12:
                worst = max(worst, sum(go(longer, p * a, q * b) for a, b in mechanism))
        return worst

    return go((), 1.0, 1.0)


CURVES = [exact_curve(mechanism) for mechanism in MENU]


@cache
def filtered(history: tuple[int, ...]) -> float:
    return filter_epsilon([CURVES[index] for index in history], DELTA)


@cache
def as_if_fixed_in_advance(history: tuple[int, ...]) -> float:
    return exact_curve(product(*(MENU[index] for index in sorted(history))))(DELTA)


@cache
def each_at_all_of_delta(history: tuple[int, ...]) -> float:
    return sum(CURVES[index](DELTA) for index in history)


def test_exact_curve_inverts_the_divergence() -> None:
    for curve, mechanism in zip(CURVES, MENU, strict=True):
        for delta in (0.15, 0.1, 0.06, 0.03):
            epsilon = curve(delta)
            if 0 < epsilon < math.inf:
                assert divergence(mechanism, epsilon) <= delta * (1 + 1e-9)
                assert divergence(mechanism, epsilon - 1e-6) > delta


@pytest.mark.parametrize("budget", [0.5, 0.8, 1.2, 1.8])
def test_no_adaptive_choice_of_mechanisms_passes_the_budget_under_the_filter(budget: float) -> None:
    worst = worst_divergence(filtered, budget)
    assert 0.8 * DELTA < worst <= DELTA  # it holds, and is not held by giving nothing away


@pytest.mark.parametrize("budget", [0.5, 1.2, 1.8])
@pytest.mark.parametrize("rule", [as_if_fixed_in_advance, each_at_all_of_delta])
def test_other_rules_are_broken_by_an_adaptive_choice(
    rule: Callable[[tuple[int, ...]], float], budget: float
) -> None:
    assert worst_divergence(rule, budget) > 1.02 * DELTA


def test_one_mechanism_costs_under_the_filter_what_it_costs_alone() -> None:
    for index in range(len(MENU)):
        assert (
            filtered((index,)) == as_if_fixed_in_advance((index,)) == each_at_all_of_delta((index,))
        )


def worst_divergence_of_parts(
    plans: tuple[tuple[Outcomes, Outcomes], ...], budget: float, *, whole: bool
) -> float:
    """As above, for plans of two parts of which the second may be drawn at any later time, or never.

    Args:
        plans: the two parts of each.
        budget: epsilon.
        whole: count a plan whole from its first draw on, as the ledger does; else count what was drawn of it.
    """
    parts = [exact_curve(first) for first, _ in plans]
    wholes = [exact_curve(product(*plan)) for plan in plans]

    @cache
    def cost(state: State) -> float:
        return filter_epsilon(
            [(wholes if whole or both else parts)[plan] for plan, both in state], DELTA
        )

    def go(state: State, p: float, q: float, depth: int) -> float:
        worst = max(0.0, p - math.exp(budget) * q)
        if p == 0 or depth == 0:
            return worst
        choices = [((*state, (plan, False)), first) for plan, (first, _) in enumerate(plans)]
        for at, (plan, both) in enumerate(state):
            if not both:
                choices.append(((*state[:at], (plan, True), *state[at + 1 :]), plans[plan][1]))
        for after, outcomes in choices:
            if cost(after) <= budget + 1e-12:
                worst = max(worst, sum(go(after, p * a, q * b, depth - 1) for a, b in outcomes))
        return worst

    return go((), 1.0, 1.0, 3)


def test_plan_counts_whole_from_its_first_draw_because_whether_the_rest_is_drawn_may_hang_on_it() -> (
    None
):
    plans = ((MENU[1], MENU[2]), (MENU[0], NOTHING))
    assert worst_divergence_of_parts(plans, 1.2, whole=True) <= DELTA
    assert worst_divergence_of_parts(plans, 1.2, whole=False) > 1.05 * DELTA
