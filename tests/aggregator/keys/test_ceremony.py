"""Root and targets held by several people: nothing comes into force without enough of them; each sees what it is."""

import json
import shutil
from pathlib import Path

import pytest
from securesystemslib.formats import encode_canonical

from aggregator.keys.ceremony import abandon_change, read_request, sign_document
from aggregator.keys.removal import remove_silo
from aggregator.keys.rotation import rotate_key
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
from ddm.trust.ceremony import describe_request
from ddm.trust.drafts import Holders
from ddm.trust.keys import SigningKey
from ddm.trust.verify import verify_bundle, verify_release
from silo.setup import read_invitation
from tests.support.errors import has_subject
from tests.support.federation_keys import PASSPHRASE, KeyedFederation

ROOT = ("ada", "ben", "cem")
TARGETS = ("dan", "eve")


@pytest.fixture(scope="session")
def founded_once(tmp_path_factory: pytest.TempPathFactory) -> KeyedFederation:
    """Two of three hold root, two of two hold targets."""
    keyed = KeyedFederation(tmp_path_factory.mktemp("ceremony"))
    keyed.found(keyed.hold(*ROOT, threshold=2), keyed.hold(*TARGETS, threshold=2))
    keyed.sign("root", "ada", "cem")
    keyed.sign("targets", *TARGETS)
    keyed.complete()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    return keyed


@pytest.fixture
def keyed(founded_once: KeyedFederation, tmp_path: Path) -> KeyedFederation:
    return founded_once.copy(tmp_path)


def test_federation_is_founded_once_enough_holders_have_signed(tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path)
    waits = keyed.found(keyed.hold(*ROOT, threshold=2), keyed.hold(*TARGETS, threshold=2))
    assert [line.split(";")[0] for line in waits] == [
        "root-1.json: 0 of 2 signatures",
        "targets-1.json: 0 of 2 signatures",
    ]
    keyed.sign("root", "ben")
    keyed.sign("targets", *TARGETS)
    with pytest.raises(SetupError) as refused:
        keyed.complete()
    assert refused.value.got is not None
    assert "root-1.json: 1 of 2 signatures" in refused.value.got
    assert not (keyed.federation.path / "invitation.json").exists()
    keyed.sign("root", "ada")
    keyed.complete()
    invitation = Invitation.parse(
        (keyed.federation.path / "invitation.json").read_bytes(), subject="invitation"
    )
    assert read_invitation(keyed.federation.path / "invitation.json", invitation.digest)
    assert invitation.root.encode() == keyed.root
    assert not {"root.key", "targets.key"} & {path.name for path in keyed.federation.keys.iterdir()}
    assert not list(keyed.federation.path.glob("ceremony*"))


def test_plan_waits_for_the_holders_of_targets_and_the_old_plan_works_meanwhile(
    keyed: KeyedFederation,
) -> None:
    for number in (1, 2):
        waits = keyed.plan(number)
        assert waits[0].startswith(f"targets-{number + 1}.json: 0 of 2 signatures")
        if number == 2:
            assert keyed.federation.current_plan()[0].plan_id == "digits-00000001"
            assert verify_release(
                keyed.publish(1, keyed.path / "meanwhile"), keyed.root, state=None
            )
        keyed.sign("targets", *TARGETS)
        keyed.complete()
        plan, _ = keyed.federation.current_plan()
        assert plan.plan_id == f"digits-{number:08x}"
        assert verify_bundle(keyed.federation.bundle(plan.plan_id), keyed.root, state=None)


def test_only_one_change_waits_and_it_can_be_thrown_away(keyed: KeyedFederation) -> None:
    keyed.plan(1)
    waiting = {
        path.name: path.read_bytes() for path in (keyed.federation.path / "ceremony").glob("*.json")
    }
    for attempt in (
        lambda: keyed.plan(2),
        lambda: rotate_key(keyed.federation, "online", PASSPHRASE),
        lambda: rotate_key(keyed.federation, "receipts", PASSPHRASE),
    ):
        with pytest.raises(BusyError):
            attempt()
    assert {
        path.name: path.read_bytes() for path in (keyed.federation.path / "ceremony").glob("*.json")
    } == waiting
    assert abandon_change(keyed.federation) == "start the plan digits-00000001"
    with pytest.raises(MissingFileError):
        keyed.complete()
    assert keyed.plan(2)


