"""Takes a receipt into the inbox, once the plan's receipt key has signed it for this silo and submission.

A notice that a person at the aggregator will decide about a submission is signed in the same way, and stored beside the
receipt to come. The courier verifies although the worker does too: otherwise anybody who controls the connection could
fill the inbox, or put a false receipt in the place of the genuine one.
"""

from pathlib import Path

from ddm.errors import FormatError, MissingFileError, ReplayError, TrustError
from ddm.io.files import read_bounded, write_for_group
from ddm.io.locks import locked
from ddm.io.modes import group_folder
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.receipt import MAX_RECEIPT_BYTES
from ddm.transport.messages import ReceiptDelivery, ReceiptStored
from ddm.transport.sequences import sequence_numbers
from ddm.trust.sealed_documents import ReceiptBinding, open_receipt
from silo.config import Site


def take_receipt(delivery: ReceiptDelivery, receipt: bytes, site: Site) -> ReceiptStored:
    """Store a receipt for a submission that this site made, or a notice after the last; the first genuine one counts.

    Raises:
        ReplayError: no such submission was sent, or another receipt for it is here.
        TrustError: the plan's receipt key has not signed it.
        FormatError: it is not a receipt.
    """
    newest = max(sequence_numbers(site.outbox / delivery.plan_id), default=0)
    # One more than was sent: a notice that the silo was withdrawn takes the number of its next receipt.
    is_known_plan = (site.inbox / delivery.plan_id).is_dir()
    if not is_known_plan or not 1 <= delivery.sequence <= newest + 1:
        raise ReplayError(
            "receipt",
            expected=f"one for submission 1 to {newest + 1} of a known plan",
            got=f"one for {delivery.sequence}",
        )
    with locked(site.courier, "inbox"):
        _check_receipt(delivery, receipt, site)
        path = _receipt_path(delivery, site)
        if not _has_genuine_receipt(delivery, site):
            group_folder(path.parent, site.inbox)
            write_for_group(path, receipt)
        # The first genuine answer counts: anybody who stole the receipt key later cannot change what was answered.
        elif read_bounded(path, MAX_RECEIPT_BYTES) != receipt:
            raise ReplayError("receipt", expected="the one received before", got="other bytes")
    return ReceiptStored()


def _has_genuine_receipt(delivery: ReceiptDelivery, site: Site) -> bool:
    """Whether a receipt is here already that the worker would take."""
    path = _receipt_path(delivery, site)
    try:
        _check_receipt(delivery, read_bounded(path, MAX_RECEIPT_BYTES), site)
    except (MissingFileError, TrustError, FormatError):
        return False
    return True


def _receipt_path(delivery: ReceiptDelivery, site: Site) -> Path:
    name = f"{delivery.sequence}.json"
    if delivery.held:
        name = f"{delivery.sequence}.held.json"
    return site.inbox / delivery.plan_id / "receipts" / name


def _check_receipt(delivery: ReceiptDelivery, receipt: bytes, site: Site) -> None:
    # Imported here: it takes half a second, and this message is rare.
    from ddm.protocol.plan import Plan

    targets = site.inbox / delivery.plan_id / "bundle" / "targets"
    path = targets / delivery.plan_id / "plan.json"
    # Every bundle here has verified, so that the key in this document is the one that the plan's signers named.
    data = read_bounded(path, MAX_DOCUMENT_BYTES)
    binding = ReceiptBinding(
        delivery.plan_id, sha256_hex(data), site.settings().silo_id, delivery.sequence
    )
    plan = Plan.parse(data, subject="plan.json")
    verdict = open_receipt(receipt, plan.receipt_key, binding).verdict
    # The mark travels beside the receipt and is not signed: the file's name must not say more than the content.
    is_held = verdict.kind == "held"
    if is_held != delivery.held:
        expected = "an answer"
        if delivery.held:
            expected = "the notice that it waits for a person"
        raise ReplayError("receipt", expected=expected, got=f"the verdict {verdict.kind}")
