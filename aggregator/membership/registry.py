"""Keeps the enrolment cards of silos, verified and unchanged, and the last known state of each silo's ledger.

A card is sealed by the signing key that it names, which proves that the silo has this key and not who the silo is: the
operator compares fingerprint and size with the silo through a second channel. Here follows what a machine can check:

 * a key belongs to one silo, is spelt in one way, and never comes back after its silo was removed;
 * a silo replaces its key only by a rotation that the old key sealed (`aggregator.keys.silo_rotation`);
 * a ledger only grows (`check_ledger`).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from pydantic import Field

from aggregator.config import Federation
from ddm.errors import (
    BusyError,
    DigestError,
    DocumentError,
    LedgerError,
    MissingFileError,
    PolicyError,
)
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
from ddm.trust.comparison import CodeSubject, is_code_of, parse_code
from ddm.trust.envelope import open_sealed
from ddm.trust.key_rotation import open_rotation
from ddm.trust.keys import PublicKey
from ddm.trust.log.entries import SiloEnrolled
from ddm.trust.paths import is_silo_id, silo_role

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
    # The envelope accepts any key here, since nobody knows the silo yet: the card must name the one that sealed it.
    card = Card.parse(payload, subject="enrolment card", limit=MAX_CARD_BYTES)
    if str(signer) != card.signing_key:
        raise DocumentError(
            "enrolment card",
            expected=f"a signature by the key that it names, {ascii(card.signing_key[:40])}",
            got=f"a signature by {ascii(str(signer)[:40])}",
        )
    try:
        node_key = load_ssh_public_key(card.node_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DocumentError(
            "enrolment card, node_key",
            expected="an OpenSSH public key",
            got=f"{len(card.node_key)} characters that are not such a key",
        ) from error
    # One key has one text, since keys are compared as texts. The attack: a silo enrolls another silo's node key in
    # another spelling, and takes its place in the conversation.
    canonical_text = node_key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    if canonical_text != card.node_key:
        raise DocumentError(
            "enrolment card, node_key",
            expected="an OpenSSH public key as OpenSSH writes it",
            got="another spelling of a key",
        )
    return card


def read_card_file(path: Path) -> tuple[Card, RotatedCard | None]:
    """Read what `silo enroll` or `silo rotate` wrote: the card, and the file's rotations where it has some.

    Raises:
        MissingFileError: no such file.
        DocumentError: malformed.
        SignatureError: the card's signature does not verify.
    """
    card_bytes, rotated = _read_card_bytes(path)
    return read_card(card_bytes), rotated


def _read_card_bytes(path: Path) -> tuple[bytes, RotatedCard | None]:
    """Return the sealed card of a file, and the whole of it where rotations come with the card."""
    path = require_file(path, "a card made by `silo enroll` or `silo rotate`")
    data = read_bounded(path, MAX_ROTATED_BYTES)
    value = check_json(data, subject="enrolment card", limit=MAX_ROTATED_BYTES)
    if not isinstance(value, dict) or value.get("format") != ROTATED_CARD_FORMAT:
        return data, None
    rotated = RotatedCard.parse(data, subject="rotated card", limit=MAX_ROTATED_BYTES)
    return rotated.card.encode(), rotated


def check_card_code(card: Card, code: str) -> None:
    """Refuse a card unless this is its code, or its digest, as the silo's operator reads it out.

    Raises:
        SetupError: the text is not a code.
        DigestError: it is the code of another card.
    """
    expected_code = parse_code(code)
    if not is_code_of(expected_code, card.digest, CodeSubject.CARD):
        # The card's own code is not shown: to type it from here would trust anybody who sent the file.
        raise DigestError(
            f"card of silo {card.silo_id}",
            expected=f"a card with the code {expected_code}",
            got="a card with another code",
            remedy="Ask the silo's operator to read out the words of the newest card again. If they are the same, "
            "somebody replaced the card on its way: get it from the silo in another way.",
        )


def enroll_silo(
    federation: Federation,
    card_path: Path,
    *,
    images: int | None = None,
    patients: int | None = None,
    code: str | None = None,
) -> Card:
    """Keep one silo's card; see `enroll_silos`."""
    card_file = CardFile(card_path, code)
    return enroll_silos(federation, [card_file], images=images, patients=patients)[0]


@dataclass(frozen=True)
class CardFile:
    """A file with a card to enroll.

    Attributes:
        path: what `silo enroll` or `silo rotate` wrote.
        code: of the card, as the silo's operator read it out; None where operators compare it in another way.
    """

    path: Path
    code: str | None = None