def test_founding_cannot_be_thrown_away(tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found(keyed.hold("ada", threshold=1))
    with pytest.raises(PolicyError):
        abandon_change(keyed.federation)


def test_signature_of_a_stranger_and_a_second_one_of_the_same_holder_are_refused(
    keyed: KeyedFederation,
) -> None:
    keyed.plan(1)
    keyed.holders["mallory"] = SigningKey.generate()
    for stranger in ("mallory", "ada"):  # ada holds root, not targets
        with pytest.raises(SignatureError, match="not a holder"):
            keyed.sign("targets", stranger)
    keyed.sign("targets", "dan")
    with pytest.raises(BusyError):
        sign_document(keyed.document("targets"), keyed.holders["dan"])
    (answer,) = keyed.document("targets").parent.glob("*.sig")
    shutil.copy(answer, answer.with_name(f"{keyed.document('targets').name}.copy.sig"))
    with pytest.raises(SignatureError, check=has_subject("signature on targets-2.json")):
        keyed.complete()


@pytest.mark.parametrize("forged", ["payload_digest", "key", "signature"])
def test_answer_with_any_field_forged_is_refused(keyed: KeyedFederation, forged: str) -> None:
    """The attacks: an answer to other bytes, under another holder's name, with a signature that is none."""
    keyed.plan(1)
    keyed.sign("targets", "dan", "eve")
    path = sorted(keyed.document("targets").parent.glob("*.sig"))[0]
    answer = json.loads(path.read_bytes())
    others = {
        "payload_digest": "0" * 64,
        "key": str(keyed.holders["ada"].public),
        "signature": answer["signature"][::-1],
    }
    path.write_text(json.dumps(answer | {forged: others[forged]}))
    with pytest.raises(SignatureError):
        keyed.complete()
    assert not (keyed.federation.path / "plans" / "current.json").exists()


def test_answer_to_a_document_thrown_away_does_not_sign_another(keyed: KeyedFederation) -> None:
    keyed.plan(1)
    keyed.sign("targets", "dan", "eve")
    answers = {
        path.name: path.read_bytes() for path in keyed.document("targets").parent.glob("*.sig")
    }
    abandon_change(keyed.federation)
    keyed.plan(2)
    for name, data in answers.items():
        (keyed.document("targets").parent / name).write_bytes(data)
    with pytest.raises(SignatureError, check=has_subject("signature on targets-2.json")):
        keyed.complete()


def test_document_changed_after_it_was_signed_does_not_come_into_force(
    keyed: KeyedFederation,
) -> None:
    """The attack: the operator's machine swaps a silo's key for its own after the holders have signed."""
    keyed.plan(1)
    keyed.sign("targets", "dan", "eve")
    path = keyed.document("targets")
    request = json.loads(path.read_bytes())
    for old in (keyed.silos["north"].public, keyed.holders["dan"].public):
        changed = request | {
            "payload": request["payload"].replace(
                old.raw.hex(), SigningKey.generate().public.raw.hex()
            )
        }
        path.write_text(json.dumps(changed))
        if changed["payload"] != request["payload"]:
            with pytest.raises(ArchipelagoError):
                keyed.complete()
    path.write_text(json.dumps(request))
    assert keyed.complete() == "start the plan digits-00000001"


def test_holders_named_by_the_document_itself_do_not_count(keyed: KeyedFederation) -> None:
    """The attack: a document whose `root` names other holders, all signatures in order."""
    keyed.plan(1)
    mallory = KeyedFederation(keyed.path / "mallory")
    mallory.path.mkdir()
    mallory.found(mallory.hold("mallory", threshold=1), mallory.hold("mallory", threshold=1))
    path = keyed.document("targets")
    request = json.loads(path.read_bytes())
    foreign = json.loads(mallory.document("root").read_bytes())["payload"]
    path.write_text(json.dumps(request | {"root": foreign}))
    keyed.holders["mallory"] = mallory.holders["mallory"]
    keyed.sign("targets", "mallory")
    with pytest.raises(SignatureError):
        keyed.complete()
    assert not (keyed.federation.path / "plans" / "current.json").exists()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 50, b'{"format":"archipelago/ceremony/1","role":"plans"}']
)
def test_document_that_is_none_is_refused_before_it_is_shown(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "root-1.json").write_bytes(data)
    with pytest.raises(DocumentError):
        read_request(tmp_path / "root-1.json")


def test_words_name_every_key_that_comes_stays_or_goes_and_every_threshold(
    keyed: KeyedFederation,
) -> None:
    held = keyed.hold("ada", "ben", "fay", threshold=3)
    rotate_key(keyed.federation, "root", PASSPHRASE, held)
    lines = describe_request(read_request(keyed.document("root"))).splitlines()
    assert lines[0].startswith("root, version 2 (replaces version 1)")
    assert "root: 3 of 3 must sign (was 2)" in lines
    for name, mark in (("ada", " "), ("ben", " "), ("fay", "+"), ("cem", "-"), ("dan", " ")):
        assert f"  {mark} key {keyed.holders[name].public.short}" in lines
    abandon_change(keyed.federation)
    keyed.plan(1, ("north",))
    text = describe_request(read_request(keyed.document("targets")))
    assert "digits-00000001.north: NEW: 1 of 1 must sign" in text
    assert f"  + key {keyed.silos['north'].public.short}" in text
    assert "  + may list digits-00000001/silos/north/*" in text
    assert "east" not in text


