"""Root and targets held by several people: nothing comes into force without enough of them; each sees what it is."""

import json
import shutil
from pathlib import Path

import pytest

from aggregator.keys.ceremony import abandon, read_request, sign_document
from aggregator.keys.removal import remove
from aggregator.keys.rotation import rotate
from ddm.errors import (
    ArchipelagoError,
    BusyError,
    DocumentError,
    MissingFileError,
    PolicyError,
    SetupError,
    SignatureError,
)
from ddm.protocol.enrolment import Invitation
from ddm.trust.ceremony import in_words
from ddm.trust.drafts import Holders
from ddm.trust.keys import SigningKey
from ddm.trust.verify import verify_bundle, verify_release
from silo.setup import read_invitation
from tests.support.federation_keys import PASSPHRASE, Offices

ROOT = ("ada", "ben", "cem")
TARGETS = ("dan", "eve")


@pytest.fixture(scope="session")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> Offices:
    """Two of three hold root, two of two hold targets."""
    offices = Offices(tmp_path_factory.mktemp("ceremony"))
    offices.found(offices.hold(*ROOT, threshold=2), offices.hold(*TARGETS, threshold=2))
    offices.sign("root", "ada", "cem")
    offices.sign("targets", *TARGETS)
    offices.complete()
    for silo_id in ("east", "north"):
        offices.enroll(silo_id)
    return offices


@pytest.fixture
def offices(founded_once: Offices, tmp_path: Path) -> Offices:
    return founded_once.copy(tmp_path)


def test_federation_is_founded_once_enough_holders_have_signed(tmp_path: Path) -> None:
    offices = Offices(tmp_path)
    waits = offices.found(offices.hold(*ROOT, threshold=2), offices.hold(*TARGETS, threshold=2))
    assert [line.split(";")[0] for line in waits] == [
        "root-1.json: 0 of 2 signatures",
        "targets-1.json: 0 of 2 signatures",
    ]
    offices.sign("root", "ben")
    offices.sign("targets", *TARGETS)
    with pytest.raises(SetupError) as refused:
        offices.complete()
    assert refused.value.got is not None
    assert "root-1.json: 1 of 2 signatures" in refused.value.got
    assert not (offices.federation.path / "invitation.json").exists()
    offices.sign("root", "ada")
    offices.complete()
    invitation = Invitation.parse((offices.federation.path / "invitation.json").read_bytes(), subject="invitation")
    assert read_invitation(offices.federation.path / "invitation.json", invitation.root_digest)
    assert invitation.root.encode() == offices.root
    assert not {"root.key", "targets.key"} & {path.name for path in offices.federation.keys.iterdir()}
    assert not list(offices.federation.path.glob("ceremony*"))


def test_plan_waits_for_the_holders_of_targets_and_the_old_plan_works_meanwhile(offices: Offices) -> None:
    for number in (1, 2):
        waits = offices.plan(number)
        assert waits[0].startswith(f"targets-{number + 1}.json: 0 of 2 signatures")
        if number == 2:
            assert offices.federation.current_plan()[0].plan_id == "digits-00000001"
            assert verify_release(offices.publish(1, offices.path / "meanwhile"), offices.root, state=None)
        offices.sign("targets", *TARGETS)
        offices.complete()
        plan, _ = offices.federation.current_plan()
        assert plan.plan_id == f"digits-{number:08x}"
        assert verify_bundle(offices.federation.bundle(plan.plan_id), offices.root, state=None)


def test_only_one_change_waits_and_it_can_be_thrown_away(offices: Offices) -> None:
    offices.plan(1)
    waiting = {path.name: path.read_bytes() for path in (offices.federation.path / "ceremony").glob("*.json")}
    for attempt in (
        lambda: offices.plan(2),
        lambda: rotate(offices.federation, "online", PASSPHRASE),
        lambda: rotate(offices.federation, "receipts", PASSPHRASE),
    ):
        with pytest.raises(BusyError):
            attempt()
    assert {path.name: path.read_bytes() for path in (offices.federation.path / "ceremony").glob("*.json")} == waiting
    assert abandon(offices.federation) == "start the plan digits-00000001"
    with pytest.raises(MissingFileError):
        offices.complete()
    assert offices.plan(2)


