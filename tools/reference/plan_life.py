"""The page docs/reference/plan-life.md: every state and every event of a plan's life, with what both sides say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from aggregator.monitoring.standing import (
    STANDINGS,
    SiloReport,
    SiloStanding,
    StandingWords,
    SubmissionStatus,
    SubmissionVerdict,
    decide_standing,
)
from ddm.errors import AuditError, DataError
from ddm.system.console import EXIT_INTERRUPTED
from ddm.transport.messages import SiloState
from silo.worker.descriptions import Circumstances, Situation, describe_site
from silo.worker.life import AT_WORK, EVENTS, STATES, TRANSITIONS, Event
from silo.worker.state import Problem, State
from silo.worker.withdrawal import describe_consequences

# Where an audit without a waiver stops the work.
_GATED = ("plan_accepted", "auditing", "released")
_HEAD = """# A plan's life

What happens to a plan at one silo, by the rules of [silo/worker/life.py](../../silo/worker/life.py); `make docs` writes
this page. A restart, a loss of power or a week offline changes no state. Only the steps in
the tables are possible: a command that needs another one ends with exit code 34 and names the states in which it works.

![The states of a plan at one silo, and the events that lead from one to the next](../pictures/plan-life.svg)

Blue: the worker works. Violet: a person at the silo is needed. Orange: the submission is on its way, or the step spends
epsilon.

## States

Each row is one state, with or without a worker. `silo status` prints the columns *now*, *needs* and *next*; `aggregator
status` prints the last two, once the silo has answered. Each side reads its own folder, so that neither needs the other
to be running.

- *running*: a worker is running.
- *waits*: a worker is running at a terminal or with `--wait`, and waits for a waiver.
- *none*: the worker was stopped (Ctrl-C, `systemctl stop`), with exit code 130.
- *ended*: the worker ended with an error that a person at the silo must remove. The aggregator learns the exit code
  ([list](errors.md)), and nothing else about the error. The example is code 7, images that cannot be used.

The aggregator does not learn of a pause (`silo pause`). After a power cut or a lost connection it receives nothing, and
says *not responding*.
"""
_EVENTS = """
## What happens

| event | when |
| --- | --- |
"""
_STEPS = """
## Every state, every event

The last column is the most that the worker may spend on the way. A repeated step is paid once: a debit in the ledger
covers one plan and one version of the images, even if statistics are drawn or sent several times.

| in state | event | leads to | `aggregator status` then says | spends at most |
| --- | --- | --- | --- | --- |
"""
_LEAVING = """
## Giving a plan up

`silo withdraw` works in every state in which there is a plan to give up. The silo's key signs a notice; the aggregator
accepts no other. It then leaves the silo out of every later version and answers with a signed notice. Stop `silo run`
first, and start it again afterwards, because the notice is sent while the site is connected.

