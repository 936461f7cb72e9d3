"""What the aggregator answered: believed only when the plan's receipt key signed it for this very submission."""

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


def find_receipt(path: Path, plan: Plan, bound: tuple[str, str, str, int], submission: Path) -> Receipt | None:
    """Return the answer at `path`, if a genuine one is there.

    One that does not verify proves nothing but that somebody can write to the inbox: it is moved aside, so that the
    genuine one can still arrive.

    Args:
        path: where the courier puts it.
        plan: names the key.
        bound: plan id, plan digest, silo id and sequence that it must be for.
        submission: the document that was sent.
    """
    if not path.exists():
        return None
    try:
        return _verify(path, plan, bound, submission)
    except (TrustError, FormatError):
        with suppress(OSError):
            path.rename(path.with_suffix(".refused"))
        return None


def _verify(path: Path, plan: Plan, bound: tuple[str, str, str, int], submission: Path) -> Receipt:
    sealed = read_bounded(path, MAX_RECEIPT_BYTES, subject="receipt")
    payload, _ = open_sealed(sealed, RECEIPT_KIND, PublicKey.parse(plan.receipt_key), MAX_RECEIPT_BYTES)
    receipt = Receipt.parse(payload, subject="receipt")
    if (receipt.plan_id, receipt.plan_digest, receipt.silo_id, receipt.sequence) != bound:
        raise ReplayError("receipt", expected="one for this plan, silo and sequence", got="another")
    if isinstance(receipt.verdict, Accepted) and not (
        submission.is_file() and receipt.submission_digest == sha256_file(submission)
    ):
        raise ReplayError("receipt", expected="one for the submission that was sent", got="another")
    return receipt
