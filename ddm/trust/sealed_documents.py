"""The sealed documents of one plan between silo and aggregator: receipts, and a silo's notice that it left the plan.

A valid seal shows who wrote a document, not that it is for this plan. Anybody who opens one therefore names the plan,
the silo and, for a receipt, the submission that it must be about. Otherwise an old document with a valid seal could be
sent again in place of a new one (a replay).
"""

from dataclasses import dataclass

from ddm.errors import ReplayError
from ddm.protocol.leave import LEAVE_KIND, MAX_LEAVE_BYTES, Leave
from ddm.protocol.receipt import MAX_RECEIPT_BYTES, RECEIPT_KIND, Receipt
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import PublicKey, SigningKey


@dataclass(frozen=True)
class ReceiptBinding:
    """The submission that a receipt must answer.

    Attributes:
        plan_id: its plan.
        plan_digest: sha256 of that plan, so that a receipt for another plan under the same id is noticed.
        silo_id: the silo that sent it.
        sequence: its number among the silo's submissions for the plan.
    """

    plan_id: str
    plan_digest: str
    silo_id: str
    sequence: int

    def __str__(self) -> str:
        return (
            f"plan {self.plan_id}, digest {self.plan_digest}, "
            f"silo {self.silo_id}, sequence {self.sequence}"
        )


def open_receipt(sealed: bytes, key: str, binding: ReceiptBinding) -> Receipt:
    """Return a receipt after checking its signature and what it answers.

    Args:
        sealed: the bytes as received.
        key: the receipt key that the plan names.
        binding: what the receipt must name.

    Raises:
        SignatureError: another key has signed it.
        DocumentError: it is too large, malformed, or no receipt.
        ReplayError: it answers another plan, silo or submission.
    """
    # The plan names the key, so that a stolen receipts key is of no use for the plans after its rotation.
    payload, _ = open_sealed(sealed, RECEIPT_KIND, PublicKey.parse(key), MAX_RECEIPT_BYTES)
    receipt = Receipt.parse(payload, subject="receipt")
    actual = ReceiptBinding(receipt.plan_id, receipt.plan_digest, receipt.silo_id, receipt.sequence)
    # The attack: the aggregator's receipt for an earlier submission, or for another silo, is sent again.
    if actual != binding:
        raise ReplayError("receipt", expected=str(binding), got=str(actual))
    return receipt


def seal_leave_notice(notice: Leave, key: SigningKey) -> bytes:
    """Sign with the silo's key that the silo left the plan."""
    return seal(notice.encode(), LEAVE_KIND, key)


def open_leave_notice(
    sealed: bytes,
    key: PublicKey,
    *,
    root_digest: str,
    plan_id: str,
    silo_id: str,
) -> Leave:
    """Return a silo's notice that it left a plan, after checking its signature and what it names.

    Args:
        sealed: the bytes as received.
        key: the silo's signing key.
        root_digest: sha256 of the first root of the federation that it must name.
        plan_id: the plan that it must name.
        silo_id: the silo that it must name.

    Raises:
        SignatureError: another key has signed it.
        DocumentError: it is too large, malformed, or of another kind.
        FederationError: it names another federation.
        ReplayError: it names another plan or silo.
    """
    # The silo's own key: neither its courier nor the aggregator can say in its name that it left.
    payload, _ = open_sealed(sealed, LEAVE_KIND, key, MAX_LEAVE_BYTES)
    notice = Leave.parse(payload, subject="leave")
    # Another federation may have a plan of this very id, chosen by the one who would take the silo out of this one.
    notice.check_federation(root_digest, "leave")
    if (notice.plan_id, notice.silo_id) != (plan_id, silo_id):
        raise ReplayError(
            "leave",
            expected=f"plan {plan_id}, silo {silo_id}",
            got=f"plan {notice.plan_id}, silo {notice.silo_id}",
        )
    return notice
