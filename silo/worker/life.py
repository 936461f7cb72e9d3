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
class Step:
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

_MADE: Mapping[tuple[SiloState, Event], Step] = {
    ("plan_accepted", "scan"): Step("scanned"),
    ("scanned", "assign"): Step("assigned"),
    # the counts, where they decide which experts there are
    ("assigned", "begin"): Step("training", "epsilon"),
    ("training", "train"): Step("audited", "training"),
    ("audited", "draw"): Step("released", "epsilon"),
    ("released", "draft"): Step("awaiting_approval"),
    ("awaiting_approval", "lapse"): Step("released"),
    ("awaiting_approval", "send"): Step("in_outbox"),
    ("in_outbox", "receipt"): Step("accepted"),
    ("in_outbox", "hold"): Step("in_outbox"),
    ("in_outbox", "refusal"): Step("refused"),
    ("refused", "restart"): Step("released"),
    ("plan_refused", "restart"): Step("waiting"),
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
LIFE: Mapping[tuple[SiloState, Event], Step] = {
    **_MADE,
    **{(state, "accept"): Step("plan_accepted") for state in STATES if state in IDLE},
    **{(state, "decline"): Step("plan_refused") for state in STATES if state in IDLE},
    **{(state, "retrain"): Step("plan_accepted") for state in _RETRAINED},
    **{(state, "succession"): Step("superseded") for state in STATES if state in AT_WORK},
    **{
        (state, "withdraw"): Step("withdrawn")
        for state in STATES
        if state not in ("waiting", "superseded")
    },
    **{
        (state, "notice"): Step("withdrawn")
        for state in STATES
        if state in AT_WORK | {"accepted", "withdrawn"}
    },
}


def after(state: SiloState, event: Event) -> SiloState:
    """Return the state to which an event leads.

    Raises:
        ApprovalError: the event cannot happen in this state.
    """
    if (step := LIFE.get((state, event))) is None:
        possible = [each for each in STATES if (each, event) in LIFE]
        raise ApprovalError(
            event,
            expected=f"state {' or '.join(possible)}",
            got=f"state {state}",
            remedy="See what the site does and what it waits for: silo status SITE.",
        )
    return step.to


def unknown() -> list[tuple[SiloState, Event]]:
    """List the pairs of a state and an event that cannot happen."""
    return [pair for pair in product(STATES, EVENTS) if pair not in LIFE]
