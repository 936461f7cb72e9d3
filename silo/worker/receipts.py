"""Reads what the aggregator says about a plan, and which event of the plan's life it is.

The plan's receipt key must have signed it for this very silo, plan and submission: the courier, which has the network,
writes the files that are read here.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddm.errors import (
    ArchipelagoError,
    FormatError,
    ReplayError,
    SubmissionRefusedError,
    TrustError,
)
from ddm.io.files import read_bounded
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import (
    MAX_RECEIPT_BYTES,
    AcceptedVerdict,
    HeldVerdict,
    Receipt,
    RefusedVerdict,
    WithdrawnVerdict,
)
from ddm.protocol.submission import submission_path
from ddm.trust.sealed_documents import ReceiptBinding, open_receipt
from silo.config import Policy, Site
from silo.plan.acceptance import AcceptedPlan, load_accepted
from silo.worker import stages
from silo.worker.life import AT_WORK, Event
from silo.worker.retraining import refused_remedy
from silo.worker.state import State

_log = logging.getLogger(__name__)
_CHANGES: Mapping[Event, Mapping[str, bool]] = {
    "hold": {"held": True},
    "notice": {"confirmed": True},
}


@dataclass(frozen=True)
class ReceiptNotice:
    """What a new receipt means for the site.

    Attributes:
        event: of the plan's life.
        changes: other fields of the state that change with it.
        problem: what a person must know about it, if anything.
    """

    event: Event
    changes: Mapping[str, bool]
    problem: SubmissionRefusedError | None


@dataclass(frozen=True)
class _Answer:
    """An event that a genuine receipt names, and the aggregator's reason for a refusal or a withdrawal."""

    event: Event
    reason: str = ""


@dataclass
class ReceiptReader:
    """Finds new receipts of a plan, in progress or answered.

    Attributes:
        site: the silo's folder.
        policy: its policy.
    """

    site: Site
    policy: Policy
    _plans_reported_damaged: set[str] = field(default_factory=set)

    def read(self, state: State) -> ReceiptNotice | None:
        """Return what a receipt says that the state does not know yet; None where there is none.

        Of a plan that is answered, only a notice that the silo was withdrawn counts. Where the site's copy of such a
        plan is damaged, that is logged once, and the site proceeds to the next plan: only work in progress needs it.

        Raises:
            ArchipelagoError: the copy of the plan in progress is damaged.
        """
        if not _may_be_answered(state):
            return None
        try:
            accepted = load_accepted(self.site, state.plan_id or "", state.plan_digest or "")
        except ArchipelagoError as error:
            # Without its plan the worker cannot continue in any case, and says so.
            if state.state in AT_WORK:
                raise
            self._report_damaged_plan(state, error)
            return None
        answer = _find_answer(self.site, state, accepted.plan)
        if answer is None:
            return None
        problem = self._problem_of(answer, state, accepted)
        if state.state == "withdrawn":
            # The site withdrew of its own accord, so that the notice only confirms it.
            problem = None
        return ReceiptNotice(answer.event, _CHANGES.get(answer.event, {}), problem)

    def _problem_of(
        self, answer: _Answer, state: State, accepted: AcceptedPlan
    ) -> SubmissionRefusedError | None:
        """Return the error for a refusal and for a notice that this silo was left out; None for any other answer."""
        if answer.event == "refusal":
            ledger = stages.open_ledger(self.site, self.policy)
            return SubmissionRefusedError(
                f"submission {state.sequence}",
                expected="an acceptance",
                got=f"a refusal: {answer.reason}",
                remedy=refused_remedy(state, accepted, ledger),
            )
        if answer.event == "notice":
            return SubmissionRefusedError(
                f"plan {state.plan_id}",
                expected="this silo to take part",
                got=f"a notice that the aggregator withdrew this silo: {answer.reason}",
                remedy=(
                    "Later releases leave this silo's experts out; earlier ones keep them. A later plan may "
                    "name it again: `silo run SITE` waits for one."
                ),
            )
        return None

    def _report_damaged_plan(self, state: State, error: ArchipelagoError) -> None:
        plan_id = state.plan_id or ""
        if plan_id in self._plans_reported_damaged:
            return
        self._plans_reported_damaged.add(plan_id)
        _log.warning(
            "this site's copy of the earlier plan %s is damaged (%s): notices about it are not heard, and no later "
            "plan can train on its experts, until private/plans/%s is restored from backup",
            plan_id,
            error,
            plan_id,
        )


