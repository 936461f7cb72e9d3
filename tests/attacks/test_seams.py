"""Attacks and accidents where two protections meet: sizes and rotations, ceremonies, memories, looks and locks.

Each protection has tests of its own. Here one of them changes what the other relies on.
"""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

import aggregator.keys.removal
from aggregator.keys.removal import remove_silo
from aggregator.keys.silo_rotation import cards_for_next_plan, take_rotation
from aggregator.membership.registry import card_of, enroll_silo, read_card, signing_key
from ddm.errors import ArchipelagoError, BusyError, PolicyError, SetupError
from ddm.io.locks import lock_if_unread
from ddm.protocol.enrolment import CARD_KIND, AgreedSize, RotatedCard
from ddm.publishing.log import TransparencyLog
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from ddm.trust.log.entries import entry_subject, parse_entry
from ddm.trust.silo_key_store import SiloKeyStore
from ddm.trust.verify import KnownSiloKeys, verify_release
from ddm.trust.version_store import VersionStore
from silo.plan.attempts import MAX_LOST_ATTEMPTS, guard_attempt
from silo.worker.worker import Worker
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, PlannedFederation
from tests.support.federation_keys import KeyedFederation


@pytest.fixture(scope="module")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    keyed = KeyedFederation(tmp_path_factory.mktemp("keyed"))
    keyed.found(targets=keyed.hold("dan", threshold=1))
    keyed.sign("targets", "dan")
    keyed.complete()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    return keyed


@pytest.fixture
def keyed(founded_once: KeyedFederation, tmp_path: Path) -> KeyedFederation:
    """A federation of two silos, in which `dan` signs every plan."""
    return founded_once.copy(tmp_path / "keyed")


def start(keyed: KeyedFederation, number: int) -> None:
    """Sign a plan and put it into force."""
    keyed.plan(number)
    keyed.sign("targets", "dan")
    keyed.complete()


def take_in(keyed: KeyedFederation, silo_id: str) -> None:
    """Rotate a silo's key, and take the new card in."""
    take_rotation(
        keyed.federation, RotatedCard.parse(keyed.rotate(silo_id).read_bytes(), subject="x")
    )


def plain_card(keyed: KeyedFederation, silo_id: str, key: SigningKey, images: int) -> Path:
    """A card without rotations, which whoever has the key can make."""
    card = card_of(keyed.federation, silo_id)
    changed = card.model_copy(
        update={
            "signing_key": str(key.public),
            "agreed": AgreedSize(images=images, patients=images),
        }
    )
    path = keyed.path / "plain.json"
    path.write_bytes(seal(changed.encode(), CARD_KIND, key))
    return path


# Sizes and rotations


def test_size_of_a_card_counts_or_is_refused_although_a_rotated_card_waits(
    keyed: KeyedFederation,
) -> None:
    """The operator lowers a silo's size; the next plan must not take the old one from the rotated card."""
    old = keyed.silos["east"]
    take_in(keyed, "east")
    for name, key in (("waits", old), ("in force", keyed.silos["east"])):
        with case(name=name):
            with pytest.raises(BusyError, check=has_subject("silo east")):
                enroll_silo(keyed.federation, plain_card(keyed, "east", key, 512))
            assert cards_for_next_plan(keyed.federation, ["east"])["east"].agreed.images == 1024
            if name == "waits":
                start(keyed, 1)
    with_rotations = RotatedCard.parse((keyed.path / "east.card.json").read_bytes(), subject="x")
    card = plain_card(keyed, "east", keyed.silos["east"], 512).read_text()
    take_rotation(keyed.federation, with_rotations.model_copy(update={"card": card}))
    assert cards_for_next_plan(keyed.federation, ["east"])["east"].agreed.images == 512


# Ceremonies that wait


