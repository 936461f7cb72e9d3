"""Approves the draft that waits, by its digest, or withdraws from the plan."""

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
    """The folder with the bytes that would leave, for a person to inspect."""
    return site.private / "review"


def load_draft(site: Site) -> Submission:
    """Read the draft that waits for approval."""
    return Submission.parse(read_bounded(review_folder(site) / "draft.json", MAX_DOCUMENT_BYTES), subject="draft.json")


def approve(site: Site, digest: str) -> None:
    """Record a person's approval of exactly the draft with this digest.

    Raises:
        ApprovalError: no draft waits, or one with another digest.
    """
    state = load_state(state_path(site.private))
    if state.state != "awaiting_approval" or state.submission_digest is None:
        raise ApprovalError("approval", expected="a submission in state awaiting_approval", got=f"state {state.state}")
    for subject, found in (("approval", digest), ("review/draft.json", load_draft(site).digest)):
        if found != state.submission_digest:
            expected = f"the digest of the draft that waits, {state.submission_digest}"
            raise ApprovalError(subject, expected=expected, got=ascii(found[:80]))
    write_atomic(approval_path(site), PersonApproval(submission_digest=digest).encode())


def person_approved(site: Site, digest: str) -> bool:
    """Whether a person approved the draft with this digest."""
    path = approval_path(site)
    if not path.exists():
        return False
    approved = PersonApproval.parse(path.read_bytes(), subject="approval.json", limit=4096)
    return approved.submission_digest == digest


def withdraw(site: Site) -> State:
    """Give up the present plan, so that the site can accept another; debits and draws stay in the ledger.

    Raises:
        BusyError: the worker is running.
        ApprovalError: there is no plan to give up, or its submission was sent.
    """
    with locked(site.private, "worker"):
        state = load_state(state_path(site.private))
        if state.state in IDLE | SENT:
            remedy = "There is nothing to withdraw from: see the state with `silo status`."
            if state.state in SENT:
                remedy = "It was sent: ask the aggregator's operator to run `aggregator withdraw` for this silo."
            expected = "a plan in work whose submission was not sent"
            raise ApprovalError("withdrawal", expected=expected, got=f"state {state.state}", remedy=remedy)
        if (site.outbox / (state.plan_id or "") / str(state.sequence)).exists():
            remedy = "The worker stopped between sending and recording it: run it again, it continues from there."
            raise ApprovalError("withdrawal", expected="an empty outbox", got="a submission in it", remedy=remedy)
        withdrawn = save_state(state_path(site.private), state.to("withdrawn"))
        if state.plan_id is not None:
            from silo.worker.jobs import end_jobs  # here, since it loads torch

            end_jobs(site, state.plan_id)
        return withdrawn
