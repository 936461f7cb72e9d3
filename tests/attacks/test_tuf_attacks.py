"""The attacks that the TUF specification names, on real releases, against `ddm verify` and against python-tuf's client.

Both readers keep a memory from one look to the next. Where the specification says that an attack must be refused, both
refuse; where it says that clients recover, both recover, without deleting anything by hand.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    SlowRetrievalError,
    UnsignedMetadataError,
)

import ddm.publishing.signing
import ddm.publishing.staging
from ddm.errors import RollbackError, SignatureError
from ddm.protocol.base import now_utc
from ddm.publishing.keys import load_key
from ddm.trust.keys import SigningKey
from ddm.trust.schema import MAX_VERSION
from ddm.trust.verify import verify_bundle
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation
from tests.support.publishing import publish_short_pages, publish_unchecked
from tests.support.thief import forge_metadata, list_again
from tests.support.web_host import WebHost, serve_folder, tuf_client


@dataclass
class Readers:
    """A host, and two readers of it: `ddm verify`, and python-tuf's client."""

    published: PublishedRelease
    folder: Path
    host: WebHost
    num: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    patience_s: int = 30
    names: list[str] = field(
        default_factory=lambda: ["plan.json", "manifest.json", "router.safetensors"]
    )

    @property
    def www(self) -> Path:
        """What the host serves."""
        return self.folder / "www"

    @property
    def metadata(self) -> Path:
        """Its metadata."""
        return self.www / "metadata"

    @property
    def targets(self) -> Path:
        """The files of its plan."""
        return self.www / "targets" / self.published.plan_id

    @property
    def fed(self) -> Path:
        """The aggregator's folder."""
        return self.published.tiny.federation.path

    def serve(self, release: Path) -> None:
        """Put a release where the host serves it."""
        for child in self.www.iterdir():
            shutil.rmtree(child)
        shutil.copytree(release, self.www, dirs_exist_ok=True)

    def operate(self, *words: object) -> None:
        """Run a command of the aggregator."""
        result = run_command("aggregator", *words, "--passphrase-file", self.folder / "secret")
        assert result.code == 0, result.err

    def again(self) -> None:
        """Serve the first version, untouched."""
        self.serve(self.published.release)

    def publish(self) -> Path:
        """Publish the next version and serve it."""
        self.num += 1
        out = self.folder / f"release-{self.num}"
        self.operate("publish", self.fed, "--rehearsal", "--out", out, "--renew")
        self.serve(out)
        return out

    def stolen(self, name: str) -> SigningKey:
        """A key of the federation, in the hands of a thief."""
        return load_key(self.published.tiny.federation, name, PASSPHRASE)

    def verify(self, name: str = "reader") -> int:
        """What `ddm verify` says."""
        root = self.published.root
        state = self.folder / name / "state"
        return int(
            str(run_command("ddm", "verify", self.www, "--root", root, "--state", state).code)
        )

    def fetch(self, name: str = "reader") -> None:
        """Fetch with python-tuf's client, from metadata to files."""
        cache = self.folder / name / "cache"
        root = self.published.root.read_bytes()
        updater = tuf_client(self.host.url, cache, root, patience_s=self.patience_s)
        silos = [path.name for path in (self.targets / "silos").iterdir()]
        for path in (*self.names, *(f"silos/{silo}/submission.json" for silo in silos)):
            info = updater.get_targetinfo(f"{self.published.plan_id}/{path}")
            assert info is not None, path
            updater.download_target(info)

    def accept(self, name: str = "reader") -> None:
        """Both accept."""
        assert self.verify(name) == 0
        self.fetch(name)

    def refuse(self, code: int, error: type[Exception], *, new: bool = False) -> None:
        """Both refuse; python-tuf's client fetches nothing that it has in its cache, so some attacks need a new one."""
        assert self.verify() == code
        with pytest.raises(error):
            self.fetch(self.stranger() if new else "reader")

    def stranger(self) -> str:
        """The name of a reader who has seen nothing."""
        return f"new-{next(self.numbers)}"


@pytest.fixture
def readers(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Readers]:
    """Two readers that have seen the first version of a release."""
    publish_short_pages(monkeypatch)
    (tmp_path / "secret").write_bytes(PASSPHRASE + b"\n")
    with serve_folder(tmp_path / "www") as host:
        both = Readers(published, tmp_path, host)
        both.serve(published.release)
        both.accept()
        yield both


# Fast-forward


def test_readers_recover_when_a_key_stolen_for_a_fast_forward_is_rotated(readers: Readers) -> None:
    """The thief of the online key makes the versions so high that no later release can follow."""
    for versions in (
        {"timestamp": MAX_VERSION},
        {"snapshot": MAX_VERSION - 1, "timestamp": MAX_VERSION - 1},
    ):
        with case(versions=versions):
            before = (
                readers.folder / f"release-{readers.num}"
                if readers.num
                else readers.published.release
            )
            list_again(readers.metadata, readers.stolen("online"), **versions)
            readers.accept()
            readers.serve(before)
            readers.refuse(13, BadVersionNumberError)
            readers.operate("rotate", readers.fed, "online")
            readers.publish()
            readers.accept()
            readers.accept("new")


