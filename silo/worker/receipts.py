"""Verifies the aggregator's receipts: the plan's receipt key must have signed them for this very submission."""

from contextlib import suppress
from pathlib import Path

from ddm.errors import FormatError, ReplayError, TrustError
from ddm.io.files import read_bounded
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Accepted, Receipt
from ddm.trust.receipt import MAX_RECEIPT_BYTES, open_receipt


def find_receipt(path: Path, plan: Plan, binding: tuple[str, str, str, int], submission: Path) -> Receipt | None:
    """Return the receipt at `path`, None if there is no genuine one.

    A receipt that does not verify only proves that somebody can write to the inbox: it is moved aside, so that the
    genuine one can still arrive.

    Args:
        path: where the courier puts it.
        plan: names the key.
        binding: the plan id, plan digest, silo id and sequence that the receipt must name.
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


def _verify(path: Path, plan: Plan, binding: tuple[str, str, str, int], submission: Path) -> Receipt:
    sealed = read_bounded(path, MAX_RECEIPT_BYTES, subject="receipt")
    receipt = open_receipt(sealed, plan.receipt_key, binding)
    if isinstance(receipt.verdict, Accepted) and not (
        submission.is_file() and receipt.submission_digest == sha256_file(submission)
    ):
        expected = "the digest of the submission that was sent"
        raise ReplayError("receipt", expected=expected, got=receipt.submission_digest or "no digest")
    return receipt
