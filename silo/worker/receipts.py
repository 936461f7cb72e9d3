"""Verifies the aggregator's receipts: the plan's receipt key must have signed them for this very submission."""

from contextlib import suppress
from pathlib import Path

from ddm.errors import FormatError, ReplayError, TrustError
from ddm.io.files import read_bounded
from ddm.protocol.base import sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import RECEIPT_KIND, Accepted, Receipt
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey

MAX_RECEIPT_BYTES = 65536


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
    payload, _ = open_sealed(sealed, RECEIPT_KIND, PublicKey.parse(plan.receipt_key), MAX_RECEIPT_BYTES)
    receipt = Receipt.parse(payload, subject="receipt")
    found = (receipt.plan_id, receipt.plan_digest, receipt.silo_id, receipt.sequence)
    if found != binding:
        expected = "plan {}, digest {}, silo {}, sequence {}".format(*binding)
        raise ReplayError("receipt", expected=expected, got="plan {}, digest {}, silo {}, sequence {}".format(*found))
    if isinstance(receipt.verdict, Accepted) and not (
        submission.is_file() and receipt.submission_digest == sha256_file(submission)
    ):
        expected = "the digest of the submission that was sent"
        raise ReplayError("receipt", expected=expected, got=receipt.submission_digest or "no digest")
    return receipt