def test_sender_adds_no_line_to_the_words_and_a_role_whose_key_is_absent_is_refused(
    keyed: KeyedFederation,
) -> None:
    keyed.plan(1, ("north",))
    path = keyed.document("targets")
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document | {"purpose": "a plan\nroot: 2 of 3 must sign"}))
    with pytest.raises(DocumentError, check=has_subject("purpose")):
        read_request(path)
    path.write_text(json.dumps(document | {"purpose": "a plan. root: 2 of 3 must sign"}))
    lines = describe_request(read_request(path)).splitlines()
    assert "The sender says that it is for: a plan. root: 2 of 3 must sign" in lines
    payload = json.loads(document["payload"])
    payload["delegations"]["keys"].pop(keyed.silos["north"].public.tuf_key().keyid)
    path.write_text(json.dumps(document | {"payload": encode_canonical(payload)}))
    with pytest.raises(DocumentError, check=has_subject("targets to sign")):
        describe_request(read_request(path))


def test_root_passes_to_other_holders_when_enough_old_and_new_ones_sign(
    keyed: KeyedFederation,
) -> None:
    rotate_key(keyed.federation, "root", PASSPHRASE, keyed.hold("fay", "gus", threshold=2))
    keyed.sign("root", "fay", "gus", "ada")
    with pytest.raises(SetupError) as refused:
        keyed.complete()
    assert refused.value.got is not None
    assert "1 of 2 signatures" in refused.value.got
    keyed.sign("root", "ben")
    keyed.complete()
    rotate_key(keyed.federation, "online", PASSPHRASE)
    with pytest.raises(SignatureError):
        keyed.sign("root", "cem")
    keyed.sign("root", "fay", "gus")
    keyed.complete()
    keyed.plan(1)
    keyed.sign("targets", *TARGETS)
    keyed.complete()
    assert (
        verify_bundle(keyed.federation.bundle("digits-00000001"), keyed.root, state=None).versions[
            "root"
        ]
        == 3
    )


def test_targets_passes_to_other_holders_with_a_new_root_and_new_delegations(
    keyed: KeyedFederation,
) -> None:
    rotate_key(keyed.federation, "targets", PASSPHRASE, keyed.hold("fay", threshold=1))
    keyed.sign("root", "ada", "ben")
    with pytest.raises(SignatureError):
        keyed.sign("targets", "dan")
    keyed.sign("targets", "fay")
    keyed.complete()
    keyed.plan(1)
    keyed.sign("targets", "fay")
    keyed.complete()
    assert verify_bundle(keyed.federation.bundle("digits-00000001"), keyed.root, state=None)


def test_keys_held_elsewhere_are_not_replaced_by_one_here_unasked(keyed: KeyedFederation) -> None:
    for name in ("root", "targets"):
        with pytest.raises(SetupError) as refused:
            rotate_key(keyed.federation, name, PASSPHRASE)
        assert "--holder" in refused.value.remedy


def test_local_keys_leave_the_folder_when_root_and_targets_pass_to_holders(tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found()
    assert (keyed.federation.keys / "root.key").exists()
    rotate_key(keyed.federation, "root", PASSPHRASE, keyed.hold("ada", "ben", threshold=1))
    assert (keyed.federation.keys / "root.key").exists(), "until the new holders have signed"
    keyed.sign("root", "ada")
    keyed.complete()
    assert not list(keyed.federation.keys.glob("root.*"))
    assert keyed.repository.root().roles["root"].threshold == 1
    assert len(keyed.repository.root().roles["root"].keyids) == 2


def test_plan_that_names_a_silo_removed_meanwhile_does_not_come_into_force(
    keyed: KeyedFederation,
) -> None:
    keyed.plan(1)
    remove_silo(keyed.federation, "east", "stolen laptop", PASSPHRASE)
    keyed.sign("targets", *TARGETS)
    with pytest.raises(PolicyError, match="east"):
        keyed.complete()
    assert not (keyed.federation.path / "plans" / "current.json").exists()
    abandon_change(keyed.federation)
    keyed.plan(2, ("north",))
    keyed.sign("targets", *TARGETS)
    keyed.complete()
    assert keyed.federation.current_plan()[0].silos == ("north",)


@pytest.mark.parametrize(
    ("names", "threshold"), [(("ada",), 2), (("ada",), 0), (("ada", "ada"), 1), ((), 1)]
)
def test_threshold_that_cannot_be_met_or_a_holder_named_twice_is_refused(
    names: tuple[str, ...], threshold: int
) -> None:
    keys = {"ada": SigningKey.generate().public}
    with pytest.raises(SetupError):
        Holders(tuple(keys[name] for name in names), threshold)
