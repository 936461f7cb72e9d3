import json
import stat

import pytest
from tuf.api.metadata import Metadata, Snapshot, Targets

from ddm.errors import (
    MissingFileError,
    RoleError,
    RollbackError,
    SetupError,
    SignatureError,
    UnsafePathError,
)
from ddm.protocol.base import MAX_SILOS, now_utc
from ddm.trust.drafts import Delegates, draft_targets
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import parse_payload, payload_of
from ddm.trust.repository import Repository
from ddm.trust.verify import verify_release

PLAN = "digits-3f9a1c2e"


def read(federation, name: str) -> dict:
    return json.loads((federation.folder / f"{name}.json").read_bytes())["signed"]


def test_new_federation_holds_every_role_at_version_one(make_federation):
    own = make_federation()
    names = {path.name for path in own.folder.iterdir()}
    assert names == {
        "1.root.json",
        *(f"{r}.json" for r in ("targets", "plans", "release", "snapshot", "timestamp")),
    }
    assert {read(own, name.removesuffix(".json"))["version"] for name in names} == {1}
    assert read(own, "1.root")["consistent_snapshot"] is False
    assert read(own, "targets")["targets"] == {}


def test_lives_are_ninety_days_for_the_timestamp_and_five_years_for_the_rest(federation, later):
    for path in federation.folder.iterdir():
        days = 90 if path.name == "timestamp.json" else 5 * 365
        assert read(federation, path.name.removesuffix(".json"))["expires"] == later(days).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )


def test_federation_is_never_founded_twice_in_one_folder(federation):
    before = {path.name: path.read_bytes() for path in federation.folder.iterdir()}
    with pytest.raises(SetupError):
        federation.__post_init__()
    assert {path.name: path.read_bytes() for path in federation.folder.iterdir()} == before


def test_publishing_interrupted_before_the_timestamp_can_be_run_again(federation, tmp_path):
    timestamp = (federation.folder / "timestamp.json").read_bytes()
    federation.publish(manifest=b'{"manifest": 2}')
    (federation.folder / "timestamp.json").write_bytes(timestamp)
    federation.publish(manifest=b'{"manifest": 3}')
    assert verify_release(federation.export(tmp_path / "r"), federation.root, state=None)


def test_versions_increase_by_one_and_snapshot_carries_length_and_digest(federation):
    before = {
        name: read(federation, name)["version"]
        for name in ("targets", "plans", "release", "snapshot", "timestamp")
    }
    federation.publish()
    after = {name: read(federation, name)["version"] for name in before}
    assert after == before | {
        name: before[name] + 1 for name in ("release", "snapshot", "timestamp")
    }
    meta = read(federation, "snapshot")["meta"]
    assert set(meta) == {
        "targets.json",
        "plans.json",
        "release.json",
        f"{PLAN}.north.json",
        f"{PLAN}.east.json",
    }
    for name, entry in meta.items():
        assert entry["length"] == (federation.folder / name).stat().st_size
        assert set(entry["hashes"]) == {"sha256"}


def test_silo_metadata_is_republished_byte_for_byte(federation, tmp_path):
    release = federation.export(tmp_path / "r")
    for silo in ("north", "east"):
        assert (
            release / "metadata" / f"{PLAN}.{silo}.json"
        ).read_bytes() == federation.silo_metadata(silo)


def test_new_plan_delegates_to_its_own_silos_only_and_keeps_old_ones_outdated_in_the_snapshot(
    federation,
):
    federation.plan_id = "digits-00000002"
    federation.start_plan(silos=("north",))
    roles = [role["name"] for role in read(federation, "targets")["delegations"]["roles"]]
    assert roles == ["plans", "release", "digits-00000002.north"]
    assert read(federation, "snapshot")["meta"][f"{PLAN}.north.json"] == {"version": 2}


def test_release_list_is_emptied_when_a_plan_starts(federation):
    federation.plan_id = "digits-00000002"
    federation.start_plan(silos=("north",))
    assert read(federation, "release")["targets"] == {}