def test_a_thief_of_online_and_release_keys_is_recovered_from_once_both_are_rotated(
    readers: Readers,
) -> None:
    before = readers.published.release

    def last(signed: dict[str, Any]) -> None:
        signed["version"] = MAX_VERSION

    forge_metadata(readers.metadata / "release.json", readers.stolen("release"), last)
    list_again(
        readers.metadata,
        readers.stolen("online"),
        "release.json",
        snapshot=99,
        timestamp=MAX_VERSION,
    )
    readers.accept()
    readers.serve(before)
    readers.refuse(13, BadVersionNumberError)
    readers.operate("rotate", readers.fed, "online")
    readers.publish()
    # The thief still holds the release key, under which ddm remembers a higher version; TUF would forget that too.
    assert readers.verify() == 13
    readers.operate("rotate", readers.fed, "release")
    readers.publish()
    readers.accept()


def test_versions_of_roles_in_a_stolen_snapshot_bind_no_reader(readers: Readers) -> None:
    """The attack: the thief of the online key alone lists targets at a version that its holders never signed."""
    before = readers.published.release

    def last(signed: dict[str, Any]) -> None:
        signed["meta"]["targets.json"]["version"] = MAX_VERSION

    forge_metadata(readers.metadata / "snapshot.json", readers.stolen("online"), last)
    list_again(readers.metadata, readers.stolen("online"), snapshot=1000, timestamp=1000)
    readers.refuse(13, BadVersionNumberError)
    readers.serve(before)
    assert readers.verify() == 0  # nothing of a release that was refused is remembered
    readers.operate("rotate", readers.fed, "online")
    readers.publish()
    readers.accept()


def test_what_the_old_online_key_signed_stays_refused_after_its_rotation(readers: Readers) -> None:
    """The attack: a thief serves what was current before the rotation, or goes on signing with the stolen key."""
    old = readers.published.release
    thief = readers.stolen("online")
    readers.operate("rotate", readers.fed, "online")
    new = readers.publish()
    readers.accept()
    readers.serve(old)
    assert readers.verify() == 11
    with pytest.raises(RepositoryError):
        readers.fetch()
    readers.serve(new)
    list_again(readers.metadata, thief, timestamp=MAX_VERSION)
    readers.refuse(11, UnsignedMetadataError)


def test_rollback_after_a_rotation_is_refused(readers: Readers) -> None:
    """The attack: once the memory is gone, an older version under the new key; the memory begins anew at once."""
    readers.operate("rotate", readers.fed, "online")
    older = readers.publish()
    readers.publish()
    readers.accept()
    readers.serve(older)
    readers.refuse(13, BadVersionNumberError)


