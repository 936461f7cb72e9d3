"""Takes in a silo's new signing key, which the old one announces, and puts it in force with the next plan.

The plan in progress keeps the old key, since its silos have signed, or will sign, with the keys that it names. Until
the next plan the new card waits in `registry/rotated/`; from then on `registry/rotations/` keeps every rotation up to
the key in force, and releases publish them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from aggregator.config import Federation
from aggregator.membership.registry import (
    MAX_ROTATED_BYTES,
    UsedKeys,
    card_of,
    check_card_federation,
    read_card,
    read_cards,
    signing_key,
)
from ddm.errors import BusyError, DocumentError, MissingFileError, PolicyError, RollbackError
from ddm.io.changes import Change
from ddm.io.files import read_bounded, write_atomic
from ddm.protocol.enrolment import (
    MAX_KEY_HISTORY_BYTES,
    MAX_ROTATIONS,
    Card,
    KeyHistory,
    RotatedCard,
)
from ddm.protocol.plan import Plan
from ddm.publishing.log import append_entries
from ddm.trust.key_rotation import open_chain
from ddm.trust.keys import PublicKey
from ddm.trust.log.entries import SiloKeyChanged


def take_rotation(federation: Federation, received: RotatedCard) -> Card:
    """Keep what `silo rotate` wrote until the next plan; the same file may come twice.

    Args:
        federation: the operator's folder.
        received: of a silo that is enrolled.

    Returns:
        The silo's new card.

    Raises:
        MissingFileError: the silo is not enrolled.
        FederationError: the card, or a rotation, is for another federation.
        SignatureError: a rotation is not sealed by its old and its new key.
        BusyError: the rotations do not begin with the enrolled key, or the new key is in use.
        PolicyError: the new key belonged to a silo that was removed.
        RollbackError: a later rotation of this silo waits already.
        DocumentError: malformed, or the card is not that of the last rotation.
    """
    card = read_card(received.card.encode())
    check_card_federation(federation, card)
    with federation.signing_lock():
        present = card_of(federation, card.silo_id)
        _check_rotations(federation, present, card, received)
        waiting = _read_rotated(_waiting_path(federation, card.silo_id))
        if waiting is not None:
            waiting_key = read_card(waiting.card.encode()).signing_key
            # An old file of the silo, sent again, must not put an older key in the place of a newer one.
            if waiting_key not in _chain_keys(federation, received):
                raise RollbackError(
                    f"rotations of {card.silo_id}",
                    expected="every rotation taken in before, and those after them",
                    got="fewer rotations",
                    remedy="Ask the silo for its newest card: `silo enroll SITE --out card.json`.",
                )
        UsedKeys.read(federation).check_unused(card)
        if card.signing_key != present.signing_key:
            entry = SiloKeyChanged(
                silo_id=card.silo_id,
                old_fingerprint=signing_key(present).fingerprint,
                key_fingerprint=signing_key(card).fingerprint,
            )
            append_entries(federation, entry)
        joined = _join_rotations(federation, present, received)
        write_atomic(_waiting_path(federation, card.silo_id), joined.encode())
    return card


def cards_for_next_plan(federation: Federation, silos: Iterable[str]) -> Mapping[str, Card]:
    """Return the card of each silo that the next plan follows: the one with the rotated key where one waits.

    Raises:
        MissingFileError: a silo is not enrolled.
    """
    next_cards = {}
    for silo_id in silos:
        # Also where a rotated card waits: a silo that is no longer enrolled is an error.
        next_cards[silo_id] = card_of(federation, silo_id)
        waiting = _read_rotated(_waiting_path(federation, silo_id))
        if waiting is not None:
            next_cards[silo_id] = read_card(waiting.card.encode())
    return next_cards


def use_rotated_cards(federation: Federation, change: Change, silos: Iterable[str]) -> None:
    """Put rotated cards in force with this change, which starts a plan that names their keys."""
    for silo_id in silos:
        waiting = _read_rotated(_waiting_path(federation, silo_id))
        if waiting is not None:
            write_atomic(change.put(f"registry/{silo_id}.json"), waiting.card.encode())
            write_atomic(change.put(f"registry/rotations/{silo_id}.json"), waiting.encode())


def check_cards_unchanged(
    federation: Federation, plan: Plan, keys: Mapping[str, PublicKey]
) -> None:
    """Refuse a plan that waited for signatures while a silo was removed, or its key or its agreed size changed.

    Args:
        federation: the federation whose registry the plan must follow, as it is now.
        plan: about to start.
        keys: its silos', as signed.

    Raises:
        PolicyError: names the silo; the silo would refuse this plan, or is not a silo of the federation any more.
    """
    enrolled = read_cards(federation)
    next_cards = cards_for_next_plan(
        federation, [silo_id for silo_id in plan.members if silo_id in enrolled]
    )
    for silo_id in plan.members:
        card = next_cards.get(silo_id)
        # A carried silo keeps the key that signed its submission: a rotated card waits until the silo signs again.
        signing_card = card if silo_id in plan.silos else enrolled.get(silo_id)
        if card is None or signing_card is None:
            expected = f"silo {silo_id} enrolled with the key that this plan names"
            got = "a silo that is not enrolled"
        elif signing_key(signing_card) != keys.get(silo_id):
            expected = f"silo {silo_id} enrolled with the key that this plan names"
            got = "a silo enrolled with another key"
        elif card.agreed != plan.agreed[silo_id]:
            expected = f"the agreed size of {silo_id} that its present card states, {card.agreed}"
            got = f"{plan.agreed[silo_id]}"
        else:
            continue
        raise PolicyError(
            f"plan {plan.plan_id}",
            expected=expected,
            got=got,
            remedy=(
                "Discard this plan, `aggregator complete FED --abandon`, and sign a new one: `aggregator "
                "plan FED --recipe FILE --public FILE`."
            ),
        )


def collect_key_history(federation: Federation, silos: Iterable[str]) -> KeyHistory | None:
    """Return the rotations of these silos up to the keys in force, None where there are none.

    If there are more of them than readers accept, the oldest ones of each silo are left out. A reader who remembers a
    key from before these must then consent to the new one.
    """
    rotations: dict[str, tuple[str, ...]] = {}
    for silo_id in silos:
        rotated = _read_rotated(_in_force_path(federation, silo_id))
        if rotated is not None:
            rotations[silo_id] = rotated.rotations
    if not rotations:
        return None
    history = KeyHistory(silos=rotations)
    num_newest = max(len(chain) for chain in rotations.values())
    while len(history.encode()) > MAX_KEY_HISTORY_BYTES:
        num_newest -= 1
        newest = {}
        for silo_id, chain in rotations.items():
            # Counted from the front, since chain[-0:] would be the whole chain.
            newest[silo_id] = chain[max(len(chain) - num_newest, 0) :]
        history = KeyHistory(silos=newest)
    return history


def forget_rotations(federation: Federation, silo_id: str) -> None:
    """Delete the rotations of a silo that is removed; its record keeps them."""
    for path in (_waiting_path(federation, silo_id), _in_force_path(federation, silo_id)):
        path.unlink(missing_ok=True)


def _check_rotations(
    federation: Federation, present: Card, card: Card, received: RotatedCard
) -> None:
    """Check that the rotations lead from the enrolled key to that of the new card, which changes nothing else."""
    keys = _chain_keys(federation, received)
    # The node key stays: it is registered with Flower, and no rotation vouches for another one.
    if keys[-1] != card.signing_key or card.node_key != present.node_key:
        raise DocumentError(
            f"rotated card of {card.silo_id}",
            expected="the card of its last rotation",
            got="a card with another key, or another node key",
        )
    if present.signing_key not in keys:
        raise BusyError(
            f"silo {card.silo_id}",
            expected="rotations that begin with the enrolled key",
            got="rotations of other keys",
            remedy=(
                "Check the fingerprint with the silo. Without its old key it must be removed, "
                "`aggregator remove FED SILO --reason TEXT`, and enrolled again with new keys."
            ),
        )


def _chain_keys(federation: Federation, received: RotatedCard) -> list[str]:
    """Return the keys of a chain of rotations in order, after verifying it."""
    silo_id = read_card(received.card.encode()).silo_id
    chain = open_chain(received.rotations, silo_id=silo_id, root_digest=federation.root_digest)
    return [chain[0].old_key, *(rotation.new_key for rotation in chain)]


def _join_rotations(federation: Federation, present: Card, received: RotatedCard) -> RotatedCard:
    """Join the rotations stored so far, which lead to the enrolled key, with the received ones that follow."""
    stored_rotations: tuple[str, ...] = ()
    stored = _read_rotated(_in_force_path(federation, present.silo_id))
    if stored is not None:
        stored_rotations = stored.rotations
    # Rotation i of a chain begins with key i.
    num_known = _chain_keys(federation, received).index(present.signing_key)
    # `silo rotate` writes all rotations that it has, of which the first ones may be known here.
    rotations = (*stored_rotations, *received.rotations[num_known:])[-MAX_ROTATIONS:]
    joined = RotatedCard(card=received.card, rotations=rotations or received.rotations)
    # Raises unless they are one chain.
    _chain_keys(federation, joined)
    return joined


def _waiting_path(federation: Federation, silo_id: str) -> Path:
    return federation.registry / "rotated" / f"{silo_id}.json"


def _in_force_path(federation: Federation, silo_id: str) -> Path:
    return federation.registry / "rotations" / f"{silo_id}.json"


def _read_rotated(path: Path) -> RotatedCard | None:
    try:
        data = read_bounded(path, MAX_ROTATED_BYTES)
    except MissingFileError:
        return None
    return RotatedCard.parse(data, subject=path.name, limit=MAX_ROTATED_BYTES)
