"""Keeps the enrolment cards of silos, verified and unchanged, and the last known state of each silo's ledger."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from pydantic import Field

from aggregator.config import Federation
from ddm.errors import BusyError, DocumentError, LedgerError, MissingFileError, PolicyError
from ddm.io.files import read_bounded, require_file, write_atomic
from ddm.protocol.base import Digest, Document, PlanId, ShortText, SiloId, Time, check_json
from ddm.protocol.enrolment import (
    CARD_KIND,
    MAX_CARD_BYTES,
    ROTATED_CARD_FORMAT,
    Card,
    RotatedCard,
    SealedText,
)
from ddm.protocol.plan import Plan
from ddm.publishing.log import append_entries
from ddm.trust.envelope import open_sealed
from ddm.trust.key_rotation import open_rotation
from ddm.trust.keys import PublicKey
from ddm.trust.log.entries import SiloEnrolled
from ddm.trust.paths import silo_role

MAX_ROTATED_BYTES = 1024 * 1024
MAX_REMOVED_BYTES = 2 * MAX_ROTATED_BYTES


class RemovalRecord(Document):
    """A silo that was removed from the federation: who, why, when, and its card and its key's rotations as received."""

    format: Literal["archipelago/removed/1"] = "archipelago/removed/1"
    silo_id: SiloId
    reason: ShortText
    at: Time
    card: Annotated[str, Field(max_length=MAX_CARD_BYTES)]
    rotations: tuple[SealedText, ...] = ()


class KnownLedger(Document):
    """The digests of all entries of a silo's ledger up to its last accepted submission, and that submission's plan."""

    plan_id: PlanId | None = None
    chain: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()


