"""`aggregator enroll`: several cards in one command, each compared once by the code that its operator reads out."""

import io
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aggregator.membership.registry import read_card_file, read_cards
from ddm.protocol.enrolment import CARD_KIND, AgreedSize, Card
from ddm.trust.comparison import CodeSubject, comparison_code
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from tests.support.commands import CommandResult, TypedAnswers, run_command
from tests.support.federation_keys import KeyedFederation

SILOS = ("east", "north", "west")


@pytest.fixture
def keyed(tmp_path: Path) -> KeyedFederation:
    """A federation without silos, and the cards of three."""
    other = KeyedFederation(tmp_path / "other")
    other.found()
    keyed = KeyedFederation(tmp_path / "keyed")
    keyed.found()
    for silo_id in SILOS:
        other.enroll(silo_id)
        card, _ = read_card_file(other.path / f"{silo_id}.card.json")
        keyed.silos[silo_id] = other.silos[silo_id]
        write_card(keyed, card)
    return keyed


def write_card(keyed: KeyedFederation, card: Card, key: SigningKey | None = None) -> Path:
    """Seal a card of a silo for this federation."""
    key = key or keyed.silos[card.silo_id]
    changes = {"root_digest": keyed.federation.root_digest, "signing_key": str(key.public)}
    path = keyed.path / f"{card.silo_id}.card.json"
    path.write_bytes(seal(card.model_copy(update=changes).encode(), CARD_KIND, key))
    return path


def codes_of(keyed: KeyedFederation) -> dict[str, str]:
    """The words that the operator of each silo reads out."""
    codes = {}
    for silo_id in SILOS:
        card, _ = read_card_file(keyed.path / f"{silo_id}.card.json")
        codes[silo_id] = comparison_code(card.digest, CodeSubject.CARD)
    return codes


def enroll(
    keyed: KeyedFederation, codes: Mapping[str, str], *words: object, silos: tuple[str, ...] = SILOS
) -> CommandResult:
    """Run the command with the cards of these silos."""
    cards = [keyed.path / f"{silo_id}.card.json" for silo_id in silos]
    options = [word for item in codes.items() for word in ("--code", "=".join(item))]
    return run_command("aggregator", "enroll", keyed.federation.path, *cards, *options, *words)


def enrolled(keyed: KeyedFederation) -> list[str]:
    return list(read_cards(keyed.federation))


def test_three_cards_are_enrolled_with_their_codes(keyed: KeyedFederation) -> None:
    codes = codes_of(keyed)
    result = enroll(keyed, codes)
    assert result.code == 0
    assert enrolled(keyed) == list(SILOS)
    # What was compared need not be compared again.
    assert not any(code in result.out for code in codes.values())


def test_card_that_somebody_replaced_on_its_way_is_refused_without_its_code(
    keyed: KeyedFederation,
) -> None:
    """The attack: another key, under the same name and with a larger size, in the place of the silo's card."""
    codes = codes_of(keyed)
    genuine, _ = read_card_file(keyed.path / "north.card.json")
    larger = genuine.model_copy(update={"agreed": AgreedSize(images=10**6)})
    forgeries = {"key": (genuine, SigningKey.generate()), "size": (larger, keyed.silos["north"])}
    for card, key in forgeries.values():
        write_card(keyed, card, key)
        result = enroll(keyed, codes)
        assert result.code == 12
        forged, _ = read_card_file(keyed.path / "north.card.json")
        assert comparison_code(forged.digest, CodeSubject.CARD) not in result.out + result.err
        assert forged.digest not in result.out + result.err
        # East came before, with its own code; nothing is undone.
        assert enrolled(keyed) == ["east"]


def test_command_goes_on_where_a_wrong_code_ended_it_and_asks_for_no_code_twice(
    keyed: KeyedFederation,
) -> None:
    codes = codes_of(keyed)
    assert enroll(keyed, codes | {"west": codes["east"]}).code == 12
    assert enrolled(keyed) == ["east", "north"]
    assert enroll(keyed, {"west": codes["west"]}).code == 0
    assert enrolled(keyed) == list(SILOS)
    assert enroll(keyed, {}).code == 0