def enroll_silos(
    federation: Federation,
    card_files: Sequence[CardFile],
    *,
    images: int | None = None,
    patients: int | None = None,
) -> list[Card]:
    """Keep the cards of silos, and with them agree to their sizes; where one is refused, those before it are kept.

    A new key for an enrolled silo is refused. A card may come again, with the same size or another one, which then
    counts from the next plan on. The cards enrolled before are read once, however many new ones there are.

    Args:
        federation: the operator's folder.
        card_files: the cards.
        images: the most images of a silo that the operator agrees to; None agrees to what each card states.
        patients: the most patients of a silo.

    Returns:
        The cards, in the order of their files.

    Raises:
        DigestError: a code is that of another card.
        BusyError: a silo is enrolled with another key, or has a rotated card, which a plain one does not replace; or a
            key belongs to another silo.
        FederationError: a card was made for another federation.
        PolicyError: a key belonged to a silo that was removed; or a card states more than was agreed.
        BusyError: another process signs.
    """
    new_cards: list[_NewCard] = []
    with federation.signing_lock():
        used_keys = UsedKeys.read(federation)
        entries = []
        try:
            for card_file in card_files:
                new_card = _NewCard.read(card_file.path)
                card = new_card.card
                check_card_federation(federation, card)
                check_agreed_size(card, images, patients)
                # Of the very bytes that are kept below: the file may be another one than when the operator looked at
                # it.
                if card_file.code is not None:
                    check_card_code(card, card_file.code)
                used_keys.check_unused(card)
                used_keys.check_new(card)
                _check_not_rotated(federation, card)
                if card.silo_id not in used_keys.cards:
                    fingerprint = signing_key(card).fingerprint
                    entries.append(SiloEnrolled(silo_id=card.silo_id, key_fingerprint=fingerprint))
                # It counts for those after it: no two of them may have one key.
                used_keys.add(card)
                new_cards.append(new_card)
        finally:
            # The log first: a card that counts is always in the log, whenever this process ends.
            append_entries(federation, *entries)
            for new_card in new_cards:
                write_atomic(federation.registry / f"{new_card.card.silo_id}.json", new_card.data)
    return [new_card.card for new_card in new_cards]


@dataclass(frozen=True)
class _NewCard:
    """A card to enroll: what it states, and its sealed bytes."""

    card: Card
    data: bytes

    @classmethod
    def read(cls, path: Path) -> "_NewCard":
        data, _ = _read_card_bytes(path)
        return cls(read_card(data), data)


@dataclass(frozen=True)
class UsedKeys:
    """The keys that silos of a federation have, had or will have: anybody who comes later needs keys of its own.

    Attributes:
        cards: the card of each enrolled silo.
        silos_of_key: signing or node key to the enrolled silos that have it; a signing key also to those that had it
            before a rotation, or will have it after one.
        removal_of_key: signing or node key to the record of the removed silo that had it.
    """

    cards: dict[str, Card]
    silos_of_key: dict[str, set[str]]
    removal_of_key: Mapping[str, RemovalRecord]

    @classmethod
    def read(cls, federation: Federation) -> "UsedKeys":
        """Read them from the registry; each card is opened once."""
        removal_of_key = {}
        for record in read_removals(federation):
            card = read_card(record.card.encode())
            # The keys from before a rotation count as well, since they may be in other hands too.
            for key in (card.node_key, card.signing_key, *_keys_in_rotations(record.rotations)):
                removal_of_key[key] = record
        used_keys = cls(cards={}, silos_of_key={}, removal_of_key=removal_of_key)
        for card in read_cards(federation).values():
            used_keys.add(card)
        for silo_id, rotations in rotations_of(federation).items():
            for key in _keys_in_rotations(rotations):
                used_keys.silos_of_key.setdefault(key, set()).add(silo_id)
        return used_keys

    def add(self, card: Card) -> None:
        """Count the keys of a card that is enrolled."""
        self.cards[card.silo_id] = card
        for key in (card.signing_key, card.node_key):
            self.silos_of_key.setdefault(key, set()).add(card.silo_id)

    def check_unused(self, card: Card) -> None:
        """Refuse keys that belonged to a removed silo, or a signing key that another silo has, had or will have.

        Raises:
            PolicyError: a key belonged to a silo that was removed.
            BusyError: the signing key belongs or belonged to a silo.
        """
        # A silo is removed because its keys may be in other hands: they must not come back under another name.
        for key in (card.signing_key, card.node_key):
            record = self.removal_of_key.get(key)
            if record is not None:
                raise PolicyError(
                    f"silo {card.silo_id}",
                    expected="keys that never belonged to a removed silo",
                    got=f"a key of {record.silo_id}, removed {record.at:%Y-%m-%d}",
                    remedy=(
                        "Ask the silo to make new keys in a new folder, `silo init SITE --help`, and to send its "
                        "card: `silo enroll SITE --out card.json`."
                    ),
                )
        owners = self._other_silos(card, card.signing_key)
        if owners:
            raise BusyError(
                f"silo {card.silo_id}",
                expected="a key of its own",
                got=f"a key of {owners[0]}, present or rotated",
                remedy=(
                    "Ask the silo to make a new key: `silo rotate SITE --out card.json`, or "
                    "a new site: `silo init SITE --help`."
                ),
            )

    def check_new(self, card: Card) -> None:
        """Refuse another key for an enrolled silo, and a node key that another silo has.

        Raises:
            BusyError: either of them.
        """
        got = None
        present = self.cards.get(card.silo_id, card)
        if present.signing_key != card.signing_key or present.node_key != card.node_key:
            got = "a silo already enrolled with another key"
        owners = self._other_silos(card, card.node_key)
        if owners:
            got = f"a key of {owners[0]}"
        if got is not None:
            raise BusyError(
                f"silo {card.silo_id}",
                expected="a new silo with keys of its own",
                got=got,
                remedy=(
                    "Check the fingerprint with the silo. It replaces its key with `silo rotate SITE --out "
                    "card.json`; if the key was lost or stolen, remove the silo first: `aggregator remove "
                    "FED SILO --reason TEXT`."
                ),
            )

    def _other_silos(self, card: Card, key: str) -> list[str]:
        return sorted(self.silos_of_key.get(key, set()) - {card.silo_id})


