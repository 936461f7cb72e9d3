"""Opens the aggregator's receipts: the plan's receipt key must have signed them, for this silo and this submission."""

from ddm.errors import ReplayError
from ddm.protocol.receipt import RECEIPT_KIND, Receipt
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey

MAX_RECEIPT_BYTES = 65536


def open_receipt(sealed: bytes, key: str, binding: tuple[str, str, str, int]) -> Receipt:
    """Return a receipt after checking its signature and what it answers.

    Args:
        sealed: the bytes as received.
        key: the receipt key that the plan names.
        binding: the plan id, plan digest, silo id and sequence that the receipt must name.

    Raises:
        SignatureError: another key has signed it.
        DocumentError: it is too large, malformed, or no receipt.
        ReplayError: it answers another plan, silo or submission.
    """
    payload, _ = open_sealed(sealed, RECEIPT_KIND, PublicKey.parse(key), MAX_RECEIPT_BYTES)
    receipt = Receipt.parse(payload, subject="receipt")
    found = (receipt.plan_id, receipt.plan_digest, receipt.silo_id, receipt.sequence)
    if found != binding:
        expected = "plan {}, digest {}, silo {}, sequence {}".format(*binding)
        raise ReplayError(
            "receipt",
            expected=expected,
            got="plan {}, digest {}, silo {}, sequence {}".format(*found),
        )
    return receipt
