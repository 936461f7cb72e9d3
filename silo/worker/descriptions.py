"""Describes in plain words what a site is doing with its plan, and which command its operator types next, if any."""

from collections.abc import Mapping

from ddm.transport.messages import SiloState
from silo.worker.state import State

_NOW: Mapping[SiloState, str] = {
    "waiting": "no plan yet",
    "plan_accepted": "the plan was accepted; the images are read next",
    "plan_refused": "the plan was refused here; nothing was trained or drawn",
    "scanned": "the images were read; they are assigned to clusters next",
    "assigned": "the images were assigned; training is next",
    "training": "the experts are being trained",
    "auditing": "the experts are trained; the leak audit measures what they remember",
    "audited": "the experts are trained and audited; the statistics are drawn next, which spends epsilon",
    "released": "the statistics were drawn; the draft is next",
    "awaiting_approval": "a draft waits for your approval; nothing has left",
    "in_outbox": "sent, or about to be; the aggregator has not answered yet",
    "accepted": "the aggregator accepted the submission",
    "refused": "the aggregator refused the submission",
    "withdrawn": "this site takes no further part in the plan",
    "superseded": "the plan is over: another one was signed in its place; what it cost stays spent, no more is spent",
}
_KEEP_RUNNING = "nothing to do while `silo run {site}` runs"
_NEXT: Mapping[SiloState, str] = {
    **dict.fromkeys(_NOW, _KEEP_RUNNING),
    "plan_refused": "fix what is said below, then `silo run {site}`; or decline it for good: `silo withdraw {site}`",
    "awaiting_approval": "look at it with `silo review {site}`, then `silo approve {site} --digest {digest}`",
    "refused": "send the same again with `silo run {site}`; train on fixed images with `silo retrain {site}`; or give "
    "the plan up with `silo withdraw {site}`",
}
HELD = "received; a person at the aggregator decides on it"
UNTOLD = "this site gave the plan up; the aggregator hears of it while `silo run {site}` runs"
CONFIRMED = "this site takes no further part in the plan, and the aggregator leaves it out"


def describe_state(state: State, site: str = "SITE") -> str:
    """Say what goes on."""
    # Fields of the state that say more than its name.
    if state.state == "in_outbox" and state.held:
        return HELD
    if state.state == "superseded" and state.successor:
        return _NOW["superseded"].replace("another one", state.successor)
    if state.state == "withdrawn" and state.problem is None:
        return CONFIRMED if state.confirmed else UNTOLD.format(site=site)
    return _NOW[state.state]


def describe_next_step(state: State, site: str = "SITE") -> str:
    """Say what the site's operator does next."""
    if state.problem and state.state not in ("withdrawn", "refused", "plan_refused"):
        return f"fix what is said below, then `silo run {site}`"
    return _NEXT[state.state].format(site=site, digest=state.submission_digest or "DIGEST")


def state_lines(state: State, site: str = "SITE", next_words: str | None = None) -> list[str]:
    """Return the lines that `silo status` prints below the name of the state.

    Args:
        state: the site's.
        site: its folder, as it was named.
        next_words: what comes next, where the state alone does not determine it.
    """
    lines = [
        f"  now      {describe_state(state, site)}",
        f"  next     {next_words or describe_next_step(state, site)}",
    ]
    if state.problem:
        lines.append(f"  problem  {state.problem.message} (code {state.problem.code})")
        if state.problem.remedy:
            lines.append(f"  to do    {state.problem.remedy}")
    return lines
