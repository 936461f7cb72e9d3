"""Approves the draft that waits, by its digest."""

from pathlib import Path

from ddm.errors import ApprovalError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document
from ddm.protocol.submission import Submission
from silo.config import Site
from silo.plan.succession import successor
from silo.worker.state import load_state, state_path


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
        ApprovalError: no draft waits, or one with another digest, or its plan was superseded.
    """
    state = load_state(state_path(site.private))
    if state.state != "awaiting_approval" or state.submission_digest is None:
        raise ApprovalError("approval", expected="a submission in state awaiting_approval", got=f"state {state.state}")
    if newer := successor(site, state.plan_id or ""):
        remedy = "Keep `silo run` running: it takes the new plan. What waits here would reach nobody."
        expected, got = f"a draft for the plan in force, {newer}", f"one for plan {state.plan_id}, which it replaced"
        raise ApprovalError("approval", expected=expected, got=got, remedy=remedy)
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
