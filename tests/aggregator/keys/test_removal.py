"""A silo that is removed: nothing of its counts from then on, and it cannot come back with the same key."""

import json
import shutil
from pathlib import Path

import pytest

from aggregator.keys.removal import remove
from aggregator.membership.registry import Removed, cards, read_card, taking_part
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
from tests.conftest import Published
from tests.support.federation_keys import PASSPHRASE, Offices


@pytest.fixture(scope="session")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> Offices:
    offices = Offices(tmp_path_factory.mktemp("removal"))
    offices.found()
    for silo_id in ("east", "north"):
        offices.enroll(silo_id)
    offices.plan(1)
    offices.publish(1, offices.path / "first")
    return offices


@pytest.fixture
def offices(founded_once: Offices, tmp_path: Path) -> Offices:
    return founded_once.copy(tmp_path)


def test_removed_silo_leaves_the_registry_the_delegations_and_the_next_version(offices: Offices) -> None:
    card = (offices.federation.registry / "east.json").read_bytes()
    removal = remove(offices.federation, "east", "left the federation", PASSPHRASE)
    assert (removal.plan_id, removal.missing) == ("digits-00000001", [])
    assert set(cards(offices.federation)) == {"north"}
    (path,) = (offices.federation.registry / "removed").iterdir()
    record = Removed.parse(path.read_bytes(), subject=path.name)
    assert (record.silo_id, record.reason, record.card) == ("east", "left the federation", card.decode())
    assert read_card(record.card.encode()).signing_key == str(offices.silos["east"].public)
    assert set(offices.repository.delegates().silos) == {"north"}
    plan, _ = offices.federation.current_plan()
    assert list(taking_part(offices.federation, plan)) == ["north"]
    verified = verify_release(offices.publish(1, offices.path / "second"), offices.root, state=offices.path / "state")
    assert set(verified.silo_keys) == {"north"}


def test_what_a_removed_silo_signed_is_refused_with_the_new_metadata(offices: Offices) -> None:
    """The attacks: its files and its metadata put back into the new release; listed again by a thief of online."""
    remove(offices.federation, "east", "stolen key", PASSPHRASE)
    second = offices.publish(1, offices.path / "second")
    verify_release(second, offices.root, state=None)
    role = "digits-00000001.east.json"
    for name in (f"metadata/{role}", "targets/digits-00000001/silos/east/submission.json"):
        attacked = Path(shutil.copytree(second, offices.path / f"attacked {Path(name).name}"))
        (attacked / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(offices.path / "first" / name, attacked / name)
        with pytest.raises(UnlistedFileError):
            verify_release(attacked, offices.root, state=None)
    with pytest.raises(RoleError):
        offices.publish(1, offices.path / "third", ("east", "north"))


def test_last_silo_of_a_plan_can_be_removed_and_the_next_plan_signed(offices: Offices) -> None:
    for silo_id in ("east", "north"):
        remove(offices.federation, silo_id, "ended", PASSPHRASE)
    with pytest.raises(SetupError) as refused:
        offices.federation.current_plan()
    assert "aggregator plan" in refused.value.remedy
    offices.enroll("west")
    offices.plan(2, ("west",))
    assert offices.federation.current_plan()[0].silos == ("west",)


def test_silo_outside_the_plan_is_removed_without_a_signature(offices: Offices) -> None:
    offices.enroll("west")
    before = (offices.federation.tuf / "targets.json").read_bytes()
    assert remove(offices.federation, "west", "never came", PASSPHRASE).plan_id is None
    assert (offices.federation.tuf / "targets.json").read_bytes() == before
    assert set(cards(offices.federation)) == {"east", "north"}


def test_removed_silo_comes_back_with_new_keys_only_and_takes_part_from_the_next_plan(offices: Offices) -> None:
    old = offices.silos["east"]
    remove(offices.federation, "east", "laptop stolen", PASSPHRASE)
    for name in ("east", "west"):
        with pytest.raises(PolicyError, match="never belonged to a removed silo"):
            offices.enroll(name, old)
    offices.enroll("east", SigningKey.generate())
    plan, _ = offices.federation.current_plan()
    assert list(taking_part(offices.federation, plan)) == ["north"]
    offices.plan(2)
    plan, _ = offices.federation.current_plan()
    assert list(taking_part(offices.federation, plan)) == ["east", "north"]


def test_removal_cut_short_after_the_card_is_finished_by_the_same_command(
    offices: Offices, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("aggregator.keys.removal.conduct", stop)
        remove(offices.federation, "east", "stolen key", PASSPHRASE)
    plan, _ = offices.federation.current_plan()
    assert list(taking_part(offices.federation, plan)) == ["north"]
    assert set(offices.repository.delegates().silos) == {"east", "north"}
    remove(offices.federation, "east", "stolen key", PASSPHRASE)
    assert set(offices.repository.delegates().silos) == {"north"}
    assert len(list((offices.federation.registry / "removed").iterdir())) == 1


def test_removal_of_a_stranger_or_without_a_reason_is_refused(offices: Offices) -> None:
    with pytest.raises(MissingFileError):
        remove(offices.federation, "west", "who", PASSPHRASE)
    with pytest.raises(SetupError):
        remove(offices.federation, "east", "  ", PASSPHRASE)
    assert set(cards(offices.federation)) == {"east", "north"}


def test_damaged_record_of_a_removal_lets_nobody_in(offices: Offices) -> None:
    remove(offices.federation, "east", "left", PASSPHRASE)
    (path,) = (offices.federation.registry / "removed").iterdir()
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"card": "{}"}))
    with pytest.raises(ArchipelagoError):
        offices.enroll("west")


def test_ensemble_is_published_without_a_removed_silo_and_its_readers_accept_it(
    published: Published, tmp_path: Path
) -> None:
    tiny = published.tiny
    remove(tiny.federation, "east", "left the federation", PASSPHRASE)
    tiny.publish(tmp_path / "next")
    root = tiny.root.read_bytes()
    assert set(verify_release(tmp_path / "next", root, state=None).silo_keys) == {"north"}
    assert set(verify_release(published.release, root, state=None).silo_keys) == {"east", "north"}
    assert not list((tmp_path / "next").rglob("*east*"))
