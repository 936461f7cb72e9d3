"""A plan's life at a silo, as rules: which event leads from which state to which, and what that may spend.

Nothing here touches a file, a clock or a network. The worker and the commands that change a state look up where an
event leads, and an event that the table does not name cannot happen. docs/reference/plan-life.md prints the table with
what both sides say of each state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
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
"""What happens to a plan: the first ten at the silo's worker, then the aggregator's answers, a restart after a
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

_MADE: Mapping[tuple[SiloState, Event], Transition] = {
    ("plan_accepted", "scan"): Transition("scanned"),
    ("scanned", "assign"): Transition("assigned"),
    # the counts, where they decide which experts there are
    ("assigned", "begin"): Transition("training", "epsilon"),
    ("training", "train"): Transition("audited", "training"),
    ("audited", "draw"): Transition("released", "epsilon"),
    ("released", "draft"): Transition("awaiting_approval"),
    ("awaiting_approval", "lapse"): Transition("released"),
    ("awaiting_approval", "send"): Transition("in_outbox"),
    ("in_outbox", "receipt"): Transition("accepted"),
    ("in_outbox", "hold"): Transition("in_outbox"),
    ("in_outbox", "refusal"): Transition("refused"),
    ("refused", "restart"): Transition("released"),
    ("plan_refused", "restart"): Transition("waiting"),
}
_RETRAINED: tuple[SiloState, ...] = (
    *(
        "plan_accepted",
        "scanned",
        "assigned",
        "training",
        "audited",
        "released",
        "awaiting_approval",
        "refused",
    ),
)
TRANSITIONS: Mapping[tuple[SiloState, Event], Transition] = {
    **_MADE,
    **{(state, "accept"): Transition("plan_accepted") for state in STATES if state in IDLE},
    **{(state, "decline"): Transition("plan_refused") for state in STATES if state in IDLE},
    **{(state, "retrain"): Transition("plan_accepted") for state in _RETRAINED},
    **{(state, "succession"): Transition("superseded") for state in STATES if state in AT_WORK},
    **{
        (state, "withdraw"): Transition("withdrawn")
        for state in STATES
        if state not in ("waiting", "superseded")
    },
    **{
        (state, "notice"): Transition("withdrawn")
        for state in STATES
        if state in AT_WORK | {"accepted", "withdrawn"}
    },
}


def next_state(state: SiloState, event: Event) -> SiloState:
    """Return the state to which an event leads.

    Raises:
        ApprovalError: the event cannot happen in this state.
    """
    if (step := TRANSITIONS.get((state, event))) is None:
        possible = [each for each in STATES if (each, event) in TRANSITIONS]
        raise ApprovalError(
            event,
            expected=f"state {' or '.join(possible)}",
            got=f"state {state}",
            remedy="See what the site does and what it waits for: silo status SITE.",
        )
    return step.to


def impossible_transitions() -> list[tuple[SiloState, Event]]:
    """List the pairs of a state and an event that cannot happen."""
    return [pair for pair in product(STATES, EVENTS) if pair not in TRANSITIONS]
