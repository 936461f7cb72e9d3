"""Attacks on a release as it lies in a folder; each must be refused by an error that names the file."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Snapshot, TargetFile, Targets, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from ddm.errors import (
    AbsentFileError,
    ArchipelagoError,
    DigestError,
    DocumentError,
    ExpiredError,
    MissingFileError,
    RoleError,
    RollbackError,
    RootError,
    SetupError,
    SignatureError,
    TrustError,
    UnlistedFileError,
    UnsafePathError,
)
from ddm.protocol.base import sha256_hex
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import METADATA_LIFE, sign_metadata
from ddm.trust.silo_role import sign_silo_metadata
from ddm.trust.state_folder import default_state_folder
from ddm.trust.verify import KnownSiloKeys, verify_bundle, verify_release

PLAN = "digits-3f9a1c2e"
EXPERT = f"{PLAN}/silos/north/experts/north/expert.safetensors"


class LocalFetcher(FetcherInterface):
    """Serves a folder as if it were a web host."""

    def _fetch(self, url):
        from tuf.api.exceptions import DownloadHTTPError

        path = Path(url.removeprefix("http://local/"))
        if not path.exists():
            raise DownloadHTTPError("not found", 404)
        return iter([path.read_bytes()])


def updater(folder: Path, cache: Path, root: bytes) -> Updater:
    (cache / "targets").mkdir(parents=True, exist_ok=True)
    base = f"http://local/{folder}"
    config = UpdaterConfig(prefix_targets_with_hash=False)
    return Updater(
        str(cache),
        f"{base}/metadata/",
        str(cache / "targets"),
        f"{base}/targets/",
        LocalFetcher(),
        config,
        bootstrap=root,
    )


def files_of(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def resign(
    release: Path,
    keys: dict[str, SigningKey],
    changed: dict[str, bytes],
    online: SigningKey | None = None,
) -> None:
    """Do what a thief of the online key can: put metadata files in place and sign snapshot and timestamp over them."""
    online = online or keys["online"]
    metadata = release / "metadata"
    for role, data in changed.items():
        (metadata / f"{role}.json").write_bytes(data)
    snapshot = Metadata[Snapshot].from_file(str(metadata / "snapshot.json")).signed
    for role, data in changed.items():
        version = Metadata[Targets].from_bytes(data).signed.version
        snapshot.meta[f"{role}.json"] = MetaFile.from_data(version, data, ["sha256"])
    (metadata / "snapshot.json").write_bytes(sign_metadata(snapshot, [online]))
    timestamp = Metadata[Timestamp].from_file(str(metadata / "timestamp.json")).signed
    timestamp.snapshot_meta = MetaFile.from_data(
        snapshot.version, (metadata / "snapshot.json").read_bytes(), ["sha256"]
    )
    (metadata / "timestamp.json").write_bytes(sign_metadata(timestamp, [online]))


def listing(now, *paths: str, version: int = 2, data: bytes = b"x") -> Targets:
    digest = hashlib.sha256(data).hexdigest()
    return Targets(
        version,
        None,
        now + METADATA_LIFE,
        {p: TargetFile(len(data), {"sha256": digest}, p) for p in paths},
    )


def test_release_verifies_and_says_what_it_holds(published, root, keys):
    verified = verify_release(published, root, state=None)
    assert verified.plan_id == PLAN
    assert verified.root_fingerprint == hashlib.sha256(root).hexdigest()
    assert verified.silo_keys == {silo: keys[silo].public.fingerprint for silo in ("north", "east")}
    assert not verified.expired
    assert set(verified.files) == {
        name.removeprefix(f"targets/{PLAN}/")
        for name in files_of(published)
        if name.startswith("targets/")
    }
    for file in verified.files.values():
        data = file.path.read_bytes()
        assert (file.bytes, file.digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert verified.files["silos/north/submission.json"].role == f"{PLAN}.north"
    assert verified.files["plan.json"].role == "plans"
    assert verified.files["manifest.json"].role == "release"


def test_release_verifies_from_a_relative_path_and_through_a_link_named_by_the_operator(
    published, root, tmp_path, monkeypatch
):
    (tmp_path / "latest").symlink_to(published)
    monkeypatch.chdir(tmp_path)
    assert verify_release(Path("latest"), root, state=None).plan_id == PLAN


def test_every_file_is_refused_by_name_after_one_byte_changes(release, root):
    for name in files_of(release):
        path = release / name
        original = path.read_bytes()
        offsets = {
            0,
            1,
            len(original) // 3,
            len(original) // 2,
            2 * len(original) // 3,
            len(original) - 1,
        }
        for offset in offsets:
            for flip in (0x01, 0x20, 0x80):
                damaged = bytearray(original)
                damaged[offset] ^= flip
                path.write_bytes(damaged)
                with pytest.raises(ArchipelagoError) as error:
                    verify_release(release, root, state=None)
                assert error.value.subject == name, (offset, flip)
        path.write_bytes(original)
    assert verify_release(release, root, state=None)


@pytest.mark.parametrize("name", ["metadata/timestamp.json", "metadata/1.root.json"])
def test_every_single_byte_of_the_files_that_nothing_hashes_counts(release, root, name):
    path = release / name
    original = path.read_bytes()
    for offset in range(len(original)):
        damaged = bytearray(original)
        damaged[offset] ^= 0x20 if chr(original[offset]).isalpha() else 0x01
        path.write_bytes(damaged)
        with pytest.raises((TrustError, DocumentError)) as error:
            verify_release(release, root, state=None)
        assert error.value.subject == name, offset


@pytest.mark.parametrize(
    "change", [lambda data: data + b"\n", lambda data: data[:-1], lambda data: b""]
)
def test_every_file_is_refused_by_name_when_lengthened_shortened_or_emptied(release, root, change):
    for name in files_of(release):
        original = (release / name).read_bytes()
        (release / name).write_bytes(change(original))
        with pytest.raises(ArchipelagoError) as error:
            verify_release(release, root, state=None)
        assert error.value.subject == name
        (release / name).write_bytes(original)


def test_every_file_is_missed_by_name_when_it_is_gone(release, root):
    for name in files_of(release):
        (release / name).rename(release.parent / "aside")
        with pytest.raises(AbsentFileError) as error:
            verify_release(release, root, state=None)
        assert error.value.subject == name
        (release.parent / "aside").rename(release / name)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "metadata/notes.txt",
        "metadata/extra.json",
        "metadata/root.json",
        "metadata/2.root.json/x",
        f"metadata/{PLAN}.west.json",
        "targets/stray",
        f"targets/{PLAN}/extra.safetensors",
        f"targets/{PLAN}/silos/north/counts.safetensors",
        f"targets/{PLAN}/silos/west/submission.json",
        "targets/other-00000000/plan.json",
    ],
)
def test_release_refused_with_a_file_that_no_signature_covers(release, root, name):
    (release / name).parent.mkdir(parents=True, exist_ok=True)
    (release / name).write_bytes(b"x")
    with pytest.raises(UnlistedFileError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == name


def test_release_refused_with_a_symbolic_link_even_to_the_right_bytes(release, root):
    for name in ("metadata/timestamp.json", f"targets/{PLAN}/plan.json"):
        kept = release.parent / "kept"
        (release / name).rename(kept)
        (release / name).symlink_to(kept)
        with pytest.raises(UnsafePathError) as error:
            verify_release(release, root, state=None)
        assert error.value.subject == name
        (release / name).unlink()
        kept.rename(release / name)
    (release / "targets").rename(release.parent / "elsewhere")
    (release / "targets").symlink_to(release.parent / "elsewhere")
    with pytest.raises(UnsafePathError):
        verify_release(release, root, state=None)


def test_release_refused_with_a_pipe_before_anything_is_read(release, root):
    (release / "metadata" / "timestamp.json").unlink()
    os.mkfifo(release / "metadata" / "timestamp.json")
    with pytest.raises(UnsafePathError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/timestamp.json"


def test_release_verifies_when_a_desktop_left_its_files_there(release, root):
    clean = verify_release(release, root, state=None)
    for name in (".DS_Store", "targets/.DS_Store", "metadata/Thumbs.db", "desktop.ini", "._x.json"):
        (release / name).write_bytes(b"positions of icons")
    assert verify_release(release, root, state=None).files.keys() == clean.files.keys()


@pytest.mark.parametrize("name", [".DS_Store", "._manifest.json", "Thumbs.db"])
def test_release_refused_when_what_has_a_desktops_name_is_no_file(release, root, name):
    (release / "targets" / name).mkdir()
    (release / "targets" / name / "expert.safetensors").write_bytes(b"x")
    with pytest.raises(TrustError):
        verify_release(release, root, state=None)
    shutil.rmtree(release / "targets" / name)
    (release / "targets" / name).symlink_to("/etc")
    with pytest.raises(TrustError):
        verify_release(release, root, state=None)


@pytest.mark.parametrize("name", [".hidden", "a\\b", "with blank", "caf\u00e9", "new\nline", "a:b"])
def test_release_refused_with_hidden_or_odd_names(release, root, name):
    (release / "targets" / name).write_bytes(b"x")
    with pytest.raises(UnsafePathError):
        verify_release(release, root, state=None)


@pytest.mark.parametrize(
    "path",
    [
        f"{PLAN}/plan/../../escape",
        "../outside",
        "/etc/passwd",
        f"{PLAN}/plan/..",
        f"{PLAN}\\plan.json",
        f"{PLAN}/plan/.hidden",
        f"{PLAN}/plan//x",
        f"{PLAN}/plan/x/",
        f"{PLAN}/plan/" + "a" * 300,
    ],
)
def test_release_refused_when_signed_metadata_lists_a_path_that_escapes(
    release, root, keys, now, path
):
    (release.parent / "outside").write_bytes(b"x")
    resign(
        release,
        keys,
        {"plans": sign_metadata(listing(now, f"{PLAN}/plan.json", path), [keys["plans"]])},
    )
    with pytest.raises(UnsafePathError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/plans.json"


@pytest.mark.parametrize("role", ["plans", "release"])
def test_expert_listed_in_a_role_of_the_aggregator_is_refused(release, root, keys, now, role):
    forged = b"forged weights"
    (release / "targets" / EXPERT).write_bytes(forged)
    honest = Metadata[Targets].from_file(str(release / "metadata" / f"{role}.json")).signed
    honest.targets |= listing(now, EXPERT, data=forged).targets
    resign(release, keys, {role: sign_metadata(honest, [keys[role]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == f"targets/{EXPERT}"


def test_expert_listed_in_another_silos_role_is_refused(release, root, keys, now):
    honest = Metadata[Targets].from_file(str(release / "metadata" / f"{PLAN}.east.json")).signed
    honest.targets |= listing(now, EXPERT, data=b"forged").targets
    (release / "targets" / EXPERT).write_bytes(b"forged")
    resign(release, keys, {f"{PLAN}.east": sign_metadata(honest, [keys["east"]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == f"targets/{EXPERT}"


def test_release_file_listed_by_plans_is_refused_too(release, root, keys, now):
    files = listing(now, f"{PLAN}/plan.json", f"{PLAN}/manifest.json")
    resign(release, keys, {"plans": sign_metadata(files, [keys["plans"]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == f"targets/{PLAN}/manifest.json"


@pytest.mark.parametrize("thief", ["east", "release", "online", "targets"])
def test_submission_role_signed_by_another_key_is_refused(release, root, keys, now, thief):
    files = {f"{PLAN}/silos/north/submission.json": (1, "0" * 64)}
    forged = sign_silo_metadata(
        PLAN, "north", files, keys[thief], root_digest=sha256_hex(root), version=2, now=now
    )
    resign(release, keys, {f"{PLAN}.north": forged})
    with pytest.raises(SignatureError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == f"metadata/{PLAN}.north.json"


def test_snapshot_signed_by_a_key_without_the_role_is_refused(release, root, keys):
    resign(release, keys, {}, online=keys["release"])
    with pytest.raises(SignatureError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/timestamp.json"


def test_targets_that_lists_files_itself_is_refused(release, root, keys):
    targets = Metadata[Targets].from_file(str(release / "metadata" / "targets.json")).signed
    targets.targets[EXPERT] = TargetFile(1, {"sha256": "0" * 64}, EXPERT)
    resign(release, keys, {"targets": sign_metadata(targets, [keys["targets"]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/targets.json"


@pytest.mark.parametrize(
    "attack", ["wider paths", "two keys", "shared key", "stranger", "other plan", "not terminating"]
)
def test_targets_that_delegates_otherwise_than_the_repository_does_is_refused(
    release, root, keys, attack
):
    targets = Metadata[Targets].from_file(str(release / "metadata" / "targets.json")).signed
    roles = targets.delegations.roles
    north = roles[f"{PLAN}.north"]
    if attack == "wider paths":
        north.paths.append(f"{PLAN}/silos/*/*")
    elif attack == "two keys":
        targets.add_key(SigningKey.generate().public.tuf_key(), north.name)
    elif attack == "shared key":
        north.keyids[:] = roles[f"{PLAN}.east"].keyids
    elif attack == "stranger":
        roles["stranger"] = type(north)("stranger", north.keyids, 1, True, ["x"])
    elif attack == "other plan":
        roles["other-00000000.north"] = type(north)(
            "other-00000000.north", north.keyids, 1, True, ["x"]
        )
    else:
        north.terminating = False
    data = (
        sign_metadata(targets, [keys["targets"]])
        if attack != "not terminating"
        else sign_loosely(targets, keys)
    )
    resign(release, keys, {"targets": data})
    with pytest.raises((RoleError, DocumentError)) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/targets.json"


def sign_loosely(signed, keys) -> bytes:
    metadata = Metadata(signed)
    metadata.sign(CryptoSigner(keys["targets"]._private))
    return metadata.to_bytes()


def test_delegated_role_that_delegates_further_is_refused(release, root, keys, now):
    targets = Metadata[Targets].from_file(str(release / "metadata" / "targets.json")).signed
    files = listing(now, f"{PLAN}/plan.json")
    files.delegations = targets.delegations
    resign(release, keys, {"plans": sign_metadata(files, [keys["plans"]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/plans.json"


def two_versions(federation, folder):
    """Two releases that follow each other."""
    old = federation.export(folder / "old")
    federation.publish(manifest=b'{"manifest": 2}')
    return old, federation.export(folder / "new")


def test_mixed_metadata_of_two_releases_is_refused(federation, tmp_path):
    old, new = two_versions(federation, tmp_path)
    for name in ("timestamp.json", "snapshot.json", "release.json"):
        mixed = Path(shutil.copytree(new, tmp_path / f"mixed-{name}"))
        shutil.copy(old / "metadata" / name, mixed / "metadata" / name)
        with pytest.raises(DigestError) as error:
            verify_release(mixed, federation.root, state=None)
        wanted = "snapshot.json" if name == "timestamp.json" else name
        assert error.value.subject == f"metadata/{wanted}"
    mixed = Path(shutil.copytree(new, tmp_path / "mixed-target"))
    shutil.copy(
        old / "targets" / PLAN / "manifest.json", mixed / "targets" / PLAN / "manifest.json"
    )
    with pytest.raises(DigestError) as error:
        verify_release(mixed, federation.root, state=None)
    assert error.value.subject == f"targets/{PLAN}/manifest.json"


def test_older_release_served_to_the_same_state_is_refused(federation, tmp_path):
    old, new = two_versions(federation, tmp_path)
    state = tmp_path / "state"
    verify_release(old, federation.root, state=state)
    verify_release(new, federation.root, state=state)
    with pytest.raises(RollbackError) as error:
        verify_release(old, federation.root, state=state)
    assert error.value.subject == "metadata/timestamp.json"
    assert verify_release(new, federation.root, state=state)
    assert verify_release(old, federation.root, state=tmp_path / "another state")


def test_same_versions_with_other_content_are_refused_by_the_same_state(
    release, root, keys, tmp_path
):
    state = tmp_path / "state"
    verify_release(release, root, state=state)
    timestamp = Metadata[Timestamp].from_file(str(release / "metadata" / "timestamp.json")).signed
    timestamp.expires = timestamp.expires.replace(year=timestamp.expires.year + 1)
    (release / "metadata" / "timestamp.json").write_bytes(
        sign_metadata(timestamp, [keys["online"]])
    )
    assert verify_release(release, root, state=None)
    with pytest.raises(RollbackError) as error:
        verify_release(release, root, state=state)
    assert error.value.subject == "metadata/timestamp.json"


def test_state_is_not_written_by_a_release_that_is_refused(federation, tmp_path):
    old, new = two_versions(federation, tmp_path)
    (new / "targets" / EXPERT).write_bytes(b"damaged")
    state = tmp_path / "state"
    with pytest.raises(DigestError):
        verify_release(new, federation.root, state=state)
    assert verify_release(old, federation.root, state=state)


def test_damaged_state_is_said_so_and_never_silently_forgotten(published, root, tmp_path):
    state = tmp_path / "state"
    verify_release(published, root, state=state)
    record = state / hashlib.sha256(root).hexdigest() / f"{PLAN}.json"
    record.write_bytes(record.read_bytes()[:-5])
    with pytest.raises(DocumentError) as error:
        verify_release(published, root, state=state)
    assert str(record) in error.value.subject


def test_state_that_cannot_be_written_is_said_so(published, root, tmp_path):
    (tmp_path / "state").write_bytes(b"a file")
    with pytest.raises(SetupError):
        verify_release(published, root, state=tmp_path / "state")


def test_default_state_lies_in_the_users_state_folder(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_state_folder() == Path("/somewhere/archipelago")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_state_folder() == Path.home() / ".local" / "state" / "archipelago"


def test_expired_timestamp_is_refused_unless_archived_and_then_reported(published, root, later):
    assert not verify_release(published, root, state=None, now=later(89)).expired
    with pytest.raises(ExpiredError) as error:
        verify_release(published, root, state=None, now=later(90))
    assert error.value.subject == "metadata/timestamp.json"
    verified = verify_release(published, root, state=None, now=later(91), archived=True)
    assert verified.expired
    assert verified.expires == later(90)
    assert not verify_release(published, root, state=None, now=later(1), archived=True).expired


def test_archived_forgives_no_other_expiry(published, root, later):
    with pytest.raises(ExpiredError) as error:
        verify_release(published, root, state=None, now=later(5 * 365), archived=True)
    assert error.value.subject == "metadata/1.root.json"


def test_archived_forgives_no_expiry_of_a_role_that_signs_files(release, root, keys, now, later):
    short = listing(now, f"{PLAN}/plan.json")
    short.expires = later(100)
    resign(release, keys, {"plans": sign_metadata(short, [keys["plans"]])})
    with pytest.raises(ExpiredError) as error:
        verify_release(release, root, state=None, now=later(101), archived=True)
    assert error.value.subject == "metadata/plans.json"


def test_snapshot_that_names_another_version_than_it_hashes_is_refused(release, root, keys):
    snapshot = Metadata[Snapshot].from_file(str(release / "metadata" / "snapshot.json")).signed
    snapshot.meta["plans.json"].version += 1
    (release / "metadata" / "snapshot.json").write_bytes(sign_metadata(snapshot, [keys["online"]]))
    resign(release, keys, {})
    with pytest.raises(RollbackError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/plans.json"


def test_snapshot_that_lists_a_role_nobody_delegates_to_is_refused(release, root, keys, now):
    resign(release, keys, {f"{PLAN}.west": sign_metadata(listing(now), [keys["north"]])})
    with pytest.raises(RoleError) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/snapshot.json"


def test_another_federations_root_is_refused(published, make_federation):
    other = make_federation().root
    with pytest.raises(RootError) as error:
        verify_release(published, other, state=None)
    assert error.value.subject == "metadata/1.root.json"


def test_whole_release_of_another_federation_is_refused(make_federation, root, tmp_path):
    other = make_federation()
    other.start_plan()
    other.publish()
    with pytest.raises(RootError):
        verify_release(other.export(tmp_path / "other"), root, state=None)


def test_pinned_root_that_is_no_root_is_refused(release):
    for data in (b"", b"{}", (release / "metadata" / "timestamp.json").read_bytes()):
        (release / "metadata" / "1.root.json").write_bytes(data)
        with pytest.raises(RootError):
            verify_release(release, data, state=None)


def test_empty_and_absent_folders_are_said_so(root, tmp_path):
    with pytest.raises(AbsentFileError) as error:
        verify_release(tmp_path, root, state=None)
    assert error.value.subject == "metadata/1.root.json"
    with pytest.raises(MissingFileError):
        verify_release(tmp_path / "nowhere", root, state=None)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(MissingFileError):
        verify_release(tmp_path / "file", root, state=None)


def test_pinned_silo_keys_must_match_and_must_be_there(published, root, keys):
    north = keys["north"].public
    east = keys["east"].public
    pins = {"north": north.fingerprint, "east": east.short.upper()}
    assert verify_release(published, root, state=None, known_keys=KnownSiloKeys(pins))
    with pytest.raises(SignatureError) as error:
        verify_release(
            published, root, state=None, known_keys=KnownSiloKeys({"north": east.fingerprint})
        )
    assert error.value.subject == f"metadata/{PLAN}.north.json"
    with pytest.raises(RoleError):
        verify_release(
            published, root, state=None, known_keys=KnownSiloKeys({"west": east.fingerprint})
        )
    with pytest.raises(SetupError):
        verify_release(published, root, state=None, known_keys=KnownSiloKeys({"north": "abc"}))


def test_oversized_metadata_is_refused_before_it_is_parsed(release, root):
    for name, size in (
        ("timestamp", 16_385),
        ("snapshot", 2_000_001),
        ("1.root", 512_001),
        ("plans", 5_000_001),
    ):
        path = release / "metadata" / f"{name}.json"
        original = path.read_bytes()
        path.write_bytes(b"[" * size)
        with pytest.raises(DocumentError) as error:
            verify_release(release, root, state=None)
        assert error.value.subject == f"metadata/{name}.json"
        path.write_bytes(original)


UNSIGNED_CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda value: value | {"note": "unsigned"},
        lambda value: value | {"signatures": value["signatures"] * 2},
        lambda value: value | {"signatures": [value["signatures"][0] | {"note": "unsigned"}]},
        lambda value: (
            value
            | {
                "signatures": [
                    value["signatures"][0] | {"sig": value["signatures"][0]["sig"].upper()}
                ]
            }
        ),
        lambda value: (
            value
            | {
                "signatures": [
                    value["signatures"][0] | {"sig": " " + value["signatures"][0]["sig"]}
                ]
            }
        ),
        lambda value: (
            value | {"signatures": [*value["signatures"], {"keyid": "f" * 64, "sig": "0" * 128}]}
        ),
        lambda value: value | {"signatures": []},
    ],
)


@UNSIGNED_CHANGES
def test_change_outside_the_signature_is_refused(release, root, change):
    path = release / "metadata" / "timestamp.json"
    value = change(json.loads(path.read_bytes()))
    path.write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises((DocumentError, SignatureError)) as error:
        verify_release(release, root, state=None)
    assert error.value.subject == "metadata/timestamp.json"


def test_tufs_own_updater_does_not_see_a_change_outside_the_signature(release, root, tmp_path):
    """The control: without our strictness this byte would be free."""
    path = release / "metadata" / "timestamp.json"
    value = json.loads(path.read_bytes())
    value["signatures"][0]["sig"] = value["signatures"][0]["sig"].upper()
    path.write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
    updater(release, tmp_path / "cache", root).refresh()


def test_release_not_yet_published_is_refused(make_federation, tmp_path):
    early = make_federation()
    early.start_plan()
    with pytest.raises(AbsentFileError) as error:
        verify_release(early.export(tmp_path / "early"), early.root, state=None)
    assert error.value.subject == f"targets/{PLAN}/manifest.json"


def test_bundle_verifies_before_any_silo_has_answered_and_is_as_strict(
    make_federation, tmp_path, later
):
    own = make_federation()
    own.start_plan()
    bundle = own.export(tmp_path / "bundle", bundle=True)
    verified = verify_bundle(bundle, own.root, state=tmp_path / "state")
    assert set(verified.files) == {"plan.json", "plan/centroids.safetensors"}
    for name in files_of(bundle):
        original = (bundle / name).read_bytes()
        (bundle / name).write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(ArchipelagoError) as error:
            verify_bundle(bundle, own.root, state=None)
        assert error.value.subject == name
        (bundle / name).write_bytes(original)
    with pytest.raises(ExpiredError):
        verify_bundle(bundle, own.root, state=None, now=later(90))
    (bundle / "metadata" / "release.json").write_bytes((own.folder / "release.json").read_bytes())
    with pytest.raises(UnlistedFileError):
        verify_bundle(bundle, own.root, state=None)


def test_bundle_of_an_older_plan_is_refused_after_a_newer_one(make_federation, tmp_path):
    own = make_federation()
    own.start_plan()
    old = own.export(tmp_path / "old", bundle=True)
    own.plan_id = "digits-00000002"
    own.start_plan()
    new = own.export(tmp_path / "new", bundle=True)
    state = tmp_path / "state"
    assert verify_bundle(old, own.root, state=state).plan_id == PLAN
    assert verify_bundle(new, own.root, state=state).plan_id == "digits-00000002"
    with pytest.raises(RollbackError):
        verify_bundle(old, own.root, state=state)


def test_tufs_own_updater_finds_and_verifies_every_published_file(published, root, tmp_path):
    client = updater(published, tmp_path / "cache", root)
    client.refresh()
    for name in files_of(published / "targets"):
        info = client.get_targetinfo(name)
        assert info is not None, name
        assert (
            Path(client.download_target(info)).read_bytes()
            == (published / "targets" / name).read_bytes()
        )
    assert client.get_targetinfo(f"{PLAN}/silos/west/submission.json") is None


def test_tufs_own_updater_follows_the_repository_through_plans_and_withdrawals_with_its_cache(
    federation, tmp_path
):
    cache = tmp_path / "cache"
    steps = [
        lambda: None,
        lambda: federation.publish(manifest=b'{"manifest": 2}', silos=("north",)),
        lambda: (
            setattr(federation, "plan_id", "digits-00000002"),
            federation.start_plan(),
            federation.publish(),
        ),
    ]
    for number, step in enumerate(steps):
        step()
        release = federation.export(tmp_path / str(number))
        assert verify_release(release, federation.root, state=tmp_path / "state")
        client = updater(release, cache, federation.root)
        for name in files_of(release / "targets"):
            assert client.get_targetinfo(name) is not None
