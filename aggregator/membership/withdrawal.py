"""Withdraws a silo from the present plan: moves its submission aside, refuses further ones, notifies it by receipt.

`withdrawal.json` is written first, and from then on the silo counts as withdrawn. The rest is done by the process that
holds the lock of intake: `aggregator run` if it is running, otherwise the command itself. Either of them finishes what
a crash interrupted. The next release is made without the silo; older ones stay.
"""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from aggregator.config import Federation
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
    if not reason.strip() or len(reason) > 400:
        raise SetupError(
            "--reason", expected="1 to 400 characters", got=f"{len(reason.strip())} characters"
        )
    with federation.signing_lock():
        plan, plan_digest = federation.current_plan()
        if silo_id not in plan.members:
            expected = f"a silo of plan {plan.plan_id}: {', '.join(plan.members)}"
            raise SetupError("silo", expected=expected, got=ascii(silo_id[:40]))
        record = _record(federation, plan, silo_id, reason)
        federation.accepted.mkdir(parents=True, exist_ok=True)
        with suppress(BusyError), locked(federation.accepted, "intake"):
            finish_withdrawal(federation, plan.plan_id, plan_digest, silo_id, receipt_key)
        return record


def finish_withdrawal(
    federation: Federation, plan_id: str, plan_digest: str, silo_id: str, key: SigningKey
) -> None:
    """Carry out a recorded withdrawal, or what is left of it; the caller holds the lock of intake."""
    record = read_withdrawal(federation, plan_id, silo_id)
    _notify(federation, record, plan_digest, key)
    accepted = federation.accepted / (record.carried_from or plan_id) / silo_id
    kept = _folder(federation, plan_id, silo_id) / "submission"
    if accepted.exists() and not kept.exists():
        move_into_place(accepted, kept)


def withdrawn_silos(federation: Federation, plan: Plan) -> tuple[str, ...]:
    """List the silos that were withdrawn from a plan, sorted."""
    return tuple(
        silo for silo in plan.members if _record_path(federation, plan.plan_id, silo).is_file()
    )


def check_still_carried(federation: Federation, plan: Plan) -> None:
    """Refuse a plan that carries over a silo that was withdrawn or removed since the plan was drafted.

    Raises:
        PolicyError: names the silo.
    """
    if not plan.carried:
        return
    present, _ = federation.current_plan()
    gone = withdrawn_silos(federation, present)
    for each in plan.carried:
        document = federation.accepted / each.plan_id / each.silo_id / submission_path(each.silo_id)
        kept = each.silo_id not in gone and document.is_file()
        if (
            not kept
            or sha256_hex(read_bounded(document, MAX_DOCUMENT_BYTES)) != each.submission_digest
        ):
            raise PolicyError(
                f"plan {plan.plan_id}, {each.silo_id} carried over",
                expected=f"its accepted submission to plan {each.plan_id}",
                got="a silo that was withdrawn" if each.silo_id in gone else "no such submission",
                remedy="Draft the plan again: aggregator plan. One that waits for holders is discarded first: "
                "aggregator complete --abandon.",
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
    return _folder(federation, plan_id, silo_id) / "withdrawal.json"


def _record(federation: Federation, plan: Plan, silo_id: str, reason: str) -> Withdrawal:
    path = _record_path(federation, plan.plan_id, silo_id)
    if path.is_file():
        return read_withdrawal(federation, plan.plan_id, silo_id)
    document = federation.accepted_folder(plan, silo_id) / submission_path(silo_id)
    digest = sha256_hex(read_bounded(document, MAX_DOCUMENT_BYTES)) if document.is_file() else None
    origin = plan.origin(silo_id)
    record = Withdrawal(
        plan_id=plan.plan_id,
        silo_id=silo_id,
        submission_digest=digest,
        reason=reason,
        at=now_utc(),
        carried_from=None if origin == plan.plan_id else origin,
    )
    append_entries(
        federation, SiloWithdrawn(plan_id=plan.plan_id, silo_id=silo_id, submission_digest=digest)
    )
    write_atomic(path, record.encode())
    return record


def _notify(federation: Federation, record: Withdrawal, plan_digest: str, key: SigningKey) -> None:
    """Mark the silo as final, then write the notice to it in the place of its next receipt."""
    folder = federation.receipts / record.plan_id / record.silo_id
    write_atomic(folder / "final", b"")
    answered = [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdigit()]
    if any(
        isinstance(_answer(folder / f"{n}.json", key).verdict, WithdrawnVerdict) for n in answered
    ):
        return
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


def _answer(path: Path, key: SigningKey) -> Receipt:
    sealed = read_bounded(path, MAX_RECORD_BYTES)
    return Receipt.parse(
        open_sealed(sealed, RECEIPT_KIND, key.public, MAX_RECORD_BYTES)[0], subject="receipt"
    )
