"""What a site is doing with its plan, what the work needs, from whom, and the next command: rules without I/O.

`silo status`, the log of `silo run` and docs/reference/plan-life.md take their words from here. The aggregator's words
for the same states are in `aggregator.monitoring.standing`, and a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ddm.errors import AuditError
from ddm.transport.messages import SiloState
from silo.plan.consent import WaitingPlan
from silo.worker.life import AT_WORK, IDLE
from silo.worker.state import State

Person = Literal["nobody", "silo", "aggregator"]
"""Who must act before the work continues: nobody, a person at this site, or one at the aggregator."""


@dataclass(frozen=True)
class Circumstances:
    """What decides about the next step besides the state.

    Attributes:
        running: whether a worker is running.
        blocked: whether the running worker waits until a person has removed what the state's problem names.
        pause: since when the site is paused, and by whom; None where it is not.
        stopped_for_pause: whether the worker has stopped its work for the pause.
        approved: whether a person's approval waits for the worker.
        waiting_plan: a plan that waits until a person accepts it.
        unnamed_plan: the plan in force, where the aggregator said that it does not name this site.
    """

    running: bool
    blocked: bool = False
    pause: str | None = None
    stopped_for_pause: bool = False
    approved: bool = False
    waiting_plan: WaitingPlan | None = None
    unnamed_plan: str | None = None


@dataclass(frozen=True)
class Situation:
    """What is happening at a site, and how it continues.

    Attributes:
        now: what is happening.
        needs: what the work needs; empty where it continues by itself.
        person: who brings that.
        commands: what this site's operator types, in this order.
    """

    now: str
    needs: str = ""
    person: Person = "nobody"
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Words:
    """A state in words, while a worker is running and while none is."""

    running: str
    stopped: str


_WORDS: Mapping[SiloState, _Words] = {
    "waiting": _Words(
        "no plan for this site has arrived yet", "no plan for this site has arrived yet"
    ),
    "plan_accepted": _Words(
        "the plan was accepted; the images are being read",
        "the plan was accepted; the checks before the training are not finished",
    ),
    "plan_refused": _Words(
        "the plan was refused here; nothing was trained or drawn",
        "the plan was refused here; nothing was trained or drawn",
    ),
    "scanned": _Words(
        "the images were read; they are being assigned to clusters",
        "the images were read; they are not assigned to clusters yet",
    ),
    "assigned": _Words(
        "the images were assigned; the training begins",
        "the images were assigned; the training has not begun",
    ),
    "training": _Words("the experts are being trained", "the training is not finished"),
    "auditing": _Words(
        "the experts are trained; the leak audit is measuring what they remember",
        "the experts are trained; the leak audit has not let them leave yet",
    ),
    "audited": _Words(
        "the experts are audited; the statistics are being drawn, which spends epsilon",
        "the experts are audited; the statistics are not drawn yet",
    ),
    "released": _Words(
        "the statistics were drawn; the draft is being written",
        "the statistics were drawn; the draft is not written yet",
    ),
    "awaiting_approval": _Words(
        "a draft waits for approval; nothing has left",
        "a draft waits for approval; nothing has left",
    ),
    "in_outbox": _Words(
        "the submission is sent, or about to be; the aggregator has not answered yet",
        "the submission is in the outbox; the aggregator has not answered yet",
    ),
    "accepted": _Words(
        "the aggregator accepted the submission; the site waits for the next plan",
        "the aggregator accepted the submission",
    ),
    "refused": _Words(
        "the aggregator refused the submission",
        "the aggregator refused the submission",
    ),
    "withdrawn": _Words(
        "this site takes no further part in the plan, and waits for the next one",
        "this site takes no further part in the plan",
    ),
    "superseded": _Words(
        "the plan is over: another one was signed in its place; what it cost stays spent, no more is spent",
        "the plan is over: another one was signed in its place; what it cost stays spent, no more is spent",
    ),
}
HELD = "the submission arrived; screening found it implausible"
UNCONFIRMED = (
    "this site gave the plan up; the aggregator has not confirmed it yet, and confirms nothing once it has signed "
    "another plan: then ask its operator whether the submission is out (`aggregator withdraw`)"
)
CONFIRMED = "this site takes no further part in the plan, and the aggregator leaves it out"
_NO_WORKER = "no worker is running"


def describe_state(state: State, *, running: bool = True) -> str:
    """Say in which state the work on the plan is."""
    # Fields of the state that say more than its name.
    if state.state == "in_outbox" and state.held:
        return HELD
    if state.state == "withdrawn" and state.problem is None:
        return CONFIRMED if state.confirmed else UNCONFIRMED
    words = _WORDS[state.state]
    text = words.running if running else words.stopped
    if state.state == "superseded" and state.successor:
        return text.replace("another one", state.successor)
    return text


def describe_site(state: State, circumstances: Circumstances, site: str = "SITE") -> Situation:
    """Say what is happening at a site, what it needs, from whom, and what its operator types next.

    Args:
        state: the state of the work on the plan.
        circumstances: what else decides.
        site: the site's folder, as it was named.
    """
    run = f"silo run {site}"
    if circumstances.pause is not None:
        situation = _describe_pause(state, circumstances, site)
    elif circumstances.waiting_plan is not None and state.state in IDLE:
        situation = _describe_waiting_plan(circumstances.waiting_plan, site)
    elif _is_stopped_by_problem(state, circumstances):
        situation = _describe_problem(state, circumstances, site)
    else:
        situation = _describe_progress(state, circumstances, site)
    if circumstances.running:
        return situation
    return _without_worker(state, situation, run)


def _without_worker(state: State, situation: Situation, run: str) -> Situation:
    """Add that no worker is running, and the command that starts one."""
    needs = situation.needs
    person = situation.person
    if person == "nobody" and not _is_over(state):
        needs = _needs_worker(state)
        person = "silo"
    commands = situation.commands
    if run not in commands:
        commands = (*commands, run)
    return Situation(f"{situation.now}; {_NO_WORKER}", needs, person, commands)


def _needs_worker(state: State) -> str:
    match state.state:
        case "waiting" | "superseded":
            return "a worker, which takes the plan that arrives next"
        case "in_outbox":
            return "a worker, which reads the aggregator's answer"
        case "withdrawn":
            return "a connection to the aggregator, which then hears of it"
    return "a worker, which goes on where the last one stopped"


def _is_over(state: State) -> bool:
    """Whether the aggregator has all that it will get for the plan, and this site knows it."""
    if state.state == "withdrawn":
        return state.confirmed or state.problem is not None
    return state.state == "accepted"


def _is_stopped_by_problem(state: State, circumstances: Circumstances) -> bool:
    """Whether an error stopped the work.

    A worker that was started again tries again, and the state keeps the problem until it has succeeded.
    """
    if state.problem is None or state.state not in AT_WORK or state.state == "refused":
        return False
    if state.held:
        # Whatever happens here, the aggregator decides first.
        return False
    return circumstances.blocked or not circumstances.running


def _describe_pause(state: State, circumstances: Circumstances, site: str) -> Situation:
    begun = describe_state(state, running=False)
    pause = f"paused since {circumstances.pause}"
    if circumstances.running and not circumstances.stopped_for_pause:
        pause = f"stopping at the next step, for the pause requested on {circumstances.pause}"
    return Situation(
        now=f"{begun}; {pause}",
        needs="a person here who lets the work go on",
        person="silo",
        commands=(f"silo resume {site}",),
    )


def _describe_waiting_plan(plan: WaitingPlan, site: str) -> Situation:
    return Situation(
        now=f"plan {plan.plan_id} waits for acceptance; it contains {plan.in_words}",
        needs="a person here who accepts that this plan processes the images",
        person="silo",
        commands=(f"silo accept {site} --digest {plan.plan_digest}",),
    )


def _describe_problem(state: State, circumstances: Circumstances, site: str) -> Situation:
    code = state.problem.code if state.problem else 0
    begun = describe_state(state, running=False)
    now = f"{begun}; the work stopped with code {code}"
    if circumstances.blocked:
        now = f"{begun}; the work waits, with code {code}"
    if code == AuditError.exit_code:
        return Situation(
            now=now,
            needs="a person here who waives the inconclusive audit for this plan, or gives the plan up",
            person="silo",
            # At a terminal it asks for role, reason and day.
            commands=(f"silo waive {site}",),
        )
    return Situation(
        now=now,
        needs="a person here who removes the problem below",
        person="silo",
    )


def _describe_progress(state: State, circumstances: Circumstances, site: str) -> Situation:
    """Describe a state in which neither a pause nor a problem stops the work."""
    now = describe_state(state, running=circumstances.running)
    run = f"silo run {site}"
    match state.state:
        case "waiting" if circumstances.unnamed_plan is not None:
            return Situation(
                f"plan {circumstances.unnamed_plan} is in force and does not name this site, as it was signed before; "
                "the next plan may"
            )
        case "plan_refused":
            return Situation(
                now=now,
                needs="a person here who removes the problem below and starts `silo run` again, or declines the plan "
                f"for good (`silo withdraw {site}`, while `silo run` is stopped)",
                person="silo",
                commands=(run,),
            )
        case "awaiting_approval" if circumstances.approved:
            return Situation("the draft is approved; it is signed and sent next")
        case "awaiting_approval":
            return Situation(
                now=now,
                needs="a person here who looks at all that would leave, and approves it on that page, or with "
                f"`silo approve {site} --digest {state.submission_digest or 'DIGEST'}`",
                person="silo",
                commands=(f"silo review {site}",),
            )
        case "in_outbox" if state.held:
            return Situation(
                now=now,
                needs="a person at the aggregator who admits or refuses it",
                person="aggregator",
            )
        case "refused":
            return Situation(
                now=now,
                needs=f"a person here who sends the same again (`silo run {site}`), trains on fixed images "
                f"(`silo retrain {site}`), or gives the plan up (`silo withdraw {site}`)",
                person="silo",
                commands=(run,),
            )
    return Situation(now)


def situation_lines(situation: Situation, state: State, circumstances: Circumstances) -> list[str]:
    """Return the lines that `silo status` prints of a situation."""
    lines = [f"  now      {situation.now}"]
    if situation.needs:
        lines.append(f"  needs    {situation.needs}")
    next_words = ", then ".join(situation.commands)
    lines.append(f"  next     {next_words or 'nothing to do here'}")
    # A worker that was started again tries again: until it has succeeded, the earlier problem is not one of now.
    is_trying_again = circumstances.running and not circumstances.blocked
    explains_state = state.state in ("plan_refused", "refused", "withdrawn")
    if state.problem and (explains_state or not is_trying_again):
        lines.append(f"  problem  {state.problem.message} (code {state.problem.code})")
        if state.problem.remedy:
            lines.append(f"  to do    {state.problem.remedy}")
    return lines
