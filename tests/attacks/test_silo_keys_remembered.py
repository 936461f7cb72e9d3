"""Attacks by whoever holds the targets key: a key of their own in a silo's place, for readers and for the silo itself.

A change that the silo's old key announced passes, over several rotations too; every other change asks the reader.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.membership.registry import read_card
from ddm.errors import (
    ArchipelagoError,
    DocumentError,
    FederationError,
    ReplayError,
    SignatureError,
)
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.enrolment import CARD_KIND, KeyHistory, KeyRotation, RotatedCard
from ddm.publishing.keys import load_key
from ddm.trust.envelope import seal
from ddm.trust.key_rotation import open_chain, open_rotation, seal_rotation
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.paths import KEY_HISTORY
from ddm.trust.repository import Repository
from ddm.trust.silo_role import read_silo_metadata, sign_silo_metadata
from ddm.trust.verify import KnownSiloKeys, VerifiedRelease, verify_release
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    PlannedFederation,
    TinyFederation,
    write_policy,
)
from tests.support.federation_keys import KeyedFederation
from tests.support.publishing import publish_next_version, publish_short_pages

# Readers


def put_in_place(published: PublishedRelease, silo_id: str, thief: SigningKey) -> None:
    """What the holder of `targets` at the aggregator does: enroll a key of their own under the name of a silo."""
    federation = published.tiny.federation
    plan_id = published.plan_id
    card_path = federation.registry / f"{silo_id}.json"
    card = read_card(card_path.read_bytes()).model_copy(update={"signing_key": str(thief.public)})
    card_path.write_bytes(seal(card.encode(), CARD_KIND, thief))
    signed = federation.accepted / plan_id / silo_id / "metadata" / f"{plan_id}.{silo_id}.json"
    repository = Repository(federation.tuf)
    delegates = repository.delegates()
    old = delegates.silos[silo_id]
    role = {"root_digest": federation.root_digest, "now": now_utc()}
    version, files = read_silo_metadata(
        signed.read_bytes(),
        plan_id=plan_id,
        silo_id=silo_id,
        key=old,
        **role,  # type: ignore[arg-type]
    )
    signed.write_bytes(
        sign_silo_metadata(plan_id, silo_id, files, thief, version=version + 1, **role)  # type: ignore[arg-type]
    )
    targets = repository.next_targets(
        replace(delegates, silos={**delegates.silos, silo_id: thief.public}), now_utc()
    )
    repository.renew(
        targets=sign_metadata(targets, [load_key(federation, "targets", PASSPHRASE)]),
        online_key=load_key(federation, "online", PASSPHRASE),
        now=now_utc(),
    )


def test_key_put_in_a_silos_place_is_refused_by_every_command_until_the_reader_consents(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_short_pages(monkeypatch)
    look = ("--root", published.root, "--state", tmp_path / "state")
    assert run_command("ddm", "verify", published.release, *look).code == 0
    thief = SigningKey.generate()
    swapped = tmp_path / "swapped"
    put_in_place(published, "east", thief)
    publish_next_version(published.tiny, swapped, renew=True)
    fingerprint = thief.public.fingerprint
    own: dict[str, tuple[object, ...]] = {
        "verify": (),
        "info": ("--json",),
        "sample": ("--num", 1, "--steps", 1, "--out", tmp_path / "a.png"),
        "distill": ("--out", tmp_path / "student.safetensors", "--num", 1, "--steps", 1),
    }
    for name, options in own.items():
        with case(command=name):
            refused = run_command("ddm", name, swapped, *look, *options)
            assert refused.code == 11
            assert "silo east" in refused.err
            assert f"--accept-key east={fingerprint}" in refused.err
    assert (
        run_command("ddm", "verify", swapped, *look, "--accept-key", f"east={'0' * 64}").code == 11
    )
    assert (
        run_command("ddm", "verify", swapped, *look, "--accept-key", f"north={fingerprint}").code
        == 11
    )
    assert run_command("ddm", "verify", swapped, *look, "--accept-key", "east").code == 3
    # nothing of what was refused is remembered
    assert run_command("ddm", "verify", published.release, *look).code == 0
    result = run_command(
        "ddm", "sample", swapped, *look, *own["sample"], "--accept-key", f"east={fingerprint}"
    )
    assert result.code == 0
    assert (
        f"note: silo east has another key than remembered, which you accepted: {fingerprint}"
        in result.err
    )
    result = run_command("ddm", "verify", swapped, *look)
    assert (result.code, result.err) == (0, "")


def test_reader_who_pins_the_new_key_has_consented_to_it(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_short_pages(monkeypatch)
    look = ("--root", published.root, "--state", tmp_path / "state")
    assert run_command("ddm", "verify", published.release, *look).code == 0
    new = SigningKey.generate()
    put_in_place(published, "east", new)
    publish_next_version(published.tiny, tmp_path / "swapped", renew=True)
    pin = ("--silo-key", f"east={new.public.fingerprint}")
    assert run_command("ddm", "verify", tmp_path / "swapped", *look, *pin).code == 0
    assert run_command("ddm", "verify", tmp_path / "swapped", *look).code == 0


@pytest.fixture(scope="module")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    return KeyedFederation.published(tmp_path_factory.mktemp("keyed"))


@pytest.fixture
def keyed(founded_once: KeyedFederation, tmp_path: Path) -> KeyedFederation:
    """A federation of two silos, whose first release is `first`."""
    return founded_once.copy(tmp_path / "keyed")


@pytest.fixture
def read(keyed: KeyedFederation, tmp_path: Path) -> Callable[..., VerifiedRelease]:
    """A reader with a memory; one of another name has another."""

    def verified(release: Path, name: str = "reader", **options: object) -> VerifiedRelease:
        return verify_release(release, keyed.root, state=tmp_path / name, **options)  # type: ignore[arg-type]

    return verified


def take(keyed: KeyedFederation, path: Path) -> object:
    """Take in what a silo handed out, with the command."""
    return run_command("aggregator", "enroll", "--yes", keyed.federation.path, path).code


def test_key_that_its_old_key_announced_passes_with_a_note_over_several_rotations_too(
    keyed, read, tmp_path
) -> None:
    assert read(keyed.path / "first").notices == ()
    read(keyed.path / "first", "seldom")
    assert take(keyed, keyed.rotate("east")) == 0
    keyed.plan(2)
    second = keyed.publish(2, tmp_path / "second")
    new = keyed.silos["east"].public.fingerprint
    assert read(second).notices == (
        f"silo east changed its key, as its old key announced; from now on: {new}",
    )
    assert read(second).notices == ()
    keyed.rotate("east")
    assert take(keyed, keyed.rotate("east")) == 0
    assert take(keyed, keyed.path / "east.card.json") == 0
    keyed.plan(3)
    third = keyed.publish(3, tmp_path / "third")
    for name in ("reader", "seldom"):
        with case(name=name):
            assert "as its old key announced" in read(third, name).notices[0]
    # A release that was verified before is what it was, and its key does not come back.
    assert "earlier key, as you verified before" in read(keyed.path / "first").notices[0]
    assert read(third).notices == ()


def test_old_key_is_refused_after_its_rotation(keyed, read, tmp_path) -> None:
    """The attack: whoever stole the old key, and holds `targets`, signs with it once the silo has another."""
    stolen = keyed.silos["east"]
    read(keyed.path / "first")
    take(keyed, keyed.rotate("east"))
    keyed.plan(2)
    read(keyed.publish(2, tmp_path / "second"))
    removed = run_command(
        "aggregator",
        "remove",
        keyed.federation.path,
        "east",
        "--reason",
        "x",
        "--passphrase-file",
        secret(tmp_path),
    )
    assert removed.code == 0
    shutil.rmtree(keyed.federation.registry / "removed")
    keyed.enroll("east", stolen)
    keyed.plan(3)
    third = keyed.publish(3, tmp_path / "third")
    with pytest.raises(SignatureError, check=has_subject("silo east")):
        read(third)
    accepted = read(third, known_keys=KnownSiloKeys(accepted={"east": stolen.public.fingerprint}))
    assert "which you accepted" in accepted.notices[0]


def secret(folder: Path) -> Path:
    """A file with the passphrase."""
    path = folder / "secret"
    path.write_bytes(PASSPHRASE + b"\n")
    return path


def republished(keyed: KeyedFederation, release: Path, history: KeyHistory | None) -> Path:
    """Put another history of keys into a release, as the aggregator can."""
    plan_id = next((release / "targets").iterdir()).name
    path = release / "targets" / plan_id / KEY_HISTORY
    path.unlink(missing_ok=True)
    if history is not None:
        path.write_bytes(history.encode())
    names = ("manifest.json", "router.safetensors", *([KEY_HISTORY] if history else []))
    described = {name: File.of(name, path.parent / name) for name in names}
    roles = {
        role.name.split(".")[1]: role.read_bytes()
        for role in (release / "metadata").glob(f"{plan_id}.*.json")
    }
    keyed.repository.publish(
        plan_id,
        roles,
        {f"{plan_id}/{name}": (file.bytes, file.digest) for name, file in described.items()},
        release_key=load_key(keyed.federation, "release", PASSPHRASE),
        online_key=load_key(keyed.federation, "online", PASSPHRASE),
        now=now_utc(),
    )
    shutil.rmtree(release / "metadata")
    keyed.repository.export_release(release)
    return release


def test_history_that_the_old_key_did_not_seal_convinces_no_reader(keyed, read, tmp_path) -> None:
    """The attack: the aggregator withholds the record, seals one itself, or shows another silo's or federation's."""
    read(keyed.path / "first")
    old = keyed.silos["east"]
    take(keyed, keyed.rotate("east"))
    keyed.plan(2)
    second = keyed.publish(2, tmp_path / "second")
    history = KeyHistory.parse(
        (second / "targets" / "digits-00000002" / KEY_HISTORY).read_bytes(), subject="x"
    )
    genuine = open_rotation(history.silos["east"][0].encode())
    thief = SigningKey.generate()
    new = keyed.silos["east"]

    def sealed(rotation: KeyRotation, outer: SigningKey = old, inner: SigningKey = new) -> str:
        return seal(
            seal(rotation.encode(), "key-rotation-by-new-key", inner), "key-rotation", outer
        ).decode()

    elsewhere = genuine.model_copy(update={"root_digest": "0" * 64})
    other = genuine.model_copy(update={"silo_id": "north"})
    further = genuine.model_copy(
        update={"old_key": genuine.new_key, "new_key": str(thief.public), "number": 2}
    )
    attacks: dict[str, tuple[KeyHistory | None, type[ArchipelagoError]]] = {
        "withheld": (None, SignatureError),
        "sealed by the aggregator": (
            KeyHistory(silos={"east": (sealed(genuine, thief),)}),
            SignatureError,
        ),
        "not by the new key": (
            KeyHistory(silos={"east": (sealed(genuine, old, thief),)}),
            SignatureError,
        ),
        "another federation": (KeyHistory(silos={"east": (sealed(elsewhere),)}), FederationError),
        "another silo": (KeyHistory(silos={"east": (sealed(other),)}), ReplayError),
        "of a silo's that is not there": (
            KeyHistory(silos={"west": history.silos["east"]}),
            ReplayError,
        ),
        "longer than the key that signed": (
            KeyHistory(
                silos={
                    "east": (*history.silos["east"], seal_rotation(further, new, thief).decode())
                }
            ),
            SignatureError,
        ),
        "twice": (KeyHistory(silos={"east": history.silos["east"] * 2}), DocumentError),
    }
    for name, (forged, error) in attacks.items():
        with case(attack=name):
            release = republished(keyed, shutil.copytree(second, tmp_path / name), forged)
            with pytest.raises(error):
                read(release)
    assert "as its old key announced" in read(republished(keyed, second, history)).notices[0]


def test_history_is_bounded(keyed) -> None:
    with pytest.raises(DocumentError):
        KeyHistory.parse(b'{"format":"archipelago/key-history/1","silos":{"east":[]}}', subject="x")
    far = [KeyRotation(root_digest="0" * 64, silo_id="east", number=1, old_key=f"ed25519:{'0' * 64}",
                       new_key=f"ed25519:{'1' * 64}", at=now_utc()).encode().decode() * 20]  # fmt: skip
    with pytest.raises(DocumentError):
        open_chain(far, silo_id="east", root_digest="0" * 64)


def test_silos_that_vanish_appear_or_come_back_are_told(keyed, read, tmp_path) -> None:
    read(keyed.path / "first")
    without = keyed.publish(1, tmp_path / "without", silos=("north",))
    assert read(without).notices == ("silo east is not in this release; it was in the last one",)
    keyed.enroll("south")
    keyed.plan(2, silos=("east", "north", "south"))
    notices = read(keyed.publish(2, tmp_path / "second")).notices
    assert [line.split(";")[0] for line in notices] == [
        "silo south is new",
        "silo east is back",
    ]


def test_memory_that_is_damaged_is_not_forgotten(keyed, read, tmp_path) -> None:
    read(keyed.path / "first")
    (kept,) = (tmp_path / "reader").glob("*/silos.json")
    kept.write_bytes(kept.read_bytes()[:-5])
    with pytest.raises(DocumentError, check=has_subject("silos.json")):
        read(keyed.path / "first")


# The silo, and what the aggregator takes in


def rotate(tiny: TinyFederation, silo_id: str, folder: Path) -> Path:
    """Rotate a silo's key with its own command; return what it hands out."""
    out = folder / f"{silo_id}.rotated.json"
    words = ("--out", out, "--passphrase-file", secret(folder))
    result = run_command("silo", "rotate", tiny.sites[silo_id].path, *words)
    assert result.code == 0, result.err
    return out


