"""The state of a silo's work on its plan: one small file, replaced atomically at every step."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ddm.errors import ArchipelagoError, DocumentError
from ddm.io.files import read_bounded, write_atomic, write_for_group
from ddm.protocol.base import Digest, Document, NaturalInt, PlanId, ShortText
from ddm.transport.messages import SiloState, StatusFile
from silo.config import Site
from silo.plan.succession import find_successor
from silo.worker.life import AT_WORK, Event, next_state

StateName = SiloState
_MAX_STATUS_BYTES = 4096


class Problem(Document):
    """Why the work stopped: the documented code, what was wrong and what to do; stays on the site."""

    format: Literal["archipelago/problem/1"] = "archipelago/problem/1"
    code: NaturalInt
    message: ShortText
    remedy: ShortText = ""


class State(Document):
    """The worker's state; writing this file enters it.

    Attributes:
        state: one of `silo.worker.life.STATES`.
        plan_id: the plan in progress, or the last one.
        plan_digest: the digest of its document, from acceptance on.
        dataset_digest: the digest of the images that were scanned for it.
        sequence: the number of its submission.
        submission_digest: the digest of the draft.
        step: steps of training taken, or images decoded.
        num_steps: the number of all steps.
        held: whether the submission is in quarantine, where a person at the aggregator decides on it.
        confirmed: whether the aggregator has said that it left a withdrawn silo out.
        successor: the plan that was signed in the place of a superseded one.
        problem: why the work stopped; it goes as soon as the work continues.
    """

    format: Literal["archipelago/state/1"] = "archipelago/state/1"
    state: StateName = "waiting"
    plan_id: PlanId | None = None
    plan_digest: Digest | None = None
    dataset_digest: Digest | None = None
    sequence: Annotated[int, Field(ge=1, le=10_000)] = 1
    submission_digest: Digest | None = None
    step: NaturalInt = 0
    num_steps: NaturalInt = 0
    held: bool = False
    confirmed: bool = False
    successor: PlanId | None = None
    problem: Problem | None = None

    def after(self, event: Event, **changes: object) -> "State":
        """Return the state to which an event leads.

        Raises:
            ApprovalError: it cannot happen now.
        """
        new_state = next_state(self.state, event)
        # A problem and a wait in quarantine belong to one state: they go unless the event brings them.
        update = {"state": new_state, "problem": None, "held": False, **changes}
        return self.model_copy(update=update)


def state_path(private: Path) -> Path:
    """The path of the state in a site's private folder."""
    return private / "state.json"


def load_state(path: Path) -> State:
    """Read the state; a site without the file is waiting.

    Raises:
        DocumentError: the file is damaged.
    """
    if not path.exists():
        return State()
    try:
        return State.parse(path.read_bytes(), subject=str(path), limit=65536)
    except DocumentError as error:
        error.remedy = (
            "Restore private/state.json from backup; checkpoints and the ledger are not affected."
        )
        raise


def present_state(site: Site) -> State:
    """Read the state as the worker will find it when it looks next: a plan may be superseded while no worker runs."""
    state = load_state(state_path(site.private))
    if state.state not in AT_WORK:
        return state
    newer_plan_id = find_successor(site, state.plan_id or "")
    if newer_plan_id is None:
        return state
    return state.after("succession", successor=newer_plan_id)


def save_state(path: Path, state: State) -> State:
    """Enter `state`: write it durably, then return it."""
    write_atomic(path, state.encode())
    return state


def write_courier_status(site: Site, state: State, code: int = 0) -> None:
    """Write what the aggregator may know, for the courier to send.

    Args:
        site: the silo's folder.
        state: the state of the work.
        code: why the work does not continue before a person acts here, see `ddm.transport.messages.Status`.
    """
    # Steps of training alone are counted in the state on disk: they are the plan's, and reveal nothing of the images.
    percent = 0
    if state.num_steps:
        percent = 100 * state.step // state.num_steps
    status = StatusFile(
        plan_id=state.plan_id,
        state=state.state,
        progress=percent,
        sequence=state.sequence,
        code=code,
    )
    # The courier may run as another user, and reads this through the group.
    write_for_group(_courier_status_path(site), status.model_dump_json().encode())


def reported_code(site: Site) -> int:
    """Return the code that the worker reported last; 0 where the work continues, or nothing can be read."""
    try:
        data = read_bounded(_courier_status_path(site), _MAX_STATUS_BYTES)
        return StatusFile.model_validate_json(data).code
    except (ArchipelagoError, ValidationError):
        return 0


def _courier_status_path(site: Site) -> Path:
    return site.outbox / "status.json"
