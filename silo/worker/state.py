"""The state of a silo's work on its plan: one small file, replaced atomically at every step."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DocumentError
from ddm.io.files import write_atomic
from ddm.protocol.base import Digest, Document, NaturalInt, PlanId, ShortText
from ddm.transport.messages import SiloState

StateName = SiloState
IDLE: frozenset[str] = frozenset({"waiting", "plan_refused", "accepted", "withdrawn"})
SENT: frozenset[str] = frozenset({"in_outbox", "accepted"})


class Problem(Document):
    """Why the work stopped: the documented code and the sentence shown to the operator; stays on the site."""

    format: Literal["archipelago/problem/1"] = "archipelago/problem/1"
    code: NaturalInt
    message: ShortText


class State(Document):
    """The worker's state; writing this file enters it."""

    format: Literal["archipelago/state/1"] = "archipelago/state/1"
    state: StateName = "waiting"
    plan_id: PlanId | None = None
    plan_digest: Digest | None = None
    dataset_digest: Digest | None = None
    sequence: Annotated[int, Field(ge=1, le=10_000)] = 1
    submission_digest: Digest | None = None
    step: NaturalInt = 0
    num_steps: NaturalInt = 0
    problem: Problem | None = None

    def to(self, state: StateName, **changes: object) -> "State":
        """Return the state that follows, with any problem cleared unless a new one is given."""
        return self.model_copy(update={"state": state, "problem": None, **changes})


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
        error.remedy = "Restore private/state.json from backup; checkpoints and the ledger are not affected."
        raise


def save_state(path: Path, state: State) -> State:
    """Enter `state`: write it durably, then return it."""
    write_atomic(path, state.encode())
    return state
