"""Rotations of the root: a chain of trust from the pinned file, and the memory of what was revoked."""

import json
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey
from tuf.api.metadata import Metadata, Root

from ddm.errors import (
    AbsentFileError,
    ArchipelagoError,
    DigestError,
    DocumentError,
    RollbackError,
    SignatureError,
    UnlistedFileError,
)
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.verify import verify_release


@pytest.fixture
def rotate(federation):
    """Write the next root: `change` edits it, `signers` sign it."""

    def write(change, *signers: str) -> bytes:
        last = max(int(path.name.split(".")[0]) for path in federation.folder.glob("*.root.json"))
        root = Metadata[Root].from_file(str(federation.folder / f"{last}.root.json")).signed
        root.version += 1
        change(root)
        data = sign_metadata(root, [federation.keys[name] for name in signers])
        (federation.folder / f"{root.version}.root.json").write_bytes(data)
        return data

    federation.keys["root3"] = SigningKey.generate()
    return write


def replace_key(keys, role: str, old: str, new: str):
    def change(root: Root) -> None:
        root.revoke_key(keys[old].public.tuf_key().keyid, role)
        root.add_key(keys[new].public.tuf_key(), role)

    return change


def test_release_verifies_through_a_rotation_signed_by_the_old_root_and_the_new(
    federation, rotate, tmp_path
):
    rotate(replace_key(federation.keys, "root", "root2", "root3"), "root", "root2", "root3")
    verified = verify_release(federation.export(tmp_path / "r"), federation.root, state=None)
    assert verified.versions["root"] == 2


@pytest.mark.parametrize("signers", [("root", "root2"), ("root", "root3"), ("root3",)])
def test_rotation_refused_unless_both_thresholds_are_met(federation, rotate, tmp_path, signers):
    rotate(replace_key(federation.keys, "root", "root2", "root3"), *signers)
    with pytest.raises(SignatureError) as error:
        verify_release(federation.export(tmp_path / "r"), federation.root, state=None)
    assert error.value.subject == "metadata/2.root.json"


def test_rotation_refused_when_one_key_stands_under_two_ids(federation, rotate, tmp_path):
    """Else the thief of one key would meet a threshold of two; python-tuf alone counts it twice."""
    key = federation.keys["root"].public.tuf_key()
    alias = "0" * 64

    def change(root: Root) -> None:
        root.revoke_key(federation.keys["root2"].public.tuf_key().keyid, "root")
        root.add_key(SSlibKey(alias, key.keytype, key.scheme, key.keyval), "root")

    with pytest.raises(DocumentError):
        rotate(change, "root", "root2")
    metadata = Metadata[Root].from_file(str(federation.folder / "1.root.json"))
    metadata.signed.version = 2
    change(metadata.signed)
    for name in ("root", "root2"):
        metadata.sign(CryptoSigner(federation.keys[name]._private), append=True)
    metadata.signatures[alias] = Signature(alias, metadata.signatures[key.keyid].signature)
    metadata.signatures = dict(sorted(metadata.signatures.items()))
    metadata.signed.verify_delegate("root", metadata.signed_bytes, metadata.signatures)
    (federation.folder / "2.root.json").write_bytes(metadata.to_bytes())
    with pytest.raises(DocumentError) as error:
        verify_release(federation.export(tmp_path / "r"), federation.root, state=None)
    assert error.value.subject == "metadata/2.root.json"


def test_rotation_refused_with_its_signatures_in_another_order(federation, rotate, tmp_path):
    value = json.loads(rotate(lambda root: None, "root", "root2"))
    value["signatures"].reverse()
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    (federation.folder / "2.root.json").write_bytes(data)
    with pytest.raises(DocumentError) as error:
        verify_release(federation.export(tmp_path / "r"), federation.root, state=None)
    assert error.value.subject == "metadata/2.root.json"


def test_every_byte_of_a_rotated_root_counts(federation, rotate, tmp_path):
    rotate(replace_key(federation.keys, "root", "root2", "root3"), "root", "root2", "root3")
    release = federation.export(tmp_path / "r")
    path = release / "metadata" / "2.root.json"
    original = path.read_bytes()
    unsigned = original.index(b'"signed":')
    for offset in (*range(unsigned), *range(unsigned, len(original), 5)):
        damaged = bytearray(original)
        damaged[offset] ^= 0x20 if chr(original[offset]).isalpha() else 0x01
        path.write_bytes(damaged)
        with pytest.raises(ArchipelagoError) as error:
            verify_release(release, federation.root, state=None)
        assert error.value.subject == "metadata/2.root.json", offset


