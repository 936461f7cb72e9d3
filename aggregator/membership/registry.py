"""Who takes part: enrolment cards, checked and kept as they came; and how far each silo's ledger was seen."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import Field

from aggregator.config import Federation
from ddm.errors import BusyError, DocumentError, LedgerError, MissingFileError, PolicyError
from ddm.io.files import read_bounded, require_file, write_atomic
from ddm.protocol.base import Digest, Document, PlanId, ShortText, SiloId, Time
from ddm.protocol.enrolment import CARD_KIND, Card
from ddm.protocol.plan import Plan
from ddm.trust.envelope import open_sealed
from ddm.trust.keys import PublicKey

MAX_CARD_BYTES = 16384
MAX_REMOVED_BYTES = 65536


class Removed(Document):
    """A silo that was taken out of the federation: who, why, when, and the card as it came."""

    format: Literal["archipelago/removed/1"] = "archipelago/removed/1"
    silo_id: SiloId
    reason: ShortText
    at: Time
    card: Annotated[str, Field(max_length=MAX_CARD_BYTES)]


class SeenLedger(Document):
    """Every entry digest of a silo's ledger up to the last accepted submission, and the plan of that submission."""

    plan_id: PlanId | None = None
    chain: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()


def read_card(data: bytes) -> Card:
    """Open a card: self-signed by the very key that it announces.

    Raises:
        SignatureError: the seal does not verify.
        DocumentError: not a card, the seal is by another key than the card names, or the node key is none.
    """
    payload, signer = open_sealed(data, CARD_KIND, None, MAX_CARD_BYTES)
    card = Card.parse(payload, subject="enrolment card", limit=MAX_CARD_BYTES)
    if str(signer) != card.signing_key:
        raise DocumentError("enrolment card", expected="a seal by the key it names", got="another key")
    try:
        load_ssh_public_key(card.node_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DocumentError("enrolment card, node_key", expected="an OpenSSH public key", got="no key") from error
    return card


def enroll(federation: Federation, card_path: Path) -> Card:
    """Keep a silo's card; the same keys twice are fine, any other key for the same silo is refused.

    Raises:
        BusyError: this silo is enrolled with another key, or one of these keys is another silo's.
        PolicyError: one of these keys belonged to a silo that was removed.
    """
    require_file(card_path, "a card made by `silo enroll`")
    data = read_bounded(card_path, MAX_CARD_BYTES)
    card = read_card(data)
    for record in removed(federation):
        old = read_card(record.card.encode())
        if old.signing_key == card.signing_key or old.node_key == card.node_key:
            raise PolicyError(
                f"silo {card.silo_id}",
                expected="keys that never belonged to a removed silo",
                got=f"a key of {old.silo_id}, removed {record.at:%Y-%m-%d}",
                remedy="Let the silo make new keys: `silo init` in a new folder, then `silo enroll`.",
            )
    for other_id, other in cards(federation).items():
        same = (other.signing_key == card.signing_key, other.node_key == card.node_key)
        if not all(same) if other_id == card.silo_id else any(same):
            raise BusyError(
                f"silo {card.silo_id}",
                expected="a new silo with keys of its own",
                got=f"a clash with the enrolled silo {other_id}",
                remedy="Check the fingerprint with the silo; to replace a key, `aggregator remove` the silo first.",
            )
    write_atomic(federation.registry / f"{card.silo_id}.json", data)
    return card


def cards(federation: Federation) -> Mapping[str, Card]:
    """Read every enrolled card, by silo id."""
    paths = sorted(path for path in federation.registry.glob("*.json"))
    found = []
    for path in paths:
        with suppress(MissingFileError):  # removed a moment ago
            found.append(read_card(read_bounded(path, MAX_CARD_BYTES)))
    return {card.silo_id: card for card in found}


def removed(federation: Federation) -> list[Removed]:
    """Read the records of all silos that were removed."""
    paths = sorted((federation.registry / "removed").glob("*.json"))
    return [Removed.parse(read_bounded(path, MAX_REMOVED_BYTES), subject=path.name) for path in paths]


def card_of(federation: Federation, silo_id: str) -> Card:
    """Read one silo's card.

    Raises:
        MissingFileError: it is not enrolled.
    """
    found = cards(federation)
    if silo_id not in found:
        raise MissingFileError(f"silo {silo_id}", expected="an enrolled silo", got=", ".join(found) or "none enrolled")
    return found[silo_id]


def taking_part(federation: Federation, plan: Plan) -> Mapping[str, Card]:
    """List the plan's silos that may still answer it, in its order: enrolled with the key that `targets` delegates to.

    A silo that was removed, or enrolled anew under another key, takes part from the next plan on.
    """
    delegated = federation.delegations()
    found = cards(federation)
    return {
        silo_id: found[silo_id]
        for silo_id in plan.silos
        if silo_id in found and delegated.get(f"{plan.plan_id}.{silo_id}") == found[silo_id].signing_key
    }


def signing_key(card: Card) -> PublicKey:
    """The key that signs this silo's submissions."""
    return PublicKey.parse(card.signing_key)


def check_ledger(federation: Federation, silo_id: str, plan_id: str, chain: tuple[str, ...]) -> None:
    """Refuse a ledger that does not extend the one seen last, or that did not grow although the plan is another.

    Raises:
        LedgerError: entries that were there are gone or changed, or nothing was debited for this plan.
    """
    seen = _seen(federation, silo_id)
    grows = len(chain) > len(seen.chain) or (seen.plan_id == plan_id and len(chain) == len(seen.chain))
    if chain[: len(seen.chain)] != seen.chain or not grows:
        raise LedgerError(
            f"ledger of silo {silo_id}",
            expected=f"one that extends the {len(seen.chain)} entries seen before by this plan's debits",
            got=f"a chain of {len(chain)} entries that does not",
            remedy="The silo's ledger was reset, restored or edited. Ask its operator; there is no waiver for it yet.",
        )


def remember_ledger(federation: Federation, silo_id: str, plan_id: str, chain: tuple[str, ...]) -> None:
    """Keep the chain of an accepted submission."""
    write_atomic(_seen_path(federation, silo_id), SeenLedger(plan_id=plan_id, chain=chain).encode())


def _seen_path(federation: Federation, silo_id: str) -> Path:
    return federation.registry / "ledgers" / f"{silo_id}.json"


def _seen(federation: Federation, silo_id: str) -> SeenLedger:
    path = _seen_path(federation, silo_id)
    return SeenLedger.parse(path.read_bytes(), subject=path.name) if path.exists() else SeenLedger()