| in state | what it means |
| --- | --- |
"""
_WHEN: Mapping[Event, str] = {
    "accept": "the worker verified the federation's plan, and policy.toml allows it",
    "decline": "the plan does not verify, or requires more than policy.toml allows",
    "scan": "the images were read; there are enough, and the budget covers the plan",
    "assign": "every image has its cluster",
    "begin": "the experts are determined; for this, plans with an expert for each cluster draw counts",
    "train": "the experts are trained",
    "audit": "the leak audit of every expert is finished, and it passed or is waived",
    "draw": "the statistics were debited, then drawn",
    "draft": "the draft of the submission is in `private/review/`",
    "lapse": "the waiver in the draft has expired; the draft is written again",
    "send": "a person or policy.toml approved the draft; it is signed and in the outbox",
    "receipt": "the aggregator's signed acceptance arrived",
    "hold": "a signed message arrived: a person at the aggregator has to decide",
    "refusal": "the aggregator's signed refusal arrived; it states what the silo may try again, and the cost",
    "restart": "`silo run` was started again",
    "retrain": "`silo retrain`: train and draw again on the present images; the command states the cost first",
    "succession": "the federation's keys signed another plan, and its metadata arrived here",
    "withdraw": "`silo withdraw`",
    "notice": "a signed message arrived: the aggregator leaves this silo out",
}


WorkerCase = Literal["running", "waits", "none", "ended"]


@dataclass(frozen=True)
class PlanLifeView:
    """What both sides say of one state.

    Attributes:
        state: the silo's.
        worker: whether its worker is running.
        situation: what `silo status` says.
        standing: what `aggregator status` says, once the silo has answered.
    """

    state: State
    worker: WorkerCase
    situation: Situation
    standing: StandingWords


def every_view() -> Iterator[PlanLifeView]:
    """Yield every state with every way in which its worker may be there or not."""
    for name in STATES:
        yield from _views_of(State(state=name, confirmed=name == "withdrawn"))
        if name == "in_outbox":
            yield from _views_of(State(state=name, held=True))
        if name == "withdrawn":
            yield from _views_of(State(state=name))


def _views_of(state: State) -> Iterator[PlanLifeView]:
    bad_images = Problem(code=DataError.exit_code, message="images that cannot be used")
    no_waiver = Problem(code=AuditError.exit_code, message="no waiver")
    if state.state != "refused":
        # A refusal ends the worker, and a new one leaves this state.
        yield _view(state, "running", 0)
    if state.state in _GATED:
        yield _view(state.model_copy(update={"problem": no_waiver}), "waits", no_waiver.code)
    yield _view(state, "none", EXIT_INTERRUPTED)
    if state.state in AT_WORK - {"refused"}:
        yield _view(state.model_copy(update={"problem": bad_images}), "ended", bad_images.code)


def _view(state: State, worker: WorkerCase, code: int) -> PlanLifeView:
    circumstances = Circumstances(
        running=worker in ("running", "waits"),
        blocked=worker == "waits",
    )
    return PlanLifeView(
        state=state,
        worker=worker,
        situation=describe_site(state, circumstances),
        standing=STANDINGS[aggregator_standing(state, code)],
    )


def aggregator_standing(state: State, code: int = 0) -> SiloStanding:
    """Return how the aggregator sees a silo in a state, once both have heard all that the other said.

    Args:
        state: the silo's.
        code: that it reported with the state.
    """
    answers: Mapping[SiloState, SubmissionVerdict] = {
        "in_outbox": "quarantined" if state.held else "arrived",
        "accepted": "accepted",
        "refused": "refused",
    }
    verdict = answers.get(state.state)
    if state.state == "withdrawn" and (state.confirmed or state.problem is not None):
        verdict = "withdrawn"
    submissions = (SubmissionStatus(sequence=1, verdict=verdict),) if verdict else ()
    # The aggregator is at the next plan by then, of which this silo has only heard.
    reported = "waiting" if state.state == "superseded" else state.state
    report = SiloReport(state=reported, sequence=state.sequence, code=code)
    return decide_standing(submissions, None, report, answered=True, silent=False)


def plan_life_page() -> str:
    """Return the page."""
    return "".join(
        [_HEAD, *_states(), _EVENTS, *_events(), _STEPS, *_steps(), _LEAVING, *_leaving()]
    )


def _states() -> Iterator[str]:
    yield "\n| state | worker | now | needs | next | aggregator: status | aggregator: next |\n"
    yield "| --- | --- | --- | --- | --- | --- | --- |\n"
    for view in every_view():
        name = f"`{view.state.state}`"
        if view.state.held:
            name += ", held"
        if view.state.state == "withdrawn" and not view.state.confirmed:
            name += ", not confirmed"
        commands = ", then ".join(f"`{command}`" for command in view.situation.commands)
        cells = (
            name,
            view.worker,
            view.situation.now,
            view.situation.needs or "nothing",
            commands or "nothing to do",
            view.standing.label,
            view.standing.step or "nothing to do",
        )
        yield f"| {' | '.join(cells)} |\n"


def _events() -> Iterator[str]:
    for event in EVENTS:
        yield f"| `{event}` | {_WHEN[event]} |\n"


def _steps() -> Iterator[str]:
    for state in STATES:
        for event in EVENTS:
            if step := TRANSITIONS.get((state, event)):
                after = State(state=step.to, held=event == "hold", confirmed=event == "notice")
                said = STANDINGS[aggregator_standing(after)].label
                yield f"| `{state}` | `{event}` | `{step.to}` | {said} | {step.spends} |\n"


def _leaving() -> Iterator[str]:
    for state in STATES:
        if (state, "withdraw") in TRANSITIONS:
            yield f"| `{state}` | {describe_consequences(State(state=state))} |\n"