def read_card(data: bytes) -> Card:
    """Open a card, which must be signed by the key that it names.

    Raises:
        SignatureError: the signature does not verify.
        DocumentError: not a card, signed by a key other than the one it names, or without a valid node key.
    """
    payload, signer = open_sealed(data, CARD_KIND, None, MAX_CARD_BYTES)
    card = Card.parse(payload, subject="enrolment card", limit=MAX_CARD_BYTES)
    if str(signer) != card.signing_key:
        expected = f"a signature by the key that it names, {ascii(card.signing_key[:40])}"
        raise DocumentError(
            "enrolment card", expected=expected, got=f"a signature by {ascii(str(signer)[:40])}"
        )
    try:
        node = load_ssh_public_key(card.node_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        got = f"{len(card.node_key)} characters that are no such key"
        raise DocumentError(
            "enrolment card, node_key", expected="an OpenSSH public key", got=got
        ) from error
    # One key has one text: keys are compared as texts.
    if node.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() != card.node_key:
        expected, got = "an OpenSSH public key as OpenSSH writes it", "another spelling of a key"
        raise DocumentError("enrolment card, node_key", expected=expected, got=got)
    return card


def read_rotated_card(path: Path) -> tuple[Card, RotatedCard] | None:
    """Read what `silo rotate` wrote, and the card in it; None when the file is of another format, as a plain card.

    Raises:
        MissingFileError: no such file.
        DocumentError: malformed.
        SignatureError: the card's signature does not verify.
    """
    data = read_bounded(
        require_file(path, "a card made by `silo enroll` or `silo rotate`"), MAX_ROTATED_BYTES
    )
    value = check_json(data, subject="enrolment card", limit=MAX_ROTATED_BYTES)
    if not isinstance(value, dict) or value.get("format") != ROTATED_CARD_FORMAT:
        return None
    rotated = RotatedCard.parse(data, subject="rotated card", limit=MAX_ROTATED_BYTES)
    return read_card(rotated.card.encode()), rotated


def enroll_silo(
    federation: Federation,
    card_path: Path,
    *,
    images: int | None = None,
    patients: int | None = None,
) -> Card:
    """Keep a silo's card, and with it agree to its size; a new key for an enrolled silo is refused.

    The card may come again, with the same size or another one, which then counts from the next plan on.

    Args:
        federation: the operator's folder.
        card_path: the card.
        images: the most images that the operator agrees to; None agrees to what the card states.
        patients: the most patients.

    Raises:
        BusyError: this silo is enrolled with another key, or has a rotated card, which a plain one does not replace; or
            one of these keys belongs to another silo.
        PolicyError: one of these keys belonged to a silo that was removed; or the card states more than was agreed.
        BusyError: another process signs.
    """
    rotated = read_rotated_card(card_path)
    data = rotated[1].card.encode() if rotated else read_bounded(card_path, MAX_CARD_BYTES)
    card = read_card(data)
    check_agreed_size(card, images, patients)
    with federation.signing_lock():
        check_keys_unused(federation, card)
        _check_new(federation, card)
        _check_not_rotated(federation, card)
        if card.silo_id not in read_cards(federation):
            append_entries(
                federation,
                SiloEnrolled(silo_id=card.silo_id, key_fingerprint=signing_key(card).fingerprint),
            )
        write_atomic(federation.registry / f"{card.silo_id}.json", data)
    return card


def _check_new(federation: Federation, card: Card) -> None:
    """Refuse another key for an enrolled silo, and a key that another silo has."""
    for other_id, other in read_cards(federation).items():
        same = (other.signing_key == card.signing_key, other.node_key == card.node_key)
        if not all(same) if other_id == card.silo_id else any(same):
            raise BusyError(
                f"silo {card.silo_id}",
                expected="a new silo with keys of its own",
                got="a silo already enrolled with another key"
                if other_id == card.silo_id
                else f"a key of {other_id}",
                remedy="Check the fingerprint with the silo. It replaces its key with `silo rotate`; if it was lost "
                "or stolen, `aggregator remove` the silo first.",
            )


def _check_not_rotated(federation: Federation, card: Card) -> None:
    """Refuse a card alone where the next plan follows one with rotations: its size would not count."""
    if (federation.registry / "rotated" / f"{card.silo_id}.json").exists():
        raise BusyError(
            f"silo {card.silo_id}",
            expected="a card with the rotations of this silo's key, as the one taken in before",
            got="a card alone",
            remedy="Ask the silo for what `silo enroll` writes now.",
        )


def check_keys_unused(federation: Federation, card: Card) -> None:
    """Refuse keys that belonged to a removed silo, or a signing key that another silo has, had or will have.

    Raises:
        PolicyError: a key belonged to a silo that was removed.
        BusyError: the signing key belongs or belonged to a silo.
    """
    for record in read_removals(federation):
        old = read_card(record.card.encode())
        if old.node_key == card.node_key or card.signing_key in {
            old.signing_key,
            *_rotated_keys(record.rotations),
        }:
            raise PolicyError(
                f"silo {card.silo_id}",
                expected="keys that never belonged to a removed silo",
                got=f"a key of {old.silo_id}, removed {record.at:%Y-%m-%d}",
                remedy="Ask the silo to make new keys: `silo init` in a new folder, then `silo enroll`.",
            )
    held = {other_id: {other.signing_key} for other_id, other in read_cards(federation).items()}
    for silo_id, rotations in rotations_of(federation).items():
        held.setdefault(silo_id, set()).update(_rotated_keys(rotations))
    for silo_id in sorted(held):
        if card.signing_key in held[silo_id] and silo_id != card.silo_id:
            remedy = "Ask the silo to make a key that nobody ever had: `silo rotate`, or `silo init` in a new folder."
            got = f"a key of {silo_id}, present or rotated"
            raise BusyError(
                f"silo {card.silo_id}", expected="a key of its own", got=got, remedy=remedy
            )


def rotations_of(federation: Federation) -> Mapping[str, tuple[str, ...]]:
    """Return the sealed rotations of enrolled silos, those that wait for the next plan included, by silo id."""
    found: dict[str, tuple[str, ...]] = {}
    for folder in ("rotations", "rotated"):
        for path in sorted((federation.registry / folder).glob("*.json")):
            kept = RotatedCard.parse(
                read_bounded(path, MAX_REMOVED_BYTES), subject=path.name
            ).rotations
            found[path.stem] = tuple(dict.fromkeys((*found.get(path.stem, ()), *kept)))
    return found


def _rotated_keys(rotations: Iterable[str]) -> set[str]:
    opened = [open_rotation(text.encode()) for text in rotations]
    return {key for rotation in opened for key in (rotation.old_key, rotation.new_key)}


def check_agreed_size(card: Card, images: int | None, patients: int | None) -> None:
    """Refuse a card that states more than the operator agrees to, or no patients where their number was agreed."""
    for unit, most in (("images", images), ("patients", patients)):
        stated = getattr(card.agreed, unit)
        if most is not None and (stated is None or stated > most):
            raise PolicyError(
                f"card of silo {card.silo_id}",
                expected=f"at most {most} {unit}, as you agree to",
                got=f"{'no number' if stated is None else stated}",
                remedy=f"Ask the silo for a card with the agreed number: silo enroll --{unit} {most}.",
            )


def read_cards(federation: Federation) -> Mapping[str, Card]:
    """Read every enrolled card, by silo id."""
    paths = sorted(path for path in federation.registry.glob("*.json"))
    found = []
    for path in paths:
        with suppress(MissingFileError):  # removed meanwhile
            found.append(read_card(read_bounded(path, MAX_CARD_BYTES)))
    return {card.silo_id: card for card in found}


def read_removals(federation: Federation) -> list[RemovalRecord]:
    """Read the records of all removed silos."""
    paths = sorted((federation.registry / "removed").glob("*.json"))
    return [
        RemovalRecord.parse(read_bounded(path, MAX_REMOVED_BYTES), subject=path.name)
        for path in paths
    ]


def card_of(federation: Federation, silo_id: str) -> Card:
    """Read one silo's card.

    Raises:
        MissingFileError: the silo is not enrolled.
    """
    found = read_cards(federation)
    if silo_id not in found:
        got = f"a silo that is not enrolled; enrolled: {', '.join(found) or 'none'}"
        remedy = "Check the name, or enrol the silo first: aggregator enroll."
        raise MissingFileError(
            f"silo {silo_id}", expected="an enrolled silo", got=got, remedy=remedy
        )
    return found[silo_id]


def active_cards(federation: Federation, plan: Plan) -> Mapping[str, Card]:
    """Return the cards of the plan's silos that may still answer it, in its order: those with a delegated key.

    A silo that was removed, or enrolled anew with another key, can take part from the next plan on.
    """
    return {
        silo_id: card
        for silo_id, card in member_cards(federation, plan).items()
        if silo_id in plan.silos
    }


def member_cards(federation: Federation, plan: Plan) -> Mapping[str, Card]:
    """Return the cards of the silos that take part, and of those whose experts the plan carries over, sorted."""
    delegated = federation.delegations()
    found = read_cards(federation)
    return {
        silo_id: found[silo_id]
        for silo_id in plan.members
        if silo_id in found
        and delegated.get(silo_role(plan.origin(silo_id), silo_id)) == found[silo_id].signing_key
    }


def signing_key(card: Card) -> PublicKey:
    """The key that signs this silo's submissions."""
    return PublicKey.parse(card.signing_key)


def check_ledger(known: KnownLedger, silo_id: str, plan_id: str, chain: tuple[str, ...]) -> None:
    """Refuse a ledger that does not extend the last known one, or that did not grow for a new plan.

    Raises:
        LedgerError: earlier entries are gone or changed, or nothing was debited for this plan.
    """
    grows = len(chain) > len(known.chain) or (
        known.plan_id == plan_id and len(chain) == len(known.chain)
    )
    if chain[: len(known.chain)] != known.chain or not grows:
        same = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(chain, known.chain, strict=False)
            )
        )
        raise LedgerError(
            f"ledger of silo {silo_id}",
            expected=f"the {len(known.chain)} entries known before, extended by this plan's debits",
            got=f"{len(chain)} entries, of which the first {same} are those known before",
            remedy="The silo's ledger was reset, restored or edited. Ask its operator; there is no waiver for this.",
        )


def record_ledger(
    federation: Federation, silo_id: str, plan_id: str, chain: tuple[str, ...]
) -> None:
    """Keep the chain of an accepted submission."""
    write_atomic(
        _ledger_path(federation, silo_id), KnownLedger(plan_id=plan_id, chain=chain).encode()
    )


def _ledger_path(federation: Federation, silo_id: str) -> Path:
    return federation.registry / "ledgers" / f"{silo_id}.json"


def read_known_ledger(federation: Federation, silo_id: str) -> KnownLedger:
    """Return what is known of a silo's ledger; nothing before its first accepted submission."""
    path = _ledger_path(federation, silo_id)
    return (
        KnownLedger.parse(path.read_bytes(), subject=path.name) if path.exists() else KnownLedger()
    )