def test_nobody_is_enrolled_unasked_where_there_is_no_terminal(
    keyed: KeyedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    result = enroll(keyed, {})
    assert result.code == 3
    assert "--code 'east=WORDS'" in result.err
    assert enrolled(keyed) == []


def test_person_at_a_terminal_types_the_codes_and_corrects_a_slip(
    keyed: KeyedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = codes_of(keyed)
    answers = ["five words are not enough", codes["east"], codes["north"].upper(), codes["west"]]
    monkeypatch.setattr(sys, "stdin", TypedAnswers(*answers))
    result = enroll(keyed, {})
    assert result.code == 0
    assert enrolled(keyed) == list(SILOS)
    assert "north: at most 1024 images" in result.out


def test_yes_enrolls_without_a_code_and_prints_it_for_later(keyed: KeyedFederation) -> None:
    result = enroll(keyed, {}, "--yes", "--digests")
    assert result.code == 0
    assert enrolled(keyed) == list(SILOS)
    assert all(code in result.out for code in codes_of(keyed).values())
    card, _ = read_card_file(keyed.path / "east.card.json")
    assert card.digest in result.out
    assert keyed.silos["east"].public.fingerprint in result.out


def test_code_of_a_card_that_was_enrolled_unseen_is_compared_when_it_comes(
    keyed: KeyedFederation,
) -> None:
    """The attack: a forged card is enrolled with --yes, and the code of the true one comes by telephone later."""
    true_code = codes_of(keyed)["north"]
    genuine, _ = read_card_file(keyed.path / "north.card.json")
    write_card(keyed, genuine, SigningKey.generate())
    assert enroll(keyed, {}, "--yes", silos=("north",)).code == 0
    for code in (true_code, true_code.upper(), "", "zoo"):
        result = enroll(keyed, {"north": code}, silos=("north",))
        assert result.code in (3, 12)
        assert "is enrolled with this card already" not in result.out
    assert enroll(keyed, {"north": codes_of(keyed)["north"]}, silos=("north",)).code == 0


def test_code_of_a_rotated_card_is_compared_where_one_is_given(keyed: KeyedFederation) -> None:
    codes = codes_of(keyed)
    assert enroll(keyed, codes).code == 0
    rotated_path = keyed.rotate("north")
    (keyed.path / "north.card.json").write_bytes(rotated_path.read_bytes())
    assert enroll(keyed, {"north": codes["east"]}, silos=("north",)).code == 12
    assert enroll(keyed, {"north": codes_of(keyed)["north"]}, silos=("north",)).code == 0


def test_code_of_no_card_and_two_cards_of_one_silo_are_refused_before_anything(
    keyed: KeyedFederation,
) -> None:
    codes = codes_of(keyed)
    assert enroll(keyed, codes, silos=("east", "north")).code == 3
    assert enroll(keyed, {"east": codes["east"]}, silos=("east", "east")).code == 3
    assert enroll(keyed, codes, "--code", codes["east"]).code == 3
    assert enroll(keyed, codes, "--images", 100).code == 31
    assert enrolled(keyed) == []


def test_operator_is_told_what_a_late_silo_waits_for(keyed: KeyedFederation) -> None:
    codes = codes_of(keyed)
    early = {silo_id: codes[silo_id] for silo_id in ("east", "north")}
    assert "does not name" not in enroll(keyed, early, silos=tuple(early)).out
    keyed.plan(1)
    assert "does not name" not in enroll(keyed, early, silos=tuple(early)).out
    late = enroll(keyed, codes)
    assert late.code == 0, late.err
    assert "does not name west. For a plan that does:" in late.out
    assert f"aggregator plan {keyed.federation.path} --recipe FILE --carry current" in late.out
    assert "until then they hear nothing" in late.out
