"""Withdraws a silo from the present plan: moves its submission aside, refuses further ones, notifies it by receipt.

`withdrawal.json` is written first, and from then on the silo counts as withdrawn. The rest is done by the process that
holds the lock of intake: `aggregator run` if it is running, otherwise the command itself. Either of them finishes what
a crash interrupted. The next release is made without the silo; older ones stay.
"""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from aggregator.config import Federation
from aggregator.membership.registry import member_cards, read_removals
from ddm.errors import BusyError, PolicyError, SetupError
from ddm.io.files import move_into_place, read_bounded, write_atomic
from ddm.io.locks import locked
from ddm.protocol.base import (
    MAX_DOCUMENT_BYTES,
    Digest,
    Document,
    PlanId,
    ShortText,
    SiloId,
    Time,
    now_utc,
    require_text,
    sha256_hex,
)
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import RECEIPT_KIND, Receipt, WithdrawnVerdict
from ddm.protocol.submission import submission_path
from ddm.publishing.log import append_entries
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import SigningKey
from ddm.trust.log.entries import SiloWithdrawn

MAX_RECORD_BYTES = 65536
_RECORD_NAME = "withdrawal.json"
LEFT_BY_ITSELF = "given up by the silo itself"


class Withdrawal(Document):
    """Why and when a silo was withdrawn, and the submission it had sent; stays with the aggregator.

    `carried_from` is the earlier plan that it had sent it for, where the plan carries its experts over.
    """

    format: Literal["archipelago/withdrawal/1"] = "archipelago/withdrawal/1"
    plan_id: PlanId
    silo_id: SiloId
    submission_digest: Digest | None
    reason: ShortText
    at: Time
    carried_from: PlanId | None = None


def withdraw_silo(
    federation: Federation, silo_id: str, reason: str, receipt_key: SigningKey
) -> Withdrawal:
    """Withdraw a silo from the present plan for good; a second call finishes the first one and keeps its reason.

    Args:
        federation: the operator's folder.
        silo_id: a silo of the present plan, whether it has answered or not.
        reason: sent to the silo, not published.
        receipt_key: signs the notice; the plan names it.

    Raises:
        SetupError: the plan has no such silo, or the reason is empty or too long.
        BusyError: another process signs or publishes.
    """
    reason = require_text(reason, "--reason")
    with federation.signing_lock():
        plan, plan_digest = federation.current_plan()
        # Also a silo that the plan only carries over: its earlier experts would be in the next release.
        if silo_id not in plan.members:
            raise SetupError(
                "silo",
                expected=f"a silo of plan {plan.plan_id}: {', '.join(plan.members)}",
                got=ascii(silo_id[:40]),
            )
        record = _record_withdrawal(federation, plan, silo_id, reason)
        federation.accepted.mkdir(parents=True, exist_ok=True)
        # If `aggregator run` holds the lock, it finds the record and does the rest.
        with suppress(BusyError), locked(federation.accepted, "intake"):
            finish_withdrawal(federation, plan.plan_id, plan_digest, silo_id, receipt_key)
        return record


def finish_withdrawal(
    federation: Federation, plan_id: str, plan_digest: str, silo_id: str, key: SigningKey
) -> None:
    """Carry out a recorded withdrawal, or what is left of it; the caller holds the lock of intake."""
    record = read_withdrawal(federation, plan_id, silo_id)
    _notify_silo(federation, record, plan_digest, key)
    # Carried experts lie with the plan for which they were sent.
    accepted = federation.accepted / (record.carried_from or plan_id) / silo_id
    withdrawn = _folder(federation, plan_id, silo_id) / "submission"
    # Kept, not deleted: releases published before still name it.
    if accepted.exists() and not withdrawn.exists():
        move_into_place(accepted, withdrawn)


def withdrawn_silos(federation: Federation, plan: Plan) -> tuple[str, ...]:
    """List the silos that were withdrawn from a plan, sorted."""
    # One look at the folder, which is mostly empty, in place of one for each silo.
    folder = federation.withdrawn / plan.plan_id
    on_record = {path.parent.name for path in folder.glob(f"*/{_RECORD_NAME}") if path.is_file()}
    return tuple(silo_id for silo_id in plan.members if silo_id in on_record)


def remaining_silos(federation: Federation, plan: Plan) -> frozenset[str]:
    """Return the silos of a plan, carried ones included, that were neither withdrawn nor removed."""
    members = member_cards(federation, plan).keys()
    return frozenset(members - set(withdrawn_silos(federation, plan)))


