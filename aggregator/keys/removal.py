"""Removes a silo from the federation: intake refuses it, later plans leave it out, its key loses its delegation.

There are two steps, so that the first never waits for signatures. The card is removed at once, which ends intake and
keeps the silo out of later plans. Then the holders of `targets` sign metadata without the delegation to its key.
"""

from dataclasses import dataclass

from aggregator.config import Federation
from aggregator.keys.ceremony import conduct_ceremony
from aggregator.keys.silo_rotation import forget_rotations
from aggregator.membership.registry import (
    RemovalRecord,
    card_of,
    read_card,
    read_cards,
    read_removals,
    rotations_of,
    signing_key,
)
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.base import now_utc, require_text, sha256_hex
from ddm.protocol.enrolment import MAX_CARD_BYTES
from ddm.publishing.log import append_entries
from ddm.trust.ceremony import SigningRequest
from ddm.trust.log.entries import SiloRemoved
from ddm.trust.repository import Repository


@dataclass(frozen=True)
class RemovalOutcome:
    """The outcome of a removal.

    Attributes:
        plan_id: the present plan, if the silo took part in it.
        missing: the missing signatures, in words.
    """

    plan_id: str | None
    missing: list[str]


def remove_silo(
    federation: Federation, silo_id: str, reason: str, passphrase: bytes
) -> RemovalOutcome:
    """Remove a silo; a second call finishes an interrupted removal.

    Args:
        federation: the operator's folder.
        silo_id: an enrolled silo, or one whose removal is not finished.
        reason: kept with its card, not published.
        passphrase: opens the federation's keys.

    Raises:
        SetupError: no reason, or one that is too long.
        MissingFileError: no such silo is enrolled.
        BusyError: another process signs; or another change waits for signatures, in which case the card is removed.
    """
    reason = require_text(reason, "--reason")
    with federation.signing_lock():
        repository = Repository(federation.tuf)
        delegates = repository.delegates()
        card = read_cards(federation).get(silo_id)
        delegated_key = delegates.silos.get(silo_id)
        if card is not None and delegated_key in (None, signing_key(card)):
            _remove_card(federation, silo_id, reason)
        elif delegated_key is None:
            # Raises an error that names the enrolled silos.
            card_of(federation, silo_id)
        # Otherwise the card was removed by a call that was interrupted, and the silo may have been enrolled again with
        # another key since: the removal of the old delegation is finished, and the new card stays.
        if delegated_key is None:
            return RemovalOutcome(None, [])
        change = Change.begin(federation.path)
        purpose = f"remove the silo {silo_id} from plan {delegates.plan_id}"
        targets = repository.next_targets(delegates.without(silo_id), now_utc())
        request = SigningRequest.to_sign(targets, purpose, repository.targets(), repository.root())
        missing = conduct_ceremony(
            federation, change, [request], passphrase, act="renew", purpose=purpose
        )
        return RemovalOutcome(delegates.plan_id, missing)


def _remove_card(federation: Federation, silo_id: str, reason: str) -> None:
    """Move the card: first write the record, which lets it in no more, and last delete the card.

    After a crash the removal has not begun, or can only be finished: the log never states the removal of a silo that is
    still enrolled.
    """
    path = federation.registry / f"{silo_id}.json"
    card = read_bounded(path, MAX_CARD_BYTES)
    # A call that was interrupted may have written the record already; a silo has one record for each card.
    removed_cards = {record.card for record in read_removals(federation)}
    if card.decode() not in removed_cards:
        record = RemovalRecord(
            silo_id=silo_id,
            reason=reason,
            at=now_utc(),
            card=card.decode(),
            rotations=rotations_of(federation).get(silo_id, ()),
        )
        name = f"{silo_id}.{sha256_hex(card)[:16]}.json"
        write_atomic(federation.registry / "removed" / name, record.encode())
    fingerprint = signing_key(read_card(card)).fingerprint
    append_entries(federation, SiloRemoved(silo_id=silo_id, key_fingerprint=fingerprint))
    forget_rotations(federation, silo_id)
    path.unlink()
