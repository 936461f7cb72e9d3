"""What python-tuf's own client, without a line of ours, makes of our releases over HTTP, and of attacks on them."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, MetaFile, Snapshot, Timestamp
from tuf.ngclient import Updater

from ddm.trust.drafts import Holders
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import sign_metadata
from tests.support.web_host import WebHost, serve_folder
from tests.support.web_host import tuf_client as new_client

PLAN = "digits-3f9a1c2e"


@pytest.fixture
def www(tmp_path: Path) -> Path:
    """What the host serves: a release is moved here whole, as an operator does."""
    return tmp_path / "www"


@pytest.fixture
def host(www: Path) -> Iterator[WebHost]:
    with serve_folder(www) as server:
        yield server


@pytest.fixture
def client(host: WebHost, tmp_path: Path, federation) -> Callable[..., Updater]:
    """A client that keeps its cache from one look to the next; one of another name has seen nothing yet."""
    return lambda name="client": new_client(host.url, tmp_path / name, federation.root)


def serve(federation, www: Path) -> None:
    """Put the present release where the host serves it."""
    for child in www.iterdir():
        shutil.rmtree(child)
    federation.export(www)


def fetch(client: Updater, path: str) -> bytes:
    info = client.get_targetinfo(path)
    assert info is not None
    return Path(client.download_target(info)).read_bytes()


def renew(federation, **changes: object) -> None:
    """Sign targets again, with other delegations."""
    repository = federation.repository
    targets = repository.next_targets(replace(repository.delegates(), **changes), federation.now)
    signed = sign_metadata(targets, [federation.keys["targets"]])
    repository.renew(targets=signed, online_key=federation.keys["online"], now=federation.now)


def rotate_delegated_key(federation, role: str, new_key: SigningKey) -> None:
    """Replace a key that targets names, by signing targets again."""
    repository = federation.repository
    delegates = replace(repository.delegates(), **{role: new_key.public})
    targets = repository.next_targets(delegates, federation.now)
    repository.renew(
        targets=sign_metadata(targets, [federation.keys["targets"]]),
        online_key=federation.keys["online"],
        now=federation.now,
        **{f"{role}_key": new_key},
    )


def rotate_key_of_the_root(federation, role: str, new_key: SigningKey) -> None:
    """Replace a key that the root names: root, targets, or the online key of snapshot and timestamp."""
    repository = federation.repository
    keys = federation.keys
    new_holders = Holders((new_key.public,))
    changes = {role: new_holders}
    online_key = keys["online"]
    signers = [keys["root"], keys["root2"]]
    new_targets = None
    if role == "online":
        changes = {"snapshot": new_holders, "timestamp": new_holders}
        online_key = new_key
    if role == "root":
        signers.append(new_key)
    if role == "targets":
        targets = repository.next_targets(repository.delegates(), federation.now)
        new_targets = sign_metadata(targets, [new_key])
    root = sign_metadata(repository.next_root(changes, federation.now), signers)
    repository.renew(root=root, targets=new_targets, online_key=online_key, now=federation.now)


def test_untouched_release_is_accepted_to_the_last_file(federation, www, client) -> None:
    serve(federation, www)
    updater = client()
    for path, data in federation.files.items():
        assert fetch(updater, path) == data
    assert updater.get_targetinfo(f"{PLAN}/silos/west/submission.json") is None


@pytest.mark.parametrize("role", ["root", "targets", "online", "plans", "release"])
def test_release_after_a_rotation_is_accepted_by_clients_old_and_new(
    federation, www, client, role
) -> None:
    serve(federation, www)
    client().refresh()
    new_key = SigningKey.generate()
    if role in ("plans", "release"):
        rotate_delegated_key(federation, role, new_key)
    else:
        rotate_key_of_the_root(federation, role, new_key)
    serve(federation, www)
    for updater in (client(), client("new")):
        assert fetch(updater, f"{PLAN}/manifest.json") == federation.files[f"{PLAN}/manifest.json"]
        assert fetch(updater, f"{PLAN}/plan.json") == federation.files[f"{PLAN}/plan.json"]


def test_rollback_to_an_older_release_is_refused(federation, www, client) -> None:
    serve(federation, www)
    older = shutil.copytree(www, www.parent / "older")
    federation.publish(manifest=b'{"manifest": 2}')
    serve(federation, www)
    assert fetch(client(), f"{PLAN}/manifest.json") == b'{"manifest": 2}'
    shutil.rmtree(www / "metadata")
    shutil.copytree(older / "metadata", www / "metadata")
    with pytest.raises(BadVersionNumberError):
        client().refresh()


def test_freeze_at_a_release_whose_timestamp_expired_is_refused(
    make_federation, www, host, tmp_path, now
) -> None:
    frozen = make_federation(now=now - timedelta(days=91))
    frozen.start_plan()
    frozen.publish()
    serve(frozen, www)
    url = f"{host.url}/metadata/"
    with pytest.raises(ExpiredMetadataError, match=r"timestamp"):
        Updater(str(tmp_path / "cache"), url, bootstrap=frozen.root).refresh()


@pytest.mark.parametrize(
    "name", ["snapshot.json", "targets.json", "release.json", f"{PLAN}.north.json"]
)
def test_mix_of_metadata_of_two_versions_is_refused(federation, www, client, name) -> None:
    serve(federation, www)
    older = shutil.copytree(www, www.parent / "older")
    renew(federation)
    signed = federation.silo_metadata
    federation.silo_metadata = lambda silo_id, version=2: signed(silo_id, version)
    federation.publish(manifest=b'{"manifest": 2}')
    serve(federation, www)
    shutil.copy(older / "metadata" / name, www / "metadata" / name)
    with pytest.raises(RepositoryError):
        fetch(
            client(),
            f"{PLAN}/silos/north/submission.json" if "north" in name else f"{PLAN}/manifest.json",
        )


def test_target_file_of_another_version_is_refused(federation, www, client) -> None:
    federation.publish(manifest=b'{"manifest": 2}')
    serve(federation, www)
    (www / "targets" / PLAN / "manifest.json").write_bytes(b'{"manifest": 1}')
    with pytest.raises(LengthOrHashMismatchError):
        fetch(client(), f"{PLAN}/manifest.json")


@pytest.mark.parametrize(
    "path",
    [
        "metadata/2.root.json",
        "metadata/timestamp.json",
        "metadata/snapshot.json",
        f"targets/{PLAN}/router.safetensors",
    ],
)
def test_endless_data_are_refused_after_a_bounded_number_of_bytes(
    federation, www, host, client, path
) -> None:
    serve(federation, www)
    host.endless.add(f"/{path}")
    with pytest.raises(DownloadLengthMismatchError):
        fetch(client(), f"{PLAN}/router.safetensors")
    assert host.sent < 64 * 1024**2


@pytest.mark.parametrize(
    "thief", [False, True], ids=["files put back", "and listed by a thief of the online key"]
)
def test_target_of_a_removed_silo_is_refused(federation, www, client, thief) -> None:
    path = f"{PLAN}/silos/east/submission.json"
    serve(federation, www)
    older = shutil.copytree(www, www.parent / "older")
    assert fetch(client(), path) == federation.files[path]
    renew(federation, silos={"north": federation.keys["north"].public})
    federation.publish(manifest=b'{"manifest": 2}', silos=("north",))
    serve(federation, www)
    shutil.copytree(
        older / "targets" / PLAN / "silos" / "east", www / "targets" / PLAN / "silos" / "east"
    )
    role = www / "metadata" / f"{PLAN}.east.json"
    shutil.copy(older / "metadata" / role.name, role)
    if thief:
        list_again(federation, www, role)
    updater = client()
    assert updater.get_targetinfo(path) is None
    assert (
        fetch(updater, f"{PLAN}/silos/north/submission.json")
        == federation.files[path.replace("east", "north")]
    )


@pytest.mark.parametrize("known", [True, False], ids=["known before", "never seen"])
def test_target_of_a_silo_that_left_is_refused_although_its_key_may_still_sign(
    federation, www, client, known
) -> None:
    """The attack: the host of a release without this silo puts its files and its signed metadata back."""
    path = f"{PLAN}/silos/east/submission.json"
    serve(federation, www)
    older = shutil.copytree(www, www.parent / "older")
    if known:
        assert fetch(client(), path) == federation.files[path]
    federation.publish(manifest=b'{"manifest": 2}', silos=("north",))
    serve(federation, www)
    shutil.copytree(
        older / "targets" / PLAN / "silos" / "east", www / "targets" / PLAN / "silos" / "east"
    )
    shutil.copy(older / "metadata" / f"{PLAN}.east.json", www / "metadata")
    with pytest.raises(BadVersionNumberError):
        client().get_targetinfo(path)
    assert fetch(client(), f"{PLAN}/manifest.json") == b'{"manifest": 2}'


def list_again(federation, www: Path, role: Path) -> None:
    """Sign a snapshot that lists the removed silo's metadata as present."""
    online = federation.keys["online"]
    snapshot = Metadata[Snapshot].from_file(str(www / "metadata" / "snapshot.json")).signed
    snapshot.version += 1
    snapshot.meta[role.name] = MetaFile.from_data(1, role.read_bytes(), ["sha256"])
    data = sign_metadata(snapshot, [online])
    (www / "metadata" / "snapshot.json").write_bytes(data)
    timestamp = Metadata[Timestamp].from_file(str(www / "metadata" / "timestamp.json")).signed
    timestamp.version += 1
    timestamp.snapshot_meta = MetaFile.from_data(snapshot.version, data, ["sha256"])
    (www / "metadata" / "timestamp.json").write_bytes(sign_metadata(timestamp, [online]))


def test_root_signed_by_too_few_holders_is_refused(federation, www, client) -> None:
    """The attack: one of two holders makes a root that needs nobody else."""
    alone = federation.repository.next_root(
        {"root": Holders((federation.keys["root"].public,))}, federation.now
    )
    serve(federation, www)
    (www / "metadata" / "2.root.json").write_bytes(sign_metadata(alone, [federation.keys["root"]]))
    with pytest.raises(UnsignedMetadataError):
        client().refresh()
