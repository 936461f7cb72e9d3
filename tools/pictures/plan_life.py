"""The picture of a plan's life at a silo. Its arrows are looked up in the table by which the worker goes."""

from ddm.transport.messages import SiloState
from silo.worker.life import TRANSITIONS, Event
from tools.pictures.drawing import LEAVING, PERSON, PLAIN, PRIVATE, SIGNED, Box, Drawing, Style

_WIDTH = 150
_HEIGHT = 58
_COLUMNS = (40, 245, 450, 655)
_ROWS = (14, 118, 222, 326, 430)


def _place(row: int, column: int) -> Box:
    return Box(_COLUMNS[column], _ROWS[row], _WIDTH, _HEIGHT)


PLACES: dict[SiloState, tuple[Box, Style, str]] = {
    "plan_refused": (_place(0, 0), PERSON, "a person decides"),
    "waiting": (_place(1, 0), PLAIN, "no plan yet"),
    "plan_accepted": (_place(1, 1), PRIVATE, "images are read"),
    "scanned": (_place(1, 2), PRIVATE, "images are grouped"),
    "assigned": (_place(1, 3), PRIVATE, "training begins"),
    "training": (_place(2, 3), PRIVATE, "hours to days"),
    "auditing": (_place(2, 2), PRIVATE, "the expert is attacked"),
    "audited": (_place(2, 1), PRIVATE, "statistics are drawn"),
    "released": (_place(2, 0), PRIVATE, "the draft is written"),
    "awaiting_approval": (_place(3, 0), PERSON, "nothing has left yet"),
    "in_outbox": (_place(3, 1), LEAVING, "sent, being verified"),
    "accepted": (_place(3, 2), SIGNED, "done"),
    "refused": (_place(4, 1), PERSON, "a person decides"),
    "superseded": (_place(4, 2), PLAIN, "a newer plan"),
    "withdrawn": (_place(4, 3), PLAIN, "given up"),
}


_SHARED_EVENTS = (
    "withdraw (a person here gives the plan up) leads to withdrawn, from every state but waiting and superseded;",
    "so does notice (the aggregator leaves the silo out). While there is work, succession (a newer plan was signed)",
    "leads to superseded. Before it is sent and after a refusal, retrain goes back to plan_accepted. From waiting,",
    "plan_refused, accepted, withdrawn and superseded, accept takes the next plan.",
)


def plan_life_picture() -> str:
    """Draw the states, the way from one to the next, and what each step spends."""
    drawing = Drawing(
        840, 596, "The states of a plan at one silo, and the events that lead from one to the next"
    )
    for state, (box, style, meaning) in PLACES.items():
        drawing.box(box, style, state, [meaning], heading_is_code=True)

    for state, event in _EVENTS_TO_THE_SIDE:
        _draw_sideways(drawing, state, event)
    for state, event in _EVENTS_DOWN:
        _draw_down(drawing, state, event)
    _draw_both_ways(drawing, "plan_refused", "restart", "waiting", "decline")
    _draw_both_ways(drawing, "released", "draft", "awaiting_approval", "lapse")
    _draw_restart(drawing)
    _draw_quarantine(drawing)

    drawing.text((40, 516), "Shared by many states", anchor="start", bold=True)
    y = 516
    for line in _SHARED_EVENTS:
        y += 17
        drawing.text((40, y), line, anchor="start")
    return drawing.svg()


_EVENTS_TO_THE_SIDE: tuple[tuple[SiloState, Event], ...] = (
    ("waiting", "accept"),
    ("plan_accepted", "scan"),
    ("scanned", "assign"),
    ("training", "train"),
    ("auditing", "audit"),
    ("audited", "draw"),
    ("awaiting_approval", "send"),
    ("in_outbox", "receipt"),
)
_EVENTS_DOWN: tuple[tuple[SiloState, Event], ...] = (
    ("assigned", "begin"),
    ("in_outbox", "refusal"),
)


def _boxes(state: SiloState, event: Event) -> tuple[Box, Box, Style]:
    """Where the event begins and leads to by the worker's table, and the colour of its arrow."""
    transition = TRANSITIONS[state, event]
    style = PLAIN
    if transition.spends == "epsilon":
        style = LEAVING
    return PLACES[state][0], PLACES[transition.to][0], style


def _draw_sideways(drawing: Drawing, state: SiloState, event: Event) -> None:
    start, end, style = _boxes(state, event)
    if end.x > start.x:
        drawing.arrow([start.right, end.left], style)
        middle = (start.right[0] + end.left[0]) / 2
    else:
        drawing.arrow([start.left, end.right], style)
        middle = (start.left[0] + end.right[0]) / 2
    drawing.text((middle, start.left[1] - 8), event)
    _draw_spending(drawing, state, event, (middle, start.left[1] + 18))


def _draw_down(drawing: Drawing, state: SiloState, event: Event) -> None:
    start, end, style = _boxes(state, event)
    drawing.arrow([start.bottom, end.top], style)
    middle = (start.bottom[1] + end.top[1]) / 2
    drawing.text((start.bottom[0] + 8, middle), event, anchor="start")
    _draw_spending(drawing, state, event, (start.bottom[0] - 34, middle))


def _draw_spending(
    drawing: Drawing, state: SiloState, event: Event, position: tuple[float, float]
) -> None:
    """Name the epsilon that the step may spend."""
    if TRANSITIONS[state, event].spends == "epsilon":
        drawing.text(position, "epsilon", colour=LEAVING.stroke, bold=True)


def _draw_both_ways(
    drawing: Drawing, upper: SiloState, down: Event, lower: SiloState, up: Event
) -> None:
    """Draw two arrows side by side between a state and the one below it."""
    start, end, style = _boxes(upper, down)
    middle = (start.bottom[1] + end.top[1]) / 2 + 4
    right = start.bottom[0] + 20
    drawing.arrow([(right, start.bottom[1]), (right, end.y)], style)
    drawing.text((right + 8, middle), down, anchor="start")

    start, end, style = _boxes(lower, up)
    left = start.top[0] - 20
    drawing.arrow([(left, start.y), (left, end.bottom[1])], style)
    drawing.text((left - 8, middle), up, anchor="end")


def _draw_restart(drawing: Drawing) -> None:
    """A refused submission is drafted again: around the left side."""
    refused, released, style = _boxes("refused", "restart")
    margin = 20
    drawing.arrow(
        [refused.left, (margin, refused.left[1]), (margin, released.left[1]), released.left], style
    )
    drawing.text((150, refused.left[1] - 8), "restart")


def _draw_quarantine(drawing: Drawing) -> None:
    """A submission in quarantine stays where it is, until a person at the aggregator decides."""
    sent, still_sent, style = _boxes("in_outbox", "hold")
    x = still_sent.x + _WIDTH - 24
    drawing.arrow([(x - 50, sent.y), (x - 50, sent.y - 20), (x, sent.y - 20), (x, sent.y)], style)
    drawing.text((x + 8, sent.y - 16), "hold: quarantine", anchor="start")