def test_rotation_that_skips_a_version_is_refused(federation, rotate, tmp_path):
    rotate(lambda root: None, "root", "root2")
    release = federation.export(tmp_path / "r")
    (release / "metadata" / "2.root.json").rename(release / "metadata" / "3.root.json")
    with pytest.raises(AbsentFileError) as error:
        verify_release(release, federation.root, state=None)
    assert error.value.subject == "metadata/2.root.json"


def test_later_root_under_an_earlier_name_is_refused(federation, rotate, tmp_path):
    rotate(lambda root: setattr(root, "version", 3), "root", "root2")
    (federation.folder / "3.root.json").rename(federation.folder / "2.root.json")
    with pytest.raises(RollbackError) as error:
        verify_release(federation.export(tmp_path / "r"), federation.root, state=None)
    assert error.value.subject == "metadata/2.root.json"


@pytest.mark.parametrize("name", ["0.root.json", "01.root.json", "x.root.json"])
def test_root_under_a_name_outside_the_chain_is_refused(federation, tmp_path, name):
    release = federation.export(tmp_path / "r")
    (release / "metadata" / name).write_bytes(federation.root)
    with pytest.raises((UnlistedFileError, AbsentFileError)):
        verify_release(release, federation.root, state=None)


def test_key_revoked_by_a_root_stays_revoked_when_the_rotation_is_hidden_later(
    federation, rotate, tmp_path
):
    """The thief of a revoked online key serves another plan's release that knows no rotation."""
    state = tmp_path / "state"
    federation.keys["online2"] = SigningKey.generate()
    thief = federation.export(tmp_path / "before")

    def change(root: Root) -> None:
        for role in ("snapshot", "timestamp"):
            replace_key(federation.keys, role, "online", "online2")(root)

    rotate(change, "root", "root2")
    federation.keys["online"] = federation.keys["online2"]
    federation.plan_id = "digits-00000002"
    federation.start_plan()
    federation.publish()
    assert verify_release(federation.export(tmp_path / "new"), federation.root, state=state)
    with pytest.raises(SignatureError) as error:
        verify_release(thief, federation.root, state=state)
    assert error.value.subject == "metadata/timestamp.json"
    assert verify_release(thief, federation.root, state=tmp_path / "fresh")


def test_older_plan_still_verifies_after_a_rotation_that_revoked_nothing_of_it(
    federation, rotate, tmp_path
):
    state = tmp_path / "state"
    old = federation.export(tmp_path / "old")
    rotate(replace_key(federation.keys, "root", "root2", "root3"), "root", "root2", "root3")
    federation.plan_id = "digits-00000002"
    federation.start_plan()
    federation.publish()
    verify_release(federation.export(tmp_path / "new"), federation.root, state=state)
    assert verify_release(old, federation.root, state=state).versions["root"] == 1


def test_two_different_roots_of_one_version_are_noticed(federation, rotate, tmp_path):
    state = tmp_path / "state"
    rotate(lambda root: None, "root", "root2")
    verify_release(federation.export(tmp_path / "a"), federation.root, state=state)
    (federation.folder / "2.root.json").unlink()
    federation.plan_id = "digits-00000002"
    federation.start_plan()
    federation.publish()
    rotate(
        lambda root: setattr(root, "expires", root.expires.replace(year=root.expires.year - 1)),
        "root",
        "root2",
    )
    with pytest.raises(RollbackError) as error:
        verify_release(federation.export(tmp_path / "b"), federation.root, state=state)
    assert error.value.subject == "metadata/2.root.json"


def test_targets_signed_with_a_revoked_key_are_refused(federation, rotate, tmp_path):
    federation.keys["targets2"] = SigningKey.generate()
    rotate(replace_key(federation.keys, "targets", "targets", "targets2"), "root", "root2")
    with pytest.raises((SignatureError, DigestError)) as error:
        verify_release(federation.export(Path(tmp_path / "r")), federation.root, state=None)
    assert error.value.subject == "metadata/targets.json"
