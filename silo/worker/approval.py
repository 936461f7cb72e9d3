"""Approves the draft that waits, by its digest."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from ddm.errors import ApprovalError
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import MAX_DOCUMENT_BYTES, Digest, Document
from ddm.protocol.submission import Approval, Responsible, Submission
from silo.config import Site
from silo.decisions import DecisionLog, SubmissionApproved
from silo.plan.succession import find_successor
from silo.worker.state import load_state, state_path


class PersonApproval(Document):
    """What `silo approve` leaves for the worker."""

    submission_digest: Digest
    despite_fail: Responsible | None = None


def approval_path(site: Site) -> Path:
    """Where a person's approval waits for the worker."""
    return site.private / "approval.json"


def review_folder(site: Site) -> Path:
    """The folder with the bytes that would leave, for a person to inspect."""
    return site.private / "review"


def load_draft(site: Site) -> Submission:
    """Read the draft that waits for approval.

    Raises:
        FederationError: it is for another federation than the one whose root this site pinned.
    """
    draft = Submission.parse(
        read_bounded(review_folder(site) / "draft.json", MAX_DOCUMENT_BYTES), subject="draft.json"
    )
    # The root may have been replaced since the plan was accepted: nothing is shown, approved or signed for the one who
    # did.
    site.check_federation(draft, "draft.json")
    return draft


def approve(site: Site, digest: str, despite_fail: Responsible | None = None) -> None:
    """Record a person's approval of exactly the draft with this digest.

    Args:
        site: the silo's folder.
        digest: the digest of the draft.
        despite_fail: who lets it leave although its audit failed, and why; published with it.

    Raises:
        ApprovalError: no draft waits, or one with another digest, or its plan was superseded; or its audit failed and
            nobody takes responsibility for that.
        DecisionLogError: the site's log of decisions is damaged.
    """
    state = load_state(state_path(site.private))
    if state.state != "awaiting_approval" or state.submission_digest is None:
        remedy = "Nothing waits for approval: `silo status SITE` shows how far the work is."
        if state.state in ("in_outbox", "accepted"):
            remedy = "The submission was sent: nothing is left to approve."
        expected = "a submission in state awaiting_approval"
        raise ApprovalError(
            "approval", expected=expected, got=f"state {state.state}", remedy=remedy
        )
    newer_plan_id = find_successor(site, state.plan_id or "")
    if newer_plan_id is not None:
        raise ApprovalError(
            "approval",
            expected=f"a draft for the plan in force, {newer_plan_id}",
            got=f"one for plan {state.plan_id}, which it replaced",
            remedy=(
                "Keep `silo run SITE` running: it takes the new plan. The submission that waits "
                "here would not be fetched."
            ),
        )
    draft = load_draft(site)
    # Both must be the draft that the worker made: the digest that a person read, and the file that will be sent.
    digests = {"approval": digest, "review/draft.json": draft.digest}
    for subject, actual_digest in digests.items():
        if actual_digest != state.submission_digest:
            # The right digest is not shown: to paste it from here would approve what nobody has read.
            raise ApprovalError(
                subject,
                expected="the digest of the draft that waits",
                got=ascii(actual_digest[:80]),
                remedy=(
                    "Read the draft again, and approve with the digest shown there: `silo review "
                    f"{site.path}`."
                ),
            )
    _check_responsible(draft, despite_fail)
    # The log first: nothing is approved that no record names.
    DecisionLog(site).add(approval_record(draft, "person"))
    write_atomic(
        approval_path(site),
        PersonApproval(submission_digest=digest, despite_fail=despite_fail).encode(),
    )


def _check_responsible(draft: Submission, despite_fail: Responsible | None) -> None:
    """Check that a named role takes responsibility for a draft whose audit failed, and for no other."""
    failed = draft.audit.verdict == "fail"
    if failed and despite_fail is None:
        raise ApprovalError(
            "approval",
            expected="a role and a reason: the leak audit failed",
            got="no role and no reason",
            remedy=(
                "To send it all the same, name the role that takes responsibility: `silo approve SITE --digest "
                "DIGEST --despite-fail --role ROLE --reason TEXT`."
            ),
        )
    if not failed and despite_fail is not None:
        raise ApprovalError(
            "approval",
            expected="no --despite-fail: the audit did not fail",
            got=f"one of {despite_fail.role}",
            remedy=(
                "Approve without --despite-fail, --role and --reason: `silo approve SITE --digest "
                "DIGEST`."
            ),
        )


def approval_record(draft: Submission, by: Literal["person", "policy"]) -> SubmissionApproved:
    """Return an approval of a draft as the log of decisions keeps it."""
    return SubmissionApproved(
        plan_id=draft.plan_id, sequence=draft.sequence, submission_digest=draft.digest, approval=by
    )


def find_approval(
    site: Site, draft: Submission, *, by_policy: bool, now: datetime
) -> Approval | None:
    """Return the approval of a draft: a person's, or the policy's where it may; None while there is none.

    A policy never approves a draft whose audit failed.
    """
    path = approval_path(site)
    if path.exists():
        approval = PersonApproval.parse(path.read_bytes(), subject="approval.json", limit=4096)
        # An approval of an earlier draft approves nothing.
        if approval.submission_digest == draft.digest:
            return Approval(kind="person", at=now, despite_fail=approval.despite_fail)
    if by_policy and draft.audit.verdict != "fail":
        return Approval(kind="policy", at=now)
    return None