def test_plan_that_waits_for_holders_is_refused_where_an_agreed_size_changed_meanwhile(
    keyed: KeyedFederation,
) -> None:
    keyed.plan(1)
    keyed.sign("targets", "dan")
    enroll_silo(keyed.federation, plain_card(keyed, "east", keyed.silos["east"], 512))
    with pytest.raises(PolicyError, match="agreed"):
        keyed.complete()
    enroll_silo(keyed.federation, plain_card(keyed, "east", keyed.silos["east"], 1024))
    keyed.complete()
    assert keyed.federation.current_plan()[0].agreed["east"].images == 1024


def test_plan_that_waits_for_holders_brings_no_key_of_a_removed_silo_back(
    keyed: KeyedFederation,
) -> None:
    """The silo came back with other keys and rotated these as well, while the plan with its first ones waited."""
    take_in(keyed, "east")
    gone = keyed.silos["east"]
    keyed.plan(1)
    keyed.sign("targets", "dan")
    remove_silo(keyed.federation, "east", "stolen laptop", PASSPHRASE)
    keyed.enroll("east")
    take_in(keyed, "east")
    with pytest.raises(PolicyError, match="east"):
        keyed.complete()
    assert signing_key(card_of(keyed.federation, "east")) != gone.public


# The log


@pytest.mark.parametrize("rotated", [False, True])
def test_log_says_that_a_silo_was_removed_only_where_nothing_but_its_removal_can_follow(
    keyed: KeyedFederation, monkeypatch: pytest.MonkeyPatch, rotated: bool
) -> None:
    def cut_short(*arguments: object) -> None:
        raise KeyboardInterrupt

    if rotated:
        take_in(keyed, "east")
        start(keyed, 1)
    words = ("aggregator", "enroll", "--yes", keyed.federation.path, keyed.path / "east.card.json")
    before = said(keyed, "east")
    for step in ("write_atomic", "append_entries", "forget_rotations"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(aggregator.keys.removal, step, cut_short)
            remove_silo(keyed.federation, "east", "a mistake", PASSPHRASE)
        with case(step=step):
            assert run_command(*words).code == (0 if step == "write_atomic" else 31)
            assert said(keyed, "east") == (
                before if step != "forget_rotations" else [*before, "silo_removed"]
            )
    with suppress(ArchipelagoError):  # with a plan, the holders' signatures are missing
        remove_silo(keyed.federation, "east", "a mistake", PASSPHRASE)
    assert said(keyed, "east") == [*before, "silo_removed"]
    assert not (keyed.federation.registry / "east.json").exists()


def said(keyed: KeyedFederation, silo_id: str) -> list[str]:
    """What the log says of a silo, entry after entry."""
    entries = [parse_entry(line, "log") for line in TransparencyLog.load(keyed.federation).entries]
    return [entry.kind for entry in entries if entry_subject(entry) == ("silo", silo_id)]


def test_folder_older_than_its_public_log_starts_no_plan_that_silos_would_see_as_a_second_history(
    keyed: KeyedFederation,
) -> None:
    """An honest operator restores an old backup beside a public copy of the log that went on."""
    backup = shutil.copytree(keyed.federation.path, keyed.path / "backup")
    start(keyed, 1)
    public = keyed.federation.path / "log" / "public"
    shutil.rmtree(backup / "log" / "public")
    shutil.copytree(public, backup / "log" / "public")
    shutil.rmtree(keyed.federation.path)
    backup.rename(keyed.federation.path)
    keyed.plan(2)
    keyed.sign("targets", "dan")
    with pytest.raises(SetupError, check=has_subject("checkpoint")):
        keyed.complete()
    assert not (keyed.federation.path / "plans" / "current.json").exists()


# A reader's memories


def test_consent_is_remembered_or_asked_for_again_however_the_reader_is_cut_short(
    keyed: KeyedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consent that was given, used and forgotten would leave the old key, perhaps a thief's, as the known one."""
    state = tmp_path / "state"
    old = keyed.silos["east"].public.fingerprint
    start(keyed, 1)
    verify_release(keyed.publish(1, tmp_path / "first"), keyed.root, state=state)
    remove_silo(keyed.federation, "east", "lost its key", PASSPHRASE)
    keyed.sign("targets", "dan")
    keyed.complete()
    keyed.enroll("east")
    start(keyed, 2)
    second = keyed.publish(2, tmp_path / "second")
    new = keyed.silos["east"].public.fingerprint

    def cut_short(*arguments: object) -> None:
        raise KeyboardInterrupt

    for memory in (SiloKeyStore, VersionStore):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(memory, "record", cut_short)
            verify_release(
                second, keyed.root, state=state, known_keys=KnownSiloKeys(accepted={"east": new})
            )
        with case(memory=memory.__name__):
            try:
                notices = verify_release(second, keyed.root, state=state).notices
            except ArchipelagoError as error:
                assert "--accept-key" in str(error.remedy)
                continue
            assert notices == (), f"the key before, {old}, is still the one remembered"


# Looks at plans


def test_plan_that_ends_the_process_is_given_up_although_others_are_looked_at_between(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    """The attack: a courier puts an older, worthless bundle beside it, at which the worker looks first each time."""
    site = planned_once.tiny.copy(tmp_path / "copy").sites["north"]
    for _ in range(MAX_LOST_ATTEMPTS):
        with pytest.raises(PolicyError), guard_attempt(site, "worthless-00000001"):
            raise PolicyError("plan", expected="x", got="y")
        with guard_attempt(site, "deadly-00000002"):
            kept = {
                path: path.read_bytes() for path in site.private.rglob("*look*") if path.is_file()
            }
            kept |= {path: path.read_bytes() for path in site.private.glob("attempts/*")}
        for path, data in kept.items():  # the process ended in the look
            path.write_bytes(data)
    with (
        pytest.raises(ArchipelagoError, check=has_subject("plan deadly-")),
        guard_attempt(site, "deadly-00000002"),
    ):
        pass


def test_full_disk_of_the_site_refuses_no_plan(
    planned_once: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    shutil.rmtree(tiny.sites["north"].inbox / planned_once.plan_id, ignore_errors=True)
    tiny.deliver_plan("north", planned_once.plan_id)

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("ddm.trust.version_store.write_atomic", full)
        tiny.work("north", until="plan_refused")
    assert tiny.work("north", until="plan_accepted").plan_id == planned_once.plan_id


def test_plan_that_the_courier_tidies_just_now_is_looked_at_again(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    """The courier holds the folder for as long as it verifies the bundle, with every message that comes."""
    tiny, plan_id = planned_once.copy(tmp_path / "copy")
    site = tiny.sites["north"]
    shutil.rmtree(site.inbox / plan_id, ignore_errors=True)
    tiny.deliver_plan("north", plan_id)
    worker = Worker(site, tiny.key("north"), lambda state: None)
    worker.begin()
    with lock_if_unread(site.inbox / plan_id) as idle:
        assert idle
        worker.step()
        assert worker.state.plan_id is None
    worker.step()
    assert worker.state.state == "plan_accepted"


# What a silo hands out


def test_rotated_card_can_be_read_by_whoever_takes_it_to_the_aggregator(
    planned_once: PlannedFederation, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    secret = tmp_path / "secret"
    secret.write_bytes(PASSPHRASE + b"\n")
    before = os.umask(0o077)  # as the program sets it
    request.addfinalizer(lambda: os.umask(before))
    for name in ("enroll", "rotate"):
        out = tmp_path / f"{name}.json"
        result = run_command(
            "silo", name, tiny.sites["north"].path, "--out", out, "--passphrase-file", secret
        )
        assert result.code == 0
        assert stat.S_IMODE(out.stat().st_mode) == 0o644
    assert (
        read_card(RotatedCard.parse(out.read_bytes(), subject="x").card.encode()).silo_id == "north"
    )