def _check_not_rotated(federation: Federation, card: Card) -> None:
    """Refuse a card alone where the next plan follows one with rotations: its size would not count."""
    # The next plan takes the waiting card, see `cards_for_next_plan`.
    if (federation.registry / "rotated" / f"{card.silo_id}.json").exists():
        raise BusyError(
            f"silo {card.silo_id}",
            expected="a card with the rotations of this silo's key, as the card enrolled before",
            got="a card without rotations",
            remedy="Ask the silo for its present card: `silo enroll SITE --out card.json`.",
        )


def rotations_of(federation: Federation) -> Mapping[str, tuple[str, ...]]:
    """Return the sealed rotations of enrolled silos, those that wait for the next plan included, by silo id."""
    rotations: dict[str, tuple[str, ...]] = {}
    for folder in ("rotations", "rotated"):
        for path in sorted((federation.registry / folder).glob("*.json")):
            silo_id = path.stem
            data = read_bounded(path, MAX_REMOVED_BYTES)
            stored = RotatedCard.parse(data, subject=path.name).rotations
            # A waiting card repeats the rotations that are in force already.
            rotations[silo_id] = tuple(dict.fromkeys((*rotations.get(silo_id, ()), *stored)))
    return rotations


def _keys_in_rotations(rotations: Iterable[str]) -> set[str]:
    """Return every key that these sealed rotations name."""
    keys = set()
    for text in rotations:
        rotation = open_rotation(text.encode())
        keys |= {rotation.old_key, rotation.new_key}
    return keys


def check_card_federation(federation: Federation, card: Card) -> None:
    """Refuse a card that was made for another federation.

    Raises:
        FederationError: names the silo.
    """
    # Anybody who got the card that a hospital made for another federation could enroll the hospital here without its
    # will.
    remedy = (
        "Ask the silo to join this federation in a new folder with this invitation.json, `silo "
        "init SITE --help`, and to send its card: `silo enroll SITE --out card.json`."
    )
    card.check_federation(federation.root_digest, f"card of silo {card.silo_id}", remedy)


def check_agreed_size(card: Card, images: int | None, patients: int | None) -> None:
    """Refuse a card that states more than the operator agrees to, or no patients where their number was agreed."""
    # The stated size bounds the silo's prior, and with it its weight in the ensemble.
    for unit, agreed in (("images", images), ("patients", patients)):
        stated = getattr(card.agreed, unit)
        if agreed is not None and (stated is None or stated > agreed):
            raise PolicyError(
                f"card of silo {card.silo_id}",
                expected=f"at most {agreed} {unit}, as you agree to",
                got="no number" if stated is None else f"{stated}",
                remedy=(
                    "Ask the silo for a card with the agreed number: `silo enroll SITE --out card.json "
                    f"--{unit} {agreed}`."
                ),
            )