def test_withdrawn_silo_leaves_the_release_and_the_rest_verifies(federation, tmp_path):
    federation.publish(silos=("north",))
    release = federation.export(tmp_path / "r")
    verified = verify_release(release, federation.root, state=None)
    assert set(verified.silo_keys) == {"north"}
    assert not (release / "metadata" / f"{PLAN}.east.json").exists()


def test_silo_metadata_older_than_published_is_not_published(federation):
    for silo, version in (("north", 2),):
        data = federation.silo_metadata(silo, version)
        publish = federation.repository.publish
        rest = {
            "release_key": federation.keys["release"],
            "online_key": federation.keys["online"],
            "now": federation.now,
        }
        publish(PLAN, {silo: data}, {}, **rest)
        with pytest.raises(RollbackError):
            publish(PLAN, {silo: federation.silo_metadata(silo, 1)}, {}, **rest)


def test_silo_metadata_by_another_key_or_of_a_stranger_is_not_published(federation):
    before = (federation.folder / "release.json").read_bytes()
    federation.keys["north"] = SigningKey.generate()
    with pytest.raises(SignatureError):
        federation.publish()
    federation.keys["west"] = SigningKey.generate()
    with pytest.raises(RoleError):
        federation.publish(silos=("west",))
    assert (federation.folder / "release.json").read_bytes() == before


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (f"{PLAN}/silos/north/submission.json", RoleError),
        (f"{PLAN}/plan.json", RoleError),
        (f"{PLAN}/other.txt", RoleError),
        ("digits-00000002/manifest.json", RoleError),
        (f"{PLAN}/../manifest.json", UnsafePathError),
    ],
)
def test_release_refuses_to_list_paths_that_are_not_its_own(federation, path, error):
    with pytest.raises(error):
        federation.repository.publish(
            PLAN,
            {},
            {path: (1, "a" * 64)},
            release_key=federation.keys["release"],
            online_key=federation.keys["online"],
            now=federation.now,
        )


def test_plan_refuses_shared_keys_no_silos_and_odd_ids(federation):
    public = federation.keys["north"].public
    before = (federation.folder / "targets.json").read_bytes()
    for plan_id, silos in (
        (PLAN, {"a": public, "b": public}),
        (PLAN, {}),
        ("digits", {"a": public}),
        (PLAN, {"A": public}),
    ):
        federation.plan_id = plan_id
        with pytest.raises(RoleError):
            Repository(federation.folder).start_plan(
                plan_id,
                {},
                targets=federation.plan_targets(silos),
                plans_key=federation.keys["plans"],
                release_key=federation.keys["release"],
                online_key=federation.keys["online"],
                now=federation.now,
            )
    assert (federation.folder / "targets.json").read_bytes() == before


def test_repository_without_metadata_is_said_so(tmp_path):
    with pytest.raises(MissingFileError):
        Repository(tmp_path).export_release(tmp_path / "out")


def test_everything_written_parses_with_python_tuf_alone(federation):
    for path in federation.folder.iterdir():
        metadata = Metadata.from_file(str(path))
        assert metadata.to_bytes() == path.read_bytes()
    assert isinstance(
        Metadata[Snapshot].from_file(str(federation.folder / "snapshot.json")).signed, Snapshot
    )


def test_no_temporary_files_remain_and_everything_is_readable(federation):
    for path in federation.folder.iterdir():
        assert not path.name.startswith(".")
        assert stat.S_ISREG(path.stat().st_mode)


def test_targets_delegate_to_as_many_silos_as_a_plan_may_have() -> None:
    keys = [SigningKey.generate().public for _ in range(MAX_SILOS + 2)]
    silos = {f"silo{number:04d}": key for number, key in enumerate(keys[2:])}
    delegates = Delegates(plans=keys[0], release=keys[1], plan_id=PLAN, silos=silos)
    payload = payload_of(draft_targets(1, delegates, now_utc()))
    assert Delegates.from_targets(parse_payload(payload, Targets, "targets")) == delegates
