"""`silo status` and `aggregator status` at every state of a plan's life: neither contradicts itself or the other."""

import pytest

from aggregator.monitoring.standing import STANDINGS
from silo.worker.life import STATES
from tools.reference.plan_life import PlanLifeView, every_view

VIEWS = list(every_view())
RUNS = ("running", "waits")
# What only a worker that is running does.
AT_WORK_WORDS = ("being", "is measuring", "begins", "waits for the next plan", "goes on by itself")


def label(view: PlanLifeView) -> str:
    return f"{view.state.state}-{view.worker}-{view.state.held}-{view.state.confirmed}"


def test_every_state_is_shown_with_and_without_a_worker() -> None:
    shown = {(view.state.state, view.worker) for view in VIEWS}
    assert {state for state, worker in shown if worker == "none"} == set(STATES)
    # The refusal ended the worker, and the next one leaves this state at once.
    assert {state for state, worker in shown if worker == "running"} == set(STATES) - {"refused"}
    assert ("auditing", "waits") in shown and ("training", "ended") in shown


@pytest.mark.parametrize("view", VIEWS, ids=label)
def test_silo_says_that_no_worker_runs_exactly_when_none_does(view: PlanLifeView) -> None:
    runs = view.worker in RUNS
    assert ("no worker is running" in view.situation.now) != runs
    if not runs:
        assert not any(words in view.situation.now for words in AT_WORK_WORDS)
        assert "silo run SITE" in view.situation.commands
    elif view.state.state != "plan_refused":
        assert "silo run SITE" not in view.situation.commands


@pytest.mark.parametrize("view", VIEWS, ids=label)
def test_both_sides_name_the_same_person_who_must_act(view: PlanLifeView) -> None:
    if view.state.state == "withdrawn" and not view.state.confirmed:
        # Once the aggregator has heard of it, it needs nobody; until then the silo has to be connected.
        assert view.standing.label == "gave the plan up"
        return
    assert view.situation.person == view.standing.person


@pytest.mark.parametrize("view", VIEWS, ids=label)
def test_person_who_must_act_learns_what_to_do_and_nobody_else_is_sent_for(
    view: PlanLifeView,
) -> None:
    assert bool(view.situation.needs) == (view.situation.person != "nobody")
    assert bool(view.standing.step) == (view.standing.person != "nobody")
    if view.situation.person == "silo":
        assert view.situation.commands


@pytest.mark.parametrize("view", VIEWS, ids=label)
def test_aggregator_says_working_only_while_a_worker_works(view: PlanLifeView) -> None:
    if view.standing.tone == "busy":
        assert view.worker == "running"
    if view.worker == "ended" and not view.state.held:
        assert view.standing is STANDINGS["blocked"]


def test_standings_are_listed_with_those_first_that_need_a_person_here_then_there() -> None:
    persons = [words.person for words in STANDINGS.values()]
    assert persons == sorted(persons, key=("aggregator", "silo", "nobody").index)