def test_silo_refuses_a_plan_in_which_another_key_would_sign_in_its_place(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    """The attack: the holder of `targets` names a key of their own for the silo, which would train for nobody."""
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    repository = Repository(tiny.federation.tuf)
    targets = repository.next_targets(
        replace(
            repository.delegates(),
            silos={**repository.delegates().silos, "north": SigningKey.generate().public},
        ),
        now_utc(),
    )
    repository.renew(
        targets=sign_metadata(targets, [load_key(tiny.federation, "targets", PASSPHRASE)]),
        online_key=load_key(tiny.federation, "online", PASSPHRASE),
        now=now_utc(),
    )
    bundle = tiny.sites["north"].inbox / planned_once.plan_id / "bundle"
    shutil.rmtree(bundle / "metadata")
    repository.export_bundle(bundle)
    state = tiny.work("north", until="plan_refused")
    assert state.problem is not None
    assert state.problem.code == 11
    assert "in place of this silo" in state.problem.message


def test_silo_rotates_its_key_between_plans_and_the_next_plan_names_the_new_one(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites["north"]
    fed = tiny.federation.path
    old = tiny.key("north").public
    first = rotate(tiny, "north", tmp_path).read_bytes()
    assert tiny.key("north").public != old
    # The plan in the inbox names the old key.
    assert tiny.work("north", until="plan_refused").problem.code == 11  # type: ignore[union-attr]
    out = rotate(tiny, "north", tmp_path)
    new = tiny.key("north").public
    assert run_command("aggregator", "enroll", "--yes", fed, out).code == 0
    (tmp_path / "first.json").write_bytes(first)
    assert run_command("aggregator", "enroll", "--yes", fed, tmp_path / "first.json").code == 13
    assert tiny.federation.delegations()[f"{planned_once.plan_id}.north"] == str(old)
    plan_id = tiny.sign()
    assert tiny.federation.delegations()[f"{plan_id}.north"] == str(new)
    shutil.rmtree(site.inbox)
    site.inbox.mkdir()
    tiny.deliver_plan("north", plan_id)
    assert tiny.work("north", until="plan_accepted").plan_id == plan_id
    busy = run_command(
        "silo", "rotate", site.path, "--out", out, "--passphrase-file", secret(tmp_path)
    )
    assert busy.code == 6
    assert tiny.key("north").public == new


def test_rotation_that_was_cut_short_is_finished_with_the_same_key(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    private = tiny.sites["north"].private
    old = (private / "silo.key").read_bytes()
    before = rotate(tiny, "north", tmp_path).read_bytes()
    (private / "silo.key").rename(private / "silo-next.key")
    (private / "silo.key").write_bytes(old)
    after = rotate(tiny, "north", tmp_path).read_bytes()
    rotations = [RotatedCard.parse(data, subject="x").rotations for data in (before, after)]
    assert rotations[0] == rotations[1]
    assert not (private / "silo-next.key").exists()


def test_aggregator_takes_in_no_rotation_but_the_silos_own(keyed, tmp_path: Path) -> None:
    genuine = RotatedCard.parse(keyed.rotate("east").read_bytes(), subject="x")
    thief = SigningKey.generate()
    north = read_card((keyed.federation.registry / "north.json").read_bytes())
    card = read_card(genuine.card.encode())
    own = seal(
        card.model_copy(update={"signing_key": str(thief.public)}).encode(), CARD_KIND, thief
    ).decode()
    moved = seal(
        card.model_copy(update={"node_key": north.node_key}).encode(),
        CARD_KIND,
        keyed.silos["east"],
    ).decode()
    rotation = KeyRotation(root_digest=sha256_hex(keyed.root), silo_id="east", number=1,
                           old_key=str(thief.public), new_key=card.signing_key, at=now_utc())  # fmt: skip
    foreign = seal_rotation(rotation, thief, keyed.silos["east"]).decode()
    attacks = {
        "another card": (RotatedCard(card=own, rotations=genuine.rotations), 21),
        "another node": (RotatedCard(card=moved, rotations=genuine.rotations), 21),
        "from a key that nobody enrolled": (
            RotatedCard(card=genuine.card, rotations=(foreign,)),
            6,
        ),
        "one byte": (
            genuine.model_copy(update={"rotations": (genuine.rotations[0].replace("1", "2", 1),)}),
            None,
        ),
    }
    for name, (forged, code) in attacks.items():
        with case(attack=name):
            (tmp_path / "forged.json").write_bytes(forged.encode())
            actual_code = take(keyed, tmp_path / "forged.json")
            assert actual_code == code if code else actual_code in (11, 21)
    assert not (keyed.federation.registry / "rotated").exists()
    assert take(keyed, keyed.path / "east.card.json") == 0


def test_keys_of_a_removed_silo_stay_refused_also_those_that_it_rotated(
    keyed, tmp_path: Path
) -> None:
    first = keyed.silos["east"]
    take(keyed, keyed.rotate("east"))
    keyed.plan(2)
    words = (
        keyed.federation.path,
        "east",
        "--reason",
        "stolen",
        "--passphrase-file",
        secret(tmp_path),
    )
    assert run_command("aggregator", "remove", *words).code == 0
    assert not (keyed.federation.registry / "rotations" / "east.json").exists()
    for key in (first, keyed.silos["east"]):
        with pytest.raises(ArchipelagoError, check=has_subject("silo west")):
            keyed.enroll("west", key)


def test_plan_that_waits_for_holders_uses_no_key_of_a_silo_removed_meanwhile(
    tmp_path: Path,
) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found(targets=keyed.hold("dan", threshold=1))
    keyed.sign("targets", "dan")
    keyed.complete()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    take(keyed, keyed.rotate("east"))
    assert keyed.plan(1)
    keyed.sign("targets", "dan")
    words = (keyed.federation.path, "east", "--reason", "x", "--passphrase-file", secret(tmp_path))
    assert run_command("aggregator", "remove", *words).code == 0
    with pytest.raises(ArchipelagoError, check=has_subject("plan digits-")):
        keyed.complete()
    assert not (keyed.federation.registry / "east.json").exists()


@pytest.mark.slow
def test_rotation_from_the_silos_command_to_the_readers_with_real_releases(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_short_pages(monkeypatch)
    tiny = published.tiny
    look = ("--root", published.root, "--state", tmp_path / "state")
    assert run_command("ddm", "verify", published.release, *look).code == 0
    assert (
        run_command(
            "aggregator", "enroll", "--yes", tiny.federation.path, rotate(tiny, "east", tmp_path)
        ).code
        == 0
    )
    publish_next_version(tiny, tmp_path / "same-plan", renew=True)
    result = run_command("ddm", "verify", tmp_path / "same-plan", *look)
    assert (result.code, result.err) == (0, "")
    for site in tiny.sites.values():
        write_policy(site, {**POLICY, "privacy": {"budget_epsilon": 100.0}})
        shutil.rmtree(site.inbox)
        site.inbox.mkdir()
    tiny.complete(tmp_path / "next")
    result = run_command("ddm", "verify", tmp_path / "next", *look)
    assert result.code == 0
    assert f"from now on: {tiny.key('east').public.fingerprint}" in result.err
    listed = sorted(path.name for path in (tmp_path / "next" / "targets").glob(f"*/{KEY_HISTORY}"))
    assert listed == [KEY_HISTORY]
