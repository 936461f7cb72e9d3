"""Takes a receipt into the inbox, once the plan's receipt key has signed it for this silo and submission.

Word that a submission waits for a person at the aggregator is signed alike, and kept beside the receipt to come.
"""

from pathlib import Path

from ddm.errors import FormatError, MissingFileError, ReplayError, TrustError
from ddm.io.files import read_bounded, write_for_group
from ddm.io.locks import locked
from ddm.io.modes import group_folder
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.transport.messages import Deliver, Delivered
from ddm.transport.sequences import sequences
from ddm.trust.sealed_documents import MAX_RECEIPT_BYTES, ReceiptBinding, open_receipt
from silo.config import Site


def take_receipt(deliver: Deliver, receipt: bytes, site: Site) -> Delivered:
    """Store a receipt for a submission that this site made, or a notice after the last; the first genuine one counts.

    Raises:
        ReplayError: no such submission was sent, or another receipt for it is here.
        TrustError: the plan's receipt key has not signed it.
        FormatError: it is no receipt.
    """
    newest = max(sequences(site.outbox / deliver.plan_id), default=0)
    # One more than was sent: a notice that the silo was withdrawn stands in the place of its next receipt.
    if not (site.inbox / deliver.plan_id).is_dir() or not 1 <= deliver.sequence <= newest + 1:
        expected, got = (
            f"one for submission 1 to {newest + 1} of a known plan",
            f"one for {deliver.sequence}",
        )
        raise ReplayError("receipt", expected=expected, got=got)
    with locked(site.courier, "inbox"):
        _check(deliver, receipt, site)
        folder = site.inbox / deliver.plan_id / "receipts"
        path = _path(deliver, site)
        if not _is_genuine(deliver, site):
            group_folder(folder, site.inbox)
            write_for_group(path, receipt)
        elif read_bounded(path, MAX_RECEIPT_BYTES) != receipt:
            raise ReplayError("receipt", expected="the one received before", got="other bytes")
    return Delivered()


def _is_genuine(deliver: Deliver, site: Site) -> bool:
    """Whether a receipt is here already that the worker would take."""
    path = _path(deliver, site)
    try:
        _check(deliver, read_bounded(path, MAX_RECEIPT_BYTES), site)
    except (MissingFileError, TrustError, FormatError):
        return False
    return True


def _path(deliver: Deliver, site: Site) -> Path:
    name = f"{deliver.sequence}.held.json" if deliver.held else f"{deliver.sequence}.json"
    return site.inbox / deliver.plan_id / "receipts" / name


def _check(deliver: Deliver, receipt: bytes, site: Site) -> None:
    from ddm.protocol.plan import Plan  # half a second, for a message that is rare

    path = site.inbox / deliver.plan_id / "bundle" / "targets" / deliver.plan_id / "plan.json"
    data = read_bounded(path, MAX_DOCUMENT_BYTES)
    binding = ReceiptBinding(
        deliver.plan_id, sha256_hex(data), site.settings().silo_id, deliver.sequence
    )
    opened = open_receipt(receipt, Plan.parse(data, subject="plan.json").receipt_key, binding)
    if (opened.verdict.kind == "held") != deliver.held:
        expected = "word that it waits for a person" if deliver.held else "an answer"
        raise ReplayError("receipt", expected=expected, got=f"the verdict {opened.verdict.kind}")