def read_cards(federation: Federation) -> Mapping[str, Card]:
    """Read every enrolled card, by silo id, in the order of their names."""
    cards = {}
    for path in sorted(federation.registry.glob("*.json")):
        # A silo may be removed while this runs.
        with suppress(MissingFileError):
            card = read_card(read_bounded(path, MAX_CARD_BYTES))
            cards[card.silo_id] = card
    return cards


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
    card = find_card(federation, silo_id)
    if card is None:
        enrolled = ", ".join(read_cards(federation)) or "none"
        raise MissingFileError(
            f"silo {silo_id}",
            expected="an enrolled silo",
            got=f"a silo that is not enrolled; enrolled: {enrolled}",
            remedy="Check the name, or enrol the silo first: `aggregator enroll FED CARD`.",
        )
    return card


def find_card(federation: Federation, silo_id: str) -> Card | None:
    """Read one silo's card, None where the silo is not enrolled."""
    # An operator types names: what is none could lead to another folder.
    if not is_silo_id(silo_id):
        return None
    path = federation.registry / f"{silo_id}.json"
    # A silo may be removed while this runs.
    try:
        card = read_card(read_bounded(path, MAX_CARD_BYTES))
    except MissingFileError:
        return None
    # The name that is sealed decides, as in `read_cards`.
    if card.silo_id != silo_id:
        return None
    return card


def active_cards(federation: Federation, plan: Plan) -> Mapping[str, Card]:
    """Return the cards of the plan's silos that may still answer it, in its order: those with a delegated key.

    A silo that was removed, or enrolled again with another key, can take part from the next plan on.
    """
    silo_ids = set(plan.silos)
    return {
        silo_id: card
        for silo_id, card in member_cards(federation, plan).items()
        if silo_id in silo_ids
    }


def active_card(federation: Federation, plan: Plan, silo_id: str) -> Card | None:
    """Return the card of one of the plan's silos, None where it may not answer the plan; see `active_cards`."""
    card = find_card(federation, silo_id)
    if silo_id not in plan.silos or card is None:
        return None
    if not _has_role(card, plan, federation.delegations()):
        return None
    return card


def member_cards(federation: Federation, plan: Plan) -> Mapping[str, Card]:
    """Return the cards of the silos that take part, and of those whose experts the plan carries over, sorted."""
    key_of_role = federation.delegations()
    cards = read_cards(federation)
    members = {}
    for silo_id in plan.members:
        if silo_id in cards and _has_role(cards[silo_id], plan, key_of_role):
            members[silo_id] = cards[silo_id]
    return members


def _has_role(card: Card, plan: Plan, key_of_role: Mapping[str, str]) -> bool:
    """Whether the plan's delegations name the key on a card.

    A card with another key is that of a silo that was enrolled again: it has no role in this plan.
    """
    role = silo_role(plan.origin(card.silo_id), card.silo_id)
    return key_of_role.get(role) == card.signing_key


def signing_key(card: Card) -> PublicKey:
    """The key that signs this silo's submissions."""
    return PublicKey.parse(card.signing_key)


def check_ledger(known: KnownLedger, silo_id: str, plan_id: str, chain: tuple[str, ...]) -> None:
    """Refuse a ledger that does not extend the last known one, or that did not grow for a new plan.

    Raises:
        LedgerError: earlier entries are gone or changed, or nothing was debited for this plan.
    """
    num_known = len(known.chain)
    # Statistics are debited before a submission, so that a ledger of a new plan has new entries. A second submission
    # for the same plan may be made from the same debits.
    has_new_debits = len(chain) > num_known
    is_same_plan = known.plan_id == plan_id and len(chain) == num_known
    if chain[:num_known] != known.chain or not (has_new_debits or is_same_plan):
        # The attack: a silo restores an old copy of its ledger, and spends its privacy budget a second time.
        num_unchanged = 0
        for entry, known_entry in zip(chain, known.chain, strict=False):
            if entry != known_entry:
                break
            num_unchanged += 1
        raise LedgerError(
            f"ledger of silo {silo_id}",
            expected=f"the {num_known} entries known before, extended by this plan's debits",
            got=f"{len(chain)} entries, of which the first {num_unchanged} are those known before",
            remedy="The silo's ledger was reset, restored or edited. Ask its operator; there is no waiver for this.",
        )


def record_ledger(
    federation: Federation, silo_id: str, plan_id: str, chain: tuple[str, ...]
) -> None:
    """Keep the chain of an accepted submission."""
    known = KnownLedger(plan_id=plan_id, chain=chain)
    write_atomic(_ledger_path(federation, silo_id), known.encode())


def _ledger_path(federation: Federation, silo_id: str) -> Path:
    return federation.registry / "ledgers" / f"{silo_id}.json"


def read_known_ledger(federation: Federation, silo_id: str) -> KnownLedger:
    """Return what is known of a silo's ledger; nothing before its first accepted submission."""
    path = _ledger_path(federation, silo_id)
    if not path.exists():
        return KnownLedger()
    return KnownLedger.parse(path.read_bytes(), subject=path.name)
