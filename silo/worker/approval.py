"""What waits for approval; how a person lets exactly that leave, or gives the plan up."""

from pathlib import Path

from ddm.errors import ApprovalError
from ddm.io.files import read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document
from ddm.protocol.submission import Submission
from silo.config import Site
from silo.worker.state import IDLE, SENT, State, load_state, save_state, state_path


class PersonApproval(Document):
    """What `silo approve` leaves for the worker."""

    submission_digest: Digest


def approval_path(site: Site) -> Path:
    """Where a person's approval waits for the worker."""
    return site.private / "approval.json"


def review_folder(site: Site) -> Path:
    """Where the bytes that would leave lie for a person to look at."""
    return site.private / "review"


def load_draft(site: Site) -> Submission:
    """Read the draft that waits for approval."""
    return Submission.parse(read_bounded(review_folder(site) / "draft.json", MAX_DOCUMENT_BYTES), subject="draft.json")


def approve(site: Site, digest: str) -> None:
    """Record a person's approval of exactly the draft with this digest.

    Raises:
        ApprovalError: nothing waits, or something else does.
    """
    state = load_state(state_path(site.private))
    if state.state != "awaiting_approval" or state.submission_digest is None:
        raise ApprovalError("approval", expected="a submission in state awaiting_approval", got=state.state)
    if digest != state.submission_digest or load_draft(site).digest != digest:
        raise ApprovalError("approval", expected=state.submission_digest, got=digest)
    write_atomic(approval_path(site), PersonApproval(submission_digest=digest).encode())


def person_approved(site: Site, digest: str) -> bool:
    """Whether a person approved the draft with this digest."""
    path = approval_path(site)
    if not path.exists():
        return False
    approved = PersonApproval.parse(path.read_bytes(), subject="approval.json", limit=4096)
    return approved.submission_digest == digest


def withdraw(site: Site) -> State:
    """Give up the present plan, so that the site can take another; what was released stays in the ledger.

    Raises:
        BusyError: the worker is at work.
        ApprovalError: there is no plan to give up, or its submission was sent.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        if state.state in IDLE | SENT:
            raise ApprovalError("withdrawal", expected="a plan at work and nothing sent", got=f"state {state.state}")
        if (site.outbox / (state.plan_id or "") / str(state.sequence)).exists():
            remedy = "The worker was stopped between sending and noting it: run it again, it goes on from there."
            raise ApprovalError("withdrawal", expected="nothing sent", got="a submission in the outbox", remedy=remedy)
        return save_state(state_path(site.private), state.to("withdrawn"))
