"""The page docs/reference/plan-life.md: every state and every event of a plan's life, with what both sides say."""

from collections.abc import Iterator, Mapping

from aggregator.monitoring.labels import STANDINGS
from aggregator.monitoring.silo_status import SubmissionStatus, Verdict, standing
from ddm.transport.messages import SiloState
from silo.worker.descriptions import describe_next_step, describe_state
from silo.worker.life import EVENTS, STATES, TRANSITIONS, Event
from silo.worker.state import State
from silo.worker.withdrawal import describe_consequences

_HEAD = """# A plan's life

What becomes of a plan at one silo, as [silo/worker/life.py](../../silo/worker/life.py) has it; `make docs` writes this
page. A restart, a loss of power or a week offline changes no state. What the tables do not name cannot happen: a
command that would need it ends with exit code 34 and says in which states it works.

## States

`silo status` prints the second and third column, `aggregator status` the fourth, once the silo has been asked. Both are
read from each side's own folder, so that neither needs the other to be running.
"""
_EVENTS = """
## What happens

| event | when |
| --- | --- |
"""
_STEPS = """
## Every state, every event

The last column is the most that the worker may spend on the way. Whatever is done twice is paid once: a debit in the
ledger covers one plan and one version of the images, however often they are drawn or sent.

| in state | event | leads to | `aggregator status` then says | spends at most |
| --- | --- | --- | --- | --- |
"""
_LEAVING = """
## Giving a plan up

`silo withdraw` works in every state in which there is a plan to give up. The silo's key signs that it did, the
aggregator believes nobody else, and it leaves the silo out of every later version and answers with a signed notice.
Stop `silo run` first, and start it again afterwards: the aggregator hears of it while the site is connected.

| in state | what it means |
| --- | --- |
"""
_WHEN: Mapping[Event, str] = {
    "accept": "the worker verified the federation's plan, and policy.toml allows it",
    "decline": "the plan does not verify, or asks for more than policy.toml allows",
    "scan": "the images were read; there are enough, and the budget covers the plan",
    "assign": "every image has its cluster",
    "begin": "it is clear which experts there are; plans with an expert a cluster draw the counts for that",
    "train": "the experts are trained",
    "audit": "the leak audit of every expert is finished, and lets it leave or is waived",
    "draw": "the statistics were debited, then drawn",
    "draft": "what would leave lies in `private/review/`",
    "lapse": "the waiver that the draft carries is over; it is drafted again",
    "send": "a person approved the draft, or policy.toml does; it was signed into the outbox",
    "receipt": "the aggregator's signed acceptance arrived",
    "hold": "signed word arrived that a person at the aggregator decides",
    "refusal": "the aggregator's signed refusal arrived; it says what may be tried again at which cost",
    "restart": "`silo run` was started again",
    "retrain": "`silo retrain`: train and draw again on the images as they are now; it says first what that costs",
    "succession": "the federation's keys signed another plan, and its metadata arrived here",
    "withdraw": "`silo withdraw`",
    "notice": "signed word arrived that the aggregator leaves this silo out",
}


def aggregator_says(state: SiloState, *, held: bool = False) -> str:
    """Return the words of `aggregator status` for a silo in a state, once both have heard all that the other said."""
    answers: Mapping[SiloState, Verdict] = {
        "in_outbox": "quarantined" if held else "arrived",
        "accepted": "accepted",
        "refused": "refused",
        "withdrawn": "withdrawn",
    }
    answer = answers.get(state)
    submissions = (SubmissionStatus(sequence=1, verdict=answer),) if answer else ()
    # The aggregator is at the next plan by then, of which this silo has only heard.
    reported = "waiting" if state == "superseded" else state
    return STANDINGS[standing(submissions, None, reported, answered=True, silent=False)][0]


def plan_life_page() -> str:
    """Return the page."""
    return "".join(
        [_HEAD, *_states(), _EVENTS, *_events(), _STEPS, *_steps(), _LEAVING, *_leaving()]
    )


def _states() -> Iterator[str]:
    yield "\n| state | now | next | the aggregator says |\n| --- | --- | --- | --- |\n"
    for state in STATES:
        example = State(state=state, confirmed=state == "withdrawn")
        yield f"| `{state}` | {describe_state(example)} | {describe_next_step(example)} | {aggregator_says(state)} |\n"
        if state == "in_outbox":
            said = describe_state(State(state=state, held=True))
            following = describe_next_step(example)
            yield f"| `{state}`, held | {said} | {following} | {aggregator_says(state, held=True)} |\n"
        if state == "withdrawn":
            label = STANDINGS[standing((), None, state, answered=True, silent=False)][0]
            said = describe_state(State(state=state))
            yield f"| `{state}`, not confirmed | {said} | {describe_next_step(example)} | {label} |\n"


def _events() -> Iterator[str]:
    for event in EVENTS:
        yield f"| `{event}` | {_WHEN[event]} |\n"


def _steps() -> Iterator[str]:
    for state in STATES:
        for event in EVENTS:
            if step := TRANSITIONS.get((state, event)):
                said = aggregator_says(step.to, held=event == "hold")
                yield f"| `{state}` | `{event}` | `{step.to}` | {said} | {step.spends} |\n"


def _leaving() -> Iterator[str]:
    for state in STATES:
        if (state, "withdraw") in TRANSITIONS:
            yield f"| `{state}` | {describe_consequences(State(state=state))} |\n"
