"""Enrolment: whose card is taken, and that nobody's place is taken by another."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from aggregator.config import Federation
from aggregator.membership import registry
from aggregator.membership.registry import (
    CardFile,
    card_of,
    check_ledger,
    enroll_silo,
    enroll_silos,
    read_cards,
    read_known_ledger,
    record_ledger,
)
from ddm.errors import (
    ArchipelagoError,
    BusyError,
    DocumentError,
    FederationError,
    LedgerError,
    MissingFileError,
    PolicyError,
    SignatureError,
)
from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.enrolment import CARD_KIND, AgreedSize, Card
from ddm.protocol.policy import PolicyLimits, PrivacyLimits
from ddm.trust.envelope import open_sealed, seal
from ddm.trust.keys import PublicKey, SigningKey
from tests.support.errors import has_subject

PLAN = "digits-00000001"
NEXT_PLAN = "digits-00000002"


def node_key() -> str:
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


NODE = node_key()
ROOT = b"a root of trust"
OTHER_NODE = node_key()


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    (tmp_path / "fed" / "registry").mkdir(parents=True)
    metadata = tmp_path / "fed" / "tuf" / "metadata"
    metadata.mkdir(parents=True)
    (metadata / "1.root.json").write_bytes(ROOT)
    return Federation(tmp_path / "fed")


def write_card(
    folder: Path,
    silo_id: str,
    key: SigningKey,
    node: str = NODE,
    named: SigningKey | None = None,
    agreed: AgreedSize = AgreedSize(images=64),
    root: bytes = ROOT,
) -> Path:
    signing_key = str((named or key).public)
    card = Card(
        root_digest=sha256_hex(root),
        silo_id=silo_id,
        signing_key=signing_key,
        node_key=node,
        agreed=agreed,
        limits=PolicyLimits(privacy=PrivacyLimits(unit="image")),
        created_at=now_utc(),
    )
    path = folder / f"{silo_id}.card.json"
    path.write_bytes(seal(card.encode(), CARD_KIND, key))
    return path


def test_enroll_refuses_a_card_made_for_another_federation(
    federation: Federation, tmp_path: Path
) -> None:
    card = write_card(tmp_path, "north", SigningKey.generate(), root=b"another root of trust")
    with pytest.raises(FederationError, check=has_subject("card of silo north")):
        enroll_silo(federation, card)
    assert read_cards(federation) == {}


def test_enroll_keeps_a_card_and_takes_the_same_one_again(
    federation: Federation, tmp_path: Path
) -> None:
    key = SigningKey.generate()
    enroll_silo(federation, write_card(tmp_path, "north", key))
    enroll_silo(federation, write_card(tmp_path, "north", key))
    assert {silo: card.signing_key for silo, card in read_cards(federation).items()} == {
        "north": str(key.public)
    }


def test_enroll_takes_a_new_size_with_the_same_keys_and_refuses_one_above_what_the_operator_agrees_to(
    federation: Federation, tmp_path: Path
) -> None:
    key = SigningKey.generate()
    enroll_silo(federation, write_card(tmp_path, "north", key), images=64)
    larger = write_card(tmp_path, "north", key, agreed=AgreedSize(images=340_000, patients=200_000))
    for most in ({"images": 64}, {"images": 339_999}, {"patients": 100}):
        with pytest.raises(PolicyError, match=f"at most {next(iter(most.values()))}"):
            enroll_silo(federation, larger, **most)
    assert read_cards(federation)["north"].agreed == AgreedSize(images=64)
    enroll_silo(federation, larger, images=340_000)
    assert read_cards(federation)["north"].agreed == AgreedSize(images=340_000, patients=200_000)
    with pytest.raises(PolicyError, check=has_subject("card of silo north")):
        enroll_silo(federation, write_card(tmp_path, "north", key), patients=100)


def test_enroll_refuses_a_card_sealed_by_another_key_than_it_names(
    federation: Federation, tmp_path: Path
) -> None:
    path = write_card(tmp_path, "north", SigningKey.generate(), named=SigningKey.generate())
    with pytest.raises(DocumentError):
        enroll_silo(federation, path)


def test_enroll_refuses_a_node_key_that_is_none_and_would_stop_the_transfer_of_all(
    federation: Federation, tmp_path: Path
) -> None:
    path = write_card(
        tmp_path, "north", SigningKey.generate(), node="ecdsa-sha2-nistp256 " + "A" * 40
    )
    with pytest.raises(DocumentError, check=has_subject("enrolment card, node_key")):
        enroll_silo(federation, path)


def test_enroll_refuses_a_tampered_card(federation: Federation, tmp_path: Path) -> None:
    path = write_card(tmp_path, "north", SigningKey.generate())
    envelope = json.loads(path.read_bytes())
    envelope["payload"] = envelope["payload"].replace("north", "south")
    path.write_text(json.dumps(envelope, separators=(",", ":"), sort_keys=True))
    with pytest.raises((SignatureError, DocumentError)):
        enroll_silo(federation, path)
    assert not read_cards(federation)


def test_enroll_refuses_another_key_for_an_enrolled_silo(
    federation: Federation, tmp_path: Path
) -> None:
    enroll_silo(federation, write_card(tmp_path, "north", SigningKey.generate()))
    other = write_card(tmp_path, "north", SigningKey.generate(), node=OTHER_NODE)
    with pytest.raises(BusyError):
        enroll_silo(federation, other)


def test_enroll_refuses_another_spelling_of_a_node_key(
    federation: Federation, tmp_path: Path
) -> None:
    """The attack: another silo's node key, spelt so that it differs as text, takes over that silo's conversation."""
    enroll_silo(federation, write_card(tmp_path, "north", SigningKey.generate()))
    with pytest.raises(DocumentError, check=has_subject("enrolment card, node_key")):
        enroll_silo(
            federation, write_card(tmp_path, "south", SigningKey.generate(), node=f"{NODE}=")
        )


@pytest.mark.parametrize("kept", ["node key", "signing key"])
def test_enroll_refuses_a_card_that_keeps_one_public_key_of_a_silo_and_replaces_the_other(
    federation: Federation, tmp_path: Path, kept: str
) -> None:
    """The attack: the node key is public, so anybody can name it beside a signing key of their own."""
    key = SigningKey.generate()
    enroll_silo(federation, write_card(tmp_path, "north", key))
    if kept == "node key":
        forged = write_card(tmp_path, "north", SigningKey.generate())
    else:
        forged = write_card(tmp_path, "north", key, node=OTHER_NODE)
    with pytest.raises(BusyError):
        enroll_silo(federation, forged)
    assert (
        read_cards(federation)["north"].signing_key,
        read_cards(federation)["north"].node_key,
    ) == (
        str(key.public),
        NODE,
    )


def test_enroll_refuses_a_key_that_another_silo_holds(
    federation: Federation, tmp_path: Path
) -> None:
    key = SigningKey.generate()
    enroll_silo(federation, write_card(tmp_path, "north", key))
    with pytest.raises(BusyError):
        enroll_silo(federation, write_card(tmp_path, "south", key, node=OTHER_NODE))
    with pytest.raises(BusyError):
        enroll_silo(federation, write_card(tmp_path, "south", SigningKey.generate()))


def test_enroll_of_nothing_says_so(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        enroll_silo(federation, tmp_path / "none.json")
    (tmp_path / "junk.json").write_bytes(b"junk")
    with pytest.raises(ArchipelagoError):
        enroll_silo(federation, tmp_path / "junk.json")


def test_ledger_may_only_grow(federation: Federation) -> None:
    one = "1" * 64
    two = "2" * 64
    three = "3" * 64
    check_ledger(read_known_ledger(federation, "north"), "north", PLAN, (one,))
    record_ledger(federation, "north", PLAN, (one, two))
    for plan_id in (PLAN, NEXT_PLAN):
        check_ledger(read_known_ledger(federation, "north"), "north", plan_id, (one, two, three))
        for chain in ((), (one,), (one, three), (two, one, three)):
            with pytest.raises(LedgerError):
                check_ledger(read_known_ledger(federation, "north"), "north", plan_id, chain)
    check_ledger(read_known_ledger(federation, "south"), "south", PLAN, (three,))


def test_ledger_must_grow_for_another_plan(federation: Federation) -> None:
    """The attack: releases of a new plan that no debit stands for."""
    chain = ("1" * 64, "2" * 64)
    record_ledger(federation, "north", PLAN, chain)
    check_ledger(read_known_ledger(federation, "north"), "north", PLAN, chain)
    with pytest.raises(LedgerError):
        check_ledger(read_known_ledger(federation, "north"), "north", NEXT_PLAN, chain)


def test_cards_enrolled_before_are_opened_once_however_many_new_ones_come(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[bytes]()

    def count(data: bytes, *args: object) -> tuple[bytes, PublicKey]:
        opened.append(data)
        return open_sealed(data, *args)

    def enroll_new_silos(first: int, num: int) -> int:
        """Enroll so many silos together; return the number of cards whose signature was verified."""
        names = [f"silo{number}" for number in range(first, first + num)]
        paths = [write_card(tmp_path, name, SigningKey.generate(), node_key()) for name in names]
        opened.clear()
        enroll_silos(federation, [CardFile(path) for path in paths])
        return len(opened)

    monkeypatch.setattr(registry, "open_sealed", count)
    assert enroll_new_silos(0, 4) == 4
    # Those enrolled before and the new ones, each of them once.
    assert enroll_new_silos(4, 8) == 4 + 8
    assert len(read_cards(federation)) == 12


def test_two_new_silos_with_one_key_are_refused_together(
    federation: Federation, tmp_path: Path
) -> None:
    """The attack: one silo enrolls under two names, in one command, so that no card was there before the other."""
    key = SigningKey.generate()
    same_signing_key = [
        write_card(tmp_path, "north", key, NODE),
        write_card(tmp_path, "south", key, OTHER_NODE),
    ]
    with pytest.raises(BusyError, check=has_subject("silo south")):
        enroll_silos(federation, [CardFile(path) for path in same_signing_key])
    same_node_key = [
        write_card(tmp_path, "east", SigningKey.generate(), OTHER_NODE),
        write_card(tmp_path, "west", SigningKey.generate(), OTHER_NODE),
    ]
    with pytest.raises(BusyError, check=has_subject("silo west")):
        enroll_silos(federation, [CardFile(path) for path in same_node_key])
    # Each command kept the card before the one that it refused.
    assert list(read_cards(federation)) == ["east", "north"]


def test_card_is_not_read_from_another_folder_when_a_name_leads_there(
    federation: Federation, tmp_path: Path
) -> None:
    card = write_card(tmp_path, "north", SigningKey.generate())
    card.rename(federation.path / "north.json")
    with pytest.raises(MissingFileError):
        card_of(federation, "../north")