def test_founding_cannot_be_thrown_away(tmp_path: Path) -> None:
    offices = Offices(tmp_path)
    offices.found(offices.hold("ada", threshold=1))
    with pytest.raises(PolicyError):
        abandon(offices.federation)


def test_signature_of_a_stranger_and_a_second_one_of_the_same_holder_are_refused(offices: Offices) -> None:
    offices.plan(1)
    offices.holders["mallory"] = SigningKey.generate()
    for stranger in ("mallory", "ada"):  # ada holds root, not targets
        with pytest.raises(SignatureError, match="not a holder"):
            offices.sign("targets", stranger)
    offices.sign("targets", "dan")
    with pytest.raises(BusyError):
        sign_document(offices.document("targets"), offices.holders["dan"])
    (answer,) = offices.document("targets").parent.glob("*.sig")
    shutil.copy(answer, answer.with_name(f"{offices.document('targets').name}.copy.sig"))
    with pytest.raises(SignatureError, match="got two"):
        offices.complete()


@pytest.mark.parametrize("forged", ["payload_digest", "key", "signature"])
def test_answer_with_any_field_forged_is_refused(offices: Offices, forged: str) -> None:
    """The attacks: an answer to other bytes, under another holder's name, with a signature that is none."""
    offices.plan(1)
    offices.sign("targets", "dan", "eve")
    path = sorted(offices.document("targets").parent.glob("*.sig"))[0]
    answer = json.loads(path.read_bytes())
    others = {
        "payload_digest": "0" * 64,
        "key": str(offices.holders["ada"].public),
        "signature": answer["signature"][::-1],
    }
    path.write_text(json.dumps(answer | {forged: others[forged]}))
    with pytest.raises(SignatureError):
        offices.complete()
    assert not (offices.federation.path / "plans" / "current.json").exists()


def test_answer_to_a_document_thrown_away_does_not_sign_another(offices: Offices) -> None:
    offices.plan(1)
    offices.sign("targets", "dan", "eve")
    answers = {path.name: path.read_bytes() for path in offices.document("targets").parent.glob("*.sig")}
    abandon(offices.federation)
    offices.plan(2)
    for name, data in answers.items():
        (offices.document("targets").parent / name).write_bytes(data)
    with pytest.raises(SignatureError, match="over sha256"):
        offices.complete()


def test_document_changed_after_it_was_signed_does_not_come_into_force(offices: Offices) -> None:
    """The attack: the operator's machine swaps a silo's key for its own after the holders have signed."""
    offices.plan(1)
    offices.sign("targets", "dan", "eve")
    path = offices.document("targets")
    request = json.loads(path.read_bytes())
    for old in (offices.silos["north"].public, offices.holders["dan"].public):
        changed = request | {
            "payload": request["payload"].replace(old.raw.hex(), SigningKey.generate().public.raw.hex())
        }
        path.write_text(json.dumps(changed))
        if changed["payload"] != request["payload"]:
            with pytest.raises(ArchipelagoError):
                offices.complete()
    path.write_text(json.dumps(request))
    assert offices.complete() == "start the plan digits-00000001"


def test_holders_named_by_the_document_itself_do_not_count(offices: Offices) -> None:
    """The attack: a document whose `root` names other holders, all signatures in order."""
    offices.plan(1)
    mallory = Offices(offices.path / "mallory")
    mallory.path.mkdir()
    mallory.found(mallory.hold("mallory", threshold=1), mallory.hold("mallory", threshold=1))
    path = offices.document("targets")
    request = json.loads(path.read_bytes())
    foreign = json.loads(mallory.document("root").read_bytes())["payload"]
    path.write_text(json.dumps(request | {"root": foreign}))
    offices.holders["mallory"] = mallory.holders["mallory"]
    offices.sign("targets", "mallory")
    with pytest.raises(SignatureError):
        offices.complete()
    assert not (offices.federation.path / "plans" / "current.json").exists()


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 50, b'{"format":"archipelago/ceremony/1","role":"plans"}'])
def test_document_that_is_none_is_refused_before_it_is_shown(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "root-1.json").write_bytes(data)
    with pytest.raises(DocumentError):
        read_request(tmp_path / "root-1.json")