def _may_be_answered(state: State) -> bool:
    """Whether the aggregator may still say something about this plan."""
    return state.plan_digest is not None and state.state in AT_WORK | {"accepted", "withdrawn"}


def _find_answer(site: Site, state: State, plan: Plan) -> _Answer | None:
    """Return what genuine receipts say that the state does not know yet; None if there is nothing.

    A notice that the silo was withdrawn takes the place of its next receipt.
    """
    if state.state == "in_outbox":
        receipt = _read_receipt(site, state, plan, f"{state.sequence}.json", state.sequence)
        if receipt is not None:
            match receipt.verdict:
                case AcceptedVerdict():
                    return _Answer("receipt")
                case RefusedVerdict(reason=reason, code=code):
                    return _Answer("refusal", f"{reason} (code {code})")
    if state.state == "withdrawn" and state.confirmed:
        return None
    # The aggregator numbers a notice as the next receipt, and may have sent one for a submission meanwhile.
    for sequence in (state.sequence, state.sequence + 1):
        notice = _read_receipt(site, state, plan, f"{sequence}.json", sequence)
        if notice is not None and isinstance(notice.verdict, WithdrawnVerdict):
            return _Answer("notice", notice.verdict.reason)
    if state.state == "in_outbox" and not state.held:
        held_name = f"{state.sequence}.held.json"
        receipt = _read_receipt(site, state, plan, held_name, state.sequence)
        if receipt is not None and isinstance(receipt.verdict, HeldVerdict):
            return _Answer("hold")
    return None


def _read_receipt(site: Site, state: State, plan: Plan, name: str, sequence: int) -> Receipt | None:
    silo_id = site.settings().silo_id
    path = site.inbox / plan.plan_id / "receipts" / name
    binding = ReceiptBinding(plan.plan_id, state.plan_digest or "", silo_id, sequence)
    submission = site.outbox / plan.plan_id / str(sequence) / submission_path(silo_id)
    return find_receipt(path, plan, binding, submission)


def find_receipt(
    path: Path, plan: Plan, binding: ReceiptBinding, submission: Path
) -> Receipt | None:
    """Return the receipt at `path`, None if there is no genuine one.

    A receipt that does not verify only proves that somebody can write to the inbox: it is moved aside, so that the
    genuine one can still arrive.

    Args:
        path: where the courier puts it.
        plan: names the key.
        binding: what the receipt must name.
        submission: the document that was sent.
    """
    if not path.exists():
        return None
    try:
        return _verify_receipt(path, plan, binding, submission)
    except (TrustError, FormatError):
        # Where worker and courier are two users, the worker cannot rename in the courier's folder.
        with suppress(OSError):
            path.rename(path.with_suffix(".refused"))
        return None


def _verify_receipt(path: Path, plan: Plan, binding: ReceiptBinding, submission: Path) -> Receipt:
    sealed = read_bounded(path, MAX_RECEIPT_BYTES, subject="receipt")
    receipt = open_receipt(sealed, plan.receipt_key, binding)
    if not isinstance(receipt.verdict, AcceptedVerdict):
        return receipt
    # An acceptance counts for the bytes that were sent, and for no others under the same number.
    if not submission.is_file() or receipt.submission_digest != sha256_file(submission):
        raise ReplayError(
            "receipt",
            expected="the digest of the submission that was sent",
            got=receipt.submission_digest or "no digest",
        )
    return receipt
