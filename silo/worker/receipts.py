"""Hears what the aggregator says of a submission: the plan's receipt key must have signed it for this very silo."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm.errors import FormatError, ReplayError, SubmissionRefusedError, TrustError
from ddm.io.files import read_bounded
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Accepted, Held, Receipt, Refused, Withdrawn
from ddm.protocol.submission import submission_path
from ddm.trust.sealed_documents import MAX_RECEIPT_BYTES, ReceiptBinding, open_receipt
from silo.config import Site
from silo.worker.life import AT_WORK, Event
from silo.worker.state import State


@dataclass(frozen=True)
class Heard:
    """What the aggregator said, as an event of the plan's life, with its own words for a refusal or a withdrawal."""

    event: Event
    words: str = ""


def listens(state: State) -> bool:
    """Whether the aggregator may still say something about this plan."""
    return state.plan_digest is not None and state.state in AT_WORK | {"accepted", "withdrawn"}


def heard(site: Site, state: State, plan: Plan) -> Heard | None:
    """Return what the aggregator said that the state does not know yet; None if there is nothing genuine.

    A notice that the silo was withdrawn stands in the place of its next receipt.
    """
    if state.state == "in_outbox" and (
        answer := _receipt(site, state, plan, f"{state.sequence}.json")
    ):
        match answer.verdict:
            case Accepted():
                return Heard("receipt")
            case Refused():
                return Heard("refusal", f"{answer.verdict.reason} (code {answer.verdict.code})")
    if state.state == "withdrawn" and state.confirmed:
        return None
    for sequence in (state.sequence, state.sequence + 1):
        notice = _receipt(site, state, plan, f"{sequence}.json", sequence)
        if notice and isinstance(notice.verdict, Withdrawn):
            return Heard("notice", notice.verdict.reason)
    if state.state == "in_outbox" and not state.held:
        word = _receipt(site, state, plan, f"{state.sequence}.held.json")
        if word and isinstance(word.verdict, Held):
            return Heard("hold")
    return None


def _receipt(
    site: Site, state: State, plan: Plan, name: str, sequence: int | None = None
) -> Receipt | None:
    silo_id, number = site.settings().silo_id, sequence or state.sequence
    binding = ReceiptBinding(plan.plan_id, state.plan_digest or "", silo_id, number)
    submission = site.outbox / plan.plan_id / str(number) / submission_path(silo_id)
    return find_receipt(site.inbox / plan.plan_id / "receipts" / name, plan, binding, submission)


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
        return _verify(path, plan, binding, submission)
    except (TrustError, FormatError):
        with suppress(OSError):
            path.rename(path.with_suffix(".refused"))
        return None


def _verify(path: Path, plan: Plan, binding: ReceiptBinding, submission: Path) -> Receipt:
    sealed = read_bounded(path, MAX_RECEIPT_BYTES, subject="receipt")
    receipt = open_receipt(sealed, plan.receipt_key, binding)
    if isinstance(receipt.verdict, Accepted) and not (
        submission.is_file() and receipt.submission_digest == sha256_file(submission)
    ):
        expected = "the digest of the submission that was sent"
        raise ReplayError(
            "receipt", expected=expected, got=receipt.submission_digest or "no digest"
        )
    return receipt


def problem_of(said: Heard, state: State, refused_remedy: str) -> SubmissionRefusedError | None:
    """Return the error for a refusal and for a notice that this silo was left out; None for any other word.

    Args:
        said: the aggregator's word.
        state: in which it was heard.
        refused_remedy: what may be tried after a refusal.
    """
    if said.event == "refusal":
        return SubmissionRefusedError(
            f"submission {state.sequence}",
            expected="an acceptance",
            got=f"a refusal: {said.words}",
            remedy=refused_remedy,
        )
    if said.event == "notice":
        return SubmissionRefusedError(
            f"plan {state.plan_id}",
            expected="this silo to take part",
            got=f"a notice that the aggregator withdrew this silo: {said.words}",
            remedy="Later releases leave this silo's experts out; earlier ones keep them. Keep `silo run` running: "
            "a new plan may name it.",
        )
    return None