def test_words_name_every_key_that_comes_stays_or_goes_and_every_threshold(offices: Offices) -> None:
    held = offices.hold("ada", "ben", "fay", threshold=3)
    rotate(offices.federation, "root", PASSPHRASE, held)
    lines = in_words(read_request(offices.document("root"))).splitlines()
    assert lines[0].startswith("root, version 2 (replaces version 1)")
    assert "root: 3 of 3 must sign (was 2)" in lines
    for name, mark in (("ada", " "), ("ben", " "), ("fay", "+"), ("cem", "-"), ("dan", " ")):
        assert f"  {mark} key {offices.holders[name].public.short}" in lines
    abandon(offices.federation)
    offices.plan(1, ("north",))
    text = in_words(read_request(offices.document("targets")))
    assert "digits-00000001.north: NEW: 1 of 1 must sign" in text
    assert f"  + key {offices.silos['north'].public.short}" in text
    assert "  + may list digits-00000001/silos/north/*" in text
    assert "east" not in text


def test_root_passes_to_other_holders_when_enough_old_and_new_ones_sign(offices: Offices) -> None:
    rotate(offices.federation, "root", PASSPHRASE, offices.hold("fay", "gus", threshold=2))
    offices.sign("root", "fay", "gus", "ada")
    with pytest.raises(SetupError) as refused:
        offices.complete()
    assert refused.value.got is not None
    assert "1 of 2 signatures" in refused.value.got
    offices.sign("root", "ben")
    offices.complete()
    rotate(offices.federation, "online", PASSPHRASE)
    with pytest.raises(SignatureError):
        offices.sign("root", "cem")
    offices.sign("root", "fay", "gus")
    offices.complete()
    offices.plan(1)
    offices.sign("targets", *TARGETS)
    offices.complete()
    assert verify_bundle(offices.federation.bundle("digits-00000001"), offices.root, state=None).versions["root"] == 3


def test_targets_passes_to_other_holders_with_a_new_root_and_new_delegations(offices: Offices) -> None:
    rotate(offices.federation, "targets", PASSPHRASE, offices.hold("fay", threshold=1))
    offices.sign("root", "ada", "ben")
    with pytest.raises(SignatureError):
        offices.sign("targets", "dan")
    offices.sign("targets", "fay")
    offices.complete()
    offices.plan(1)
    offices.sign("targets", "fay")
    offices.complete()
    assert verify_bundle(offices.federation.bundle("digits-00000001"), offices.root, state=None)


def test_keys_held_elsewhere_are_not_replaced_by_one_here_unasked(offices: Offices) -> None:
    for name in ("root", "targets"):
        with pytest.raises(SetupError) as refused:
            rotate(offices.federation, name, PASSPHRASE)
        assert "--holder" in refused.value.remedy


def test_local_keys_leave_the_folder_when_root_and_targets_pass_to_holders(tmp_path: Path) -> None:
    offices = Offices(tmp_path)
    offices.found()
    assert (offices.federation.keys / "root.key").exists()
    rotate(offices.federation, "root", PASSPHRASE, offices.hold("ada", "ben", threshold=1))
    assert (offices.federation.keys / "root.key").exists(), "until the new holders have signed"
    offices.sign("root", "ada")
    offices.complete()
    assert not list(offices.federation.keys.glob("root.*"))
    assert offices.repository.root().roles["root"].threshold == 1
    assert len(offices.repository.root().roles["root"].keyids) == 2


def test_plan_that_names_a_silo_removed_meanwhile_does_not_come_into_force(offices: Offices) -> None:
    offices.plan(1)
    remove(offices.federation, "east", "stolen laptop", PASSPHRASE)
    offices.sign("targets", *TARGETS)
    with pytest.raises(PolicyError, match="east"):
        offices.complete()
    assert not (offices.federation.path / "plans" / "current.json").exists()
    abandon(offices.federation)
    offices.plan(2, ("north",))
    offices.sign("targets", *TARGETS)
    offices.complete()
    assert offices.federation.current_plan()[0].silos == ("north",)


@pytest.mark.parametrize(("names", "threshold"), [(("ada",), 2), (("ada",), 0), (("ada", "ada"), 1), ((), 1)])
def test_threshold_that_cannot_be_met_or_a_holder_named_twice_is_refused(
    names: tuple[str, ...], threshold: int
) -> None:
    keys = {"ada": SigningKey.generate().public}
    with pytest.raises(SetupError):
        Holders(tuple(keys[name] for name in names), threshold)
