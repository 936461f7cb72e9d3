"""A silo that is removed: nothing of its counts from then on, and it cannot come back with the same key."""

import json
import shutil
from pathlib import Path

import pytest

from aggregator.keys.removal import remove_silo
from aggregator.membership.registry import RemovalRecord, active_cards, read_card, read_cards
from ddm.errors import (
    ArchipelagoError,
    MissingFileError,
    PolicyError,
    RoleError,
    SetupError,
    UnlistedFileError,
)
from ddm.trust.keys import SigningKey
from ddm.trust.verify import verify_release
from tests.conftest import PublishedRelease
from tests.support.crashes import Crash
from tests.support.federation_keys import PASSPHRASE, KeyedFederation

pytestmark = pytest.mark.usefixtures("short_pages")


def test_removed_silo_leaves_the_registry_the_delegations_and_the_next_version(
    keyed: KeyedFederation,
) -> None:
    card = (keyed.federation.registry / "east.json").read_bytes()
    removal = remove_silo(keyed.federation, "east", "left the federation", PASSPHRASE)
    assert (removal.plan_id, removal.missing) == ("digits-00000001", [])
    assert set(read_cards(keyed.federation)) == {"north"}
    (path,) = (keyed.federation.registry / "removed").iterdir()
    record = RemovalRecord.parse(path.read_bytes(), subject=path.name)
    assert (record.silo_id, record.reason, record.card) == (
        "east",
        "left the federation",
        card.decode(),
    )
    assert read_card(record.card.encode()).signing_key == str(keyed.silos["east"].public)
    assert set(keyed.repository.delegates().silos) == {"north"}
    plan, _ = keyed.federation.current_plan()
    assert list(active_cards(keyed.federation, plan)) == ["north"]
    verified = verify_release(
        keyed.publish(1, keyed.path / "second"), keyed.root, state=keyed.path / "state"
    )
    assert set(verified.silo_keys) == {"north"}


def test_what_a_removed_silo_signed_is_refused_with_the_new_metadata(
    keyed: KeyedFederation,
) -> None:
    """The attacks: its files and its metadata put back into the new release; listed again by a thief of online."""
    remove_silo(keyed.federation, "east", "stolen key", PASSPHRASE)
    second = keyed.publish(1, keyed.path / "second")
    verify_release(second, keyed.root, state=None)
    role = "digits-00000001.east.json"
    for name in (f"metadata/{role}", "targets/digits-00000001/silos/east/submission.json"):
        attacked = Path(shutil.copytree(second, keyed.path / f"attacked {Path(name).name}"))
        (attacked / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(keyed.path / "first" / name, attacked / name)
        with pytest.raises(UnlistedFileError):
            verify_release(attacked, keyed.root, state=None)
    with pytest.raises(RoleError):
        keyed.publish(1, keyed.path / "third", ("east", "north"))


def test_last_silo_of_a_plan_can_be_removed_and_the_next_plan_signed(
    keyed: KeyedFederation,
) -> None:
    for silo_id in ("east", "north"):
        remove_silo(keyed.federation, silo_id, "ended", PASSPHRASE)
    with pytest.raises(SetupError) as refused:
        keyed.federation.current_plan()
    assert "aggregator plan" in refused.value.remedy
    keyed.enroll("west")
    keyed.plan(2, ("west",))
    assert keyed.federation.current_plan()[0].silos == ("west",)


def test_silo_outside_the_plan_is_removed_without_a_signature(keyed: KeyedFederation) -> None:
    keyed.enroll("west")
    before = (keyed.federation.tuf / "targets.json").read_bytes()
    assert remove_silo(keyed.federation, "west", "never came", PASSPHRASE).plan_id is None
    assert (keyed.federation.tuf / "targets.json").read_bytes() == before
    assert set(read_cards(keyed.federation)) == {"east", "north"}


def test_removed_silo_comes_back_with_new_keys_only_and_takes_part_from_the_next_plan(
    keyed: KeyedFederation,
) -> None:
    old = keyed.silos["east"]
    remove_silo(keyed.federation, "east", "laptop stolen", PASSPHRASE)
    for name in ("east", "west"):
        with pytest.raises(PolicyError, match="never belonged to a removed silo"):
            keyed.enroll(name, old)
    keyed.enroll("east", SigningKey.generate())
    plan, _ = keyed.federation.current_plan()
    assert list(active_cards(keyed.federation, plan)) == ["north"]
    keyed.plan(2)
    plan, _ = keyed.federation.current_plan()
    assert list(active_cards(keyed.federation, plan)) == ["east", "north"]


def test_removal_cut_short_after_the_card_is_finished_by_the_same_command(
    keyed: KeyedFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("aggregator.keys.removal.conduct_ceremony", stop)
        remove_silo(keyed.federation, "east", "stolen key", PASSPHRASE)
    plan, _ = keyed.federation.current_plan()
    assert list(active_cards(keyed.federation, plan)) == ["north"]
    assert set(keyed.repository.delegates().silos) == {"east", "north"}
    remove_silo(keyed.federation, "east", "stolen key", PASSPHRASE)
    assert set(keyed.repository.delegates().silos) == {"north"}
    assert len(list((keyed.federation.registry / "removed").iterdir())) == 1


def test_removal_of_a_stranger_or_without_a_reason_is_refused(keyed: KeyedFederation) -> None:
    with pytest.raises(MissingFileError):
        remove_silo(keyed.federation, "west", "who", PASSPHRASE)
    with pytest.raises(SetupError):
        remove_silo(keyed.federation, "east", "  ", PASSPHRASE)
    assert set(read_cards(keyed.federation)) == {"east", "north"}


def test_damaged_record_of_a_removal_lets_nobody_in(keyed: KeyedFederation) -> None:
    remove_silo(keyed.federation, "east", "left", PASSPHRASE)
    (path,) = (keyed.federation.registry / "removed").iterdir()
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"card": "{}"}))
    with pytest.raises(ArchipelagoError):
        keyed.enroll("west")


def test_ensemble_is_published_without_a_removed_silo_and_its_readers_accept_it(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    remove_silo(tiny.federation, "east", "left the federation", PASSPHRASE)
    tiny.publish(tmp_path / "next")
    root = tiny.root.read_bytes()
    assert set(verify_release(tmp_path / "next", root, state=None).silo_keys) == {"north"}
    assert set(verify_release(published.release, root, state=None).silo_keys) == {"east", "north"}
    assert not list((tmp_path / "next").rglob("*east*"))