def test_silo_recovers_from_a_fast_forward_as_readers_do(
    planned_once: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    site = tiny.sites["north"]
    root = tiny.root.read_bytes()
    trust = site.private / "trust"

    def received(bundle: Path) -> None:
        verify_bundle(bundle, root, state=trust)

    stolen = Path(
        shutil.copytree(tiny.federation.bundle(planned_once.plan_id), tmp_path / "stolen")
    )
    list_again(
        stolen / "metadata", load_key(tiny.federation, "online", PASSPHRASE), timestamp=MAX_VERSION
    )
    received(stolen)
    second = tiny.sign()
    with pytest.raises(RollbackError):
        received(tiny.federation.bundle(second))
    secret = tmp_path / "secret"
    secret.write_bytes(PASSPHRASE + b"\n")
    assert (
        run_command(
            "aggregator", "rotate", tiny.federation.path, "online", "--passphrase-file", secret
        ).code
        == 0
    )
    third = tiny.sign()
    tiny.deliver_plan("north", third)
    assert tiny.work("north", until="plan_accepted").plan_id == third
    with pytest.raises(SignatureError):
        received(stolen)


# The other attacks of the specification, section 1.5.2


def test_arbitrary_software_is_refused(readers: Readers) -> None:
    """The attack: other bytes under a signed name, or a list of files signed by a key of the attacker's."""
    router = readers.targets / "router.safetensors"
    router.write_bytes(bytes(byte ^ 1 for byte in router.read_bytes()))
    readers.refuse(12, LengthOrHashMismatchError, new=True)
    readers.again()
    forge_metadata(readers.metadata / "release.json", SigningKey.generate(), lambda signed: None)
    readers.refuse(12, RepositoryError, new=True)


def test_endless_data_are_refused_before_they_are_read(readers: Readers) -> None:
    for name in (
        "metadata/timestamp.json",
        f"targets/{readers.published.plan_id}/router.safetensors",
    ):
        with case(name=name):
            readers.again()
            os.truncate(readers.www / name, 1 << 40)
            assert readers.verify() in (12, 21)
            readers.again()
            readers.host.endless = {f"/{name}"}
            with pytest.raises(DownloadLengthMismatchError):
                readers.fetch(readers.stranger())
            assert readers.host.sent < 64 * 1024**2
            readers.host.endless = set()


def test_extraneous_files_are_refused(readers: Readers) -> None:
    """The attack: a file that no role lists, or that a thief of the release key lists in a silo's place."""
    plan_id = readers.published.plan_id
    (readers.targets / "needed.bin").write_bytes(b"x")
    assert readers.verify() == 15
    readers.names.append("needed.bin")
    with pytest.raises(AssertionError, match=r"needed\.bin"):
        readers.fetch()
    readers.names.pop()
    readers.again()
    path = f"{plan_id}/silos/west/submission.json"

    def also(signed: dict[str, Any]) -> None:
        signed["targets"][path] = {"length": 1, "hashes": {"sha256": "0" * 64}}
        signed["version"] += 1

    forge_metadata(readers.metadata / "release.json", readers.stolen("release"), also)
    list_again(readers.metadata, readers.stolen("online"), "release.json")
    assert readers.verify() == 17
    assert (
        tuf_client(
            readers.host.url, readers.folder / "c", readers.published.root.read_bytes()
        ).get_targetinfo(path)
        is None
    )


def test_mix_and_match_of_two_versions_is_refused(readers: Readers) -> None:
    older = readers.published.release
    newer = readers.publish()
    for name in ("snapshot.json", "release.json"):
        with case(name=name):
            readers.serve(newer)
            shutil.copy(older / "metadata" / name, readers.metadata / name)
            assert readers.verify() == 12
            with pytest.raises((RepositoryError, DownloadError)):
                readers.fetch(readers.stranger())
    readers.serve(newer)
    shutil.copy(
        older / "targets" / readers.published.plan_id / "manifest.json",
        readers.targets / "manifest.json",
    )
    readers.refuse(12, LengthOrHashMismatchError)


def test_freeze_is_refused_when_the_timestamp_is_over(
    readers: Readers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ddm.publishing.staging, "now_utc", lambda: now_utc() - timedelta(days=91))
    publish_unchecked(monkeypatch)
    readers.publish()
    readers.refuse(14, ExpiredMetadataError)


def test_rollback_to_an_older_version_is_refused(readers: Readers) -> None:
    readers.publish()
    readers.accept()
    readers.serve(readers.published.release)
    readers.refuse(13, BadVersionNumberError)


def test_slow_retrieval_ends(readers: Readers) -> None:
    """The attack: a file that never arrives. A folder has no slow files but pipes, and these are never opened."""
    readers.patience_s = 1
    readers.host.silent = {"/metadata/snapshot.json"}
    with pytest.raises(SlowRetrievalError):
        readers.fetch(readers.stranger())
    (readers.metadata / "snapshot.json").unlink()
    os.mkfifo(readers.metadata / "snapshot.json")
    assert readers.verify() == 18


def test_one_stolen_key_is_not_enough_to_change_content(readers: Readers) -> None:
    """The attack: the thief of one key lists another router. Only release and online together can."""
    thefts: dict[str, Callable[[], None]] = {
        "release": lambda: forge_metadata(
            readers.metadata / "release.json", readers.stolen("release"), _newer
        ),
        "online": lambda: (
            forge_metadata(readers.metadata / "release.json", readers.stolen("online"), _newer),
            list_again(readers.metadata, readers.stolen("online"), "release.json"),
        )[0],
        "plans": lambda: (
            forge_metadata(readers.metadata / "release.json", readers.stolen("plans"), _newer),
            list_again(readers.metadata, readers.stolen("online"), "release.json"),
        )[0],
    }
    for name, steal in thefts.items():
        with case(name=name):
            readers.again()
            steal()
            assert readers.verify() in (11, 12)
            with pytest.raises(RepositoryError):
                readers.fetch(readers.stranger())


def _newer(signed: dict[str, Any]) -> None:
    signed["version"] += 1


def test_wrong_mirror_is_refused(readers: Readers, tmp_path: Path) -> None:
    """The attack: a host that serves another federation's release, or one without a file."""
    other = TinyFederation.create(tmp_path / "other", {"east": 40})
    for path in (other.federation.tuf).glob("*.json"):
        if path.name != "1.root.json":
            shutil.copy(path, readers.metadata / path.name)
    assert readers.verify() == 11
    with pytest.raises(RepositoryError):
        readers.fetch()
    shutil.copy(other.root, readers.metadata / "1.root.json")
    assert readers.verify() == 19
    readers.again()
    (readers.metadata / "release.json").unlink()
    assert readers.verify() == 16
