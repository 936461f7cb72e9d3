"""A plan's life at a silo, as rules: which event leads from which state to which, and what that may spend.

Nothing here touches a file, a clock or a network. The worker and the commands that change a state look up where an
event leads, and an event that the table does not name cannot happen. docs/reference/plan-life.md prints the table with
what both sides say about each state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ddm.errors import ApprovalError
from ddm.transport.messages import SiloState

Event = Literal[
    "accept",
    "decline",
    "scan",
    "assign",
    "begin",
    "train",
    "audit",
    "draw",
    "draft",
    "lapse",
    "send",
    "receipt",
    "hold",
    "refusal",
    "restart",
    "retrain",
    "succession",
    "withdraw",
    "notice",
]
"""What happens to a plan: the first eleven at the silo's worker, then the aggregator's answers, a restart after a
refusal, a person's decisions, and what the federation's keys announce."""

Spending = Literal["nothing", "training", "epsilon"]


@dataclass(frozen=True)
class Transition:
    """Where an event leads, and the most that the worker spends on the way."""

    to: SiloState
    spends: Spending = "nothing"


STATES: tuple[SiloState, ...] = get_args(SiloState)
EVENTS: tuple[Event, ...] = get_args(Event)
# A plan in one of these needs nothing more, and the next one may be accepted.
IDLE: frozenset[SiloState] = frozenset(
    {"waiting", "plan_refused", "accepted", "withdrawn", "superseded"}
)
# From acceptance until an answer that ends it: here the federation's next plan ends the work.
AT_WORK: frozenset[SiloState] = frozenset(STATES) - IDLE

_OWN_TRANSITIONS: Mapping[tuple[SiloState, Event], Transition] = {
    ("plan_accepted", "scan"): Transition("scanned"),
    ("scanned", "assign"): Transition("assigned"),
    # Epsilon for the counts, where they decide which experts there are.
    ("assigned", "begin"): Transition("training", "epsilon"),
    ("training", "train"): Transition("auditing", "training"),
    # The audit trains a reference and a control of its own.
    ("auditing", "audit"): Transition("audited", "training"),
    ("audited", "draw"): Transition("released", "epsilon"),
    ("released", "draft"): Transition("awaiting_approval"),
    ("awaiting_approval", "lapse"): Transition("released"),
    ("awaiting_approval", "send"): Transition("in_outbox"),
    ("in_outbox", "receipt"): Transition("accepted"),
    # A submission in quarantine still waits for its receipt; `State.held` tells the two waits apart.
    ("in_outbox", "hold"): Transition("in_outbox"),
    ("in_outbox", "refusal"): Transition("refused"),
    # Experts and statistics are there and paid for: only the draft is made again.
    ("refused", "restart"): Transition("released"),
    ("plan_refused", "restart"): Transition("waiting"),
}
# From acceptance until the submission is sent, and after a refusal.
_RETRAINABLE: tuple[SiloState, ...] = (
    "plan_accepted",
    "scanned",
    "assigned",
    "training",
    "auditing",
    "audited",
    "released",
    "awaiting_approval",
    "refused",
)
_WITHDRAWABLE = frozenset(STATES) - {"waiting", "superseded"}
_NOTIFIABLE = AT_WORK | {"accepted", "withdrawn"}


def _transitions() -> Mapping[tuple[SiloState, Event], Transition]:
    """List every transition: those above, and the events that many states share."""
    transitions = dict(_OWN_TRANSITIONS)
    for state in STATES:
        if state in IDLE:
            transitions[state, "accept"] = Transition("plan_accepted")
            transitions[state, "decline"] = Transition("plan_refused")
        if state in AT_WORK:
            transitions[state, "succession"] = Transition("superseded")
        if state in _RETRAINABLE:
            transitions[state, "retrain"] = Transition("plan_accepted")
        if state in _WITHDRAWABLE:
            transitions[state, "withdraw"] = Transition("withdrawn")
        if state in _NOTIFIABLE:
            transitions[state, "notice"] = Transition("withdrawn")
    return transitions


TRANSITIONS: Mapping[tuple[SiloState, Event], Transition] = _transitions()


def next_state(state: SiloState, event: Event) -> SiloState:
    """Return the state to which an event leads.

    Raises:
        ApprovalError: the event cannot happen in this state.
    """
    transition = TRANSITIONS.get((state, event))
    if transition is None:
        possible = [other for other in STATES if (other, event) in TRANSITIONS]
        raise ApprovalError(
            event,
            expected=f"state {' or '.join(possible)}",
            got=f"state {state}",
            remedy="See what the site does and what it waits for: `silo status SITE`.",
        )
    return transition.to