def has_left(federation: Federation, plan: Plan, silo_id: str) -> bool:
    """Whether a silo took back what it had sent for a plan, or was removed since the plan was made.

    It may have withdrawn from the plan itself, or from a later one that carried its experts over.
    """
    for path in federation.withdrawn.glob(f"*/{silo_id}/{_RECORD_NAME}"):
        record = Withdrawal.parse(read_bounded(path, MAX_RECORD_BYTES), subject=path.name)
        if plan.plan_id in (record.plan_id, record.carried_from):
            return True
    return any(
        removal.silo_id == silo_id and removal.at > plan.created_at
        for removal in read_removals(federation)
    )


def check_still_carried(federation: Federation, plan: Plan) -> None:
    """Refuse a plan that carries over a silo that was withdrawn or removed since the plan was drafted.

    Raises:
        PolicyError: names the silo.
    """
    if not plan.carried:
        return
    current_plan, _ = federation.current_plan()
    withdrawn = withdrawn_silos(federation, current_plan)
    for carried in plan.carried:
        silo_id = carried.silo_id
        document = federation.accepted / carried.plan_id / silo_id / submission_path(silo_id)
        got = None
        if silo_id in withdrawn:
            got = "a silo that was withdrawn"
        elif not document.is_file() or _digest_of(document) != carried.submission_digest:
            got = "no such submission"
        if got is not None:
            raise PolicyError(
                f"plan {plan.plan_id}, {silo_id} carried over",
                expected=f"its accepted submission to plan {carried.plan_id}",
                got=got,
                remedy=(
                    "Draft the plan again: `aggregator plan FED --recipe FILE --public FILE`. One that waits "
                    "for holders is discarded first: `aggregator complete FED --abandon`."
                ),
            )


def read_withdrawal(federation: Federation, plan_id: str, silo_id: str) -> Withdrawal:
    """Read the record of a withdrawal.

    Raises:
        MissingFileError: the silo was not withdrawn.
    """
    path = _record_path(federation, plan_id, silo_id)
    return Withdrawal.parse(read_bounded(path, MAX_RECORD_BYTES), subject=path.name)


def _folder(federation: Federation, plan_id: str, silo_id: str) -> Path:
    return federation.withdrawn / plan_id / silo_id


def _record_path(federation: Federation, plan_id: str, silo_id: str) -> Path:
    return _folder(federation, plan_id, silo_id) / _RECORD_NAME


def _digest_of(document: Path) -> str:
    return sha256_hex(read_bounded(document, MAX_DOCUMENT_BYTES))


def _record_withdrawal(federation: Federation, plan: Plan, silo_id: str, reason: str) -> Withdrawal:
    path = _record_path(federation, plan.plan_id, silo_id)
    # The first reason stays: the silo may have been notified of it already.
    if path.is_file():
        return read_withdrawal(federation, plan.plan_id, silo_id)
    document = federation.accepted_folder(plan, silo_id) / submission_path(silo_id)
    digest = None
    if document.is_file():
        digest = _digest_of(document)
    origin = plan.origin(silo_id)
    record = Withdrawal(
        plan_id=plan.plan_id,
        silo_id=silo_id,
        submission_digest=digest,
        reason=reason,
        at=now_utc(),
        carried_from=None if origin == plan.plan_id else origin,
    )
    # The log first: a withdrawal that counts is always in the log, whenever this process ends.
    entry = SiloWithdrawn(plan_id=plan.plan_id, silo_id=silo_id, submission_digest=digest)
    append_entries(federation, entry)
    write_atomic(path, record.encode())
    return record


def _notify_silo(
    federation: Federation, record: Withdrawal, plan_digest: str, key: SigningKey
) -> None:
    """Mark the silo as final, then write the notice to it under the number of its next receipt."""
    folder = federation.receipts / record.plan_id / record.silo_id
    # Before the notice, so that no further submission is taken in after it.
    write_atomic(folder / "final", b"")
    answered = [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdigit()]
    for sequence in answered:
        receipt = _read_receipt(folder / f"{sequence}.json", key)
        # Written before a crash.
        if isinstance(receipt.verdict, WithdrawnVerdict):
            return
    # A silo refuses a receipt whose number is beyond the one after its last submission (`silo.courier.receipts`).
    last = max(answered, default=0)
    notice = Receipt(
        plan_id=record.plan_id,
        plan_digest=plan_digest,
        silo_id=record.silo_id,
        sequence=last + 1,
        submission_digest=record.submission_digest,
        verdict=WithdrawnVerdict(reason=record.reason),
        at=record.at,
    )
    write_atomic(folder / f"{last + 1}.json", seal(notice.encode(), RECEIPT_KIND, key))


def _read_receipt(path: Path, key: SigningKey) -> Receipt:
    sealed = read_bounded(path, MAX_RECORD_BYTES)
    payload, _ = open_sealed(sealed, RECEIPT_KIND, key.public, MAX_RECORD_BYTES)
    return Receipt.parse(payload, subject="receipt")
