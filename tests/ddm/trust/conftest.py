"""A tiny federation with two silos, and its real release, made through the public functions only."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import sign_metadata
from ddm.trust.repository import Repository
from ddm.trust.silo_role import sign_silo_metadata

NOW = datetime.now(UTC).replace(microsecond=0)
PLAN = "digits-3f9a1c2e"


def describe_files(files: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    return {path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()}


@dataclass
class SignedFederation:
    """The aggregator's repository, everybody's keys, and the bytes of every file."""

    folder: Path
    keys: dict[str, SigningKey] = field(
        default_factory=lambda: {
            name: SigningKey.generate()
            for name in ("root", "root2", "targets", "online", "plans", "release", "north", "east")
        }
    )
    plan_id: str = PLAN
    now: datetime = NOW
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        public = {name: key.public for name, key in self.keys.items()}
        online = Holders((public["online"],))
        holders = {
            "root": Holders((public["root"], public["root2"]), 2),
            "targets": Holders((public["targets"],)),
            "snapshot": online,
            "timestamp": online,
        }
        targets = draft_targets(1, Delegates(public["plans"], public["release"]), self.now)
        self.repository = Repository.create(
            self.folder,
            root=sign_metadata(
                draft_root(1, holders, self.now), [self.keys["root"], self.keys["root2"]]
            ),
            targets=sign_metadata(targets, [self.keys["targets"]]),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=self.now,
        )

    @property
    def root(self) -> bytes:
        return (self.folder / "1.root.json").read_bytes()

    def plan_files(self) -> dict[str, bytes]:
        return {
            f"{self.plan_id}/plan.json": b'{"plan": "' + self.plan_id.encode() + b'"}',
            f"{self.plan_id}/plan/centroids.safetensors": b"centroids",
        }

    def silo_files(self, silo_id: str) -> dict[str, bytes]:
        base = f"{self.plan_id}/silos/{silo_id}"
        return {
            f"{base}/submission.json": b'{"silo": "' + silo_id.encode() + b'"}',
            f"{base}/experts/{silo_id}/expert.safetensors": b"weights of " + silo_id.encode() * 50,
        }

    def start_plan(self, silos: tuple[str, ...] = ("north", "east")) -> None:
        self.files |= self.plan_files()
        self.repository.start_plan(
            self.plan_id,
            describe_files(self.plan_files()),
            targets=self.plan_targets({silo: self.keys[silo].public for silo in silos}),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=self.now,
        )

    def plan_targets(self, silos: Mapping[str, PublicKey]) -> bytes:
        """The next targets, which delegates to these silos, signed by its holder."""
        delegates = Delegates(
            self.keys["plans"].public, self.keys["release"].public, self.plan_id, silos
        )
        return sign_metadata(
            self.repository.next_targets(delegates, self.now), [self.keys["targets"]]
        )

    def silo_metadata(self, silo_id: str, version: int = 1) -> bytes:
        files = describe_files(self.silo_files(silo_id))
        return sign_silo_metadata(
            self.plan_id,
            silo_id,
            files,
            self.keys[silo_id],
            root_digest=self.repository.root_digest,
            version=version,
            now=self.now,
        )

    def publish(
        self, manifest: bytes = b'{"manifest": 1}', silos: tuple[str, ...] = ("north", "east")
    ) -> None:
        release = {
            f"{self.plan_id}/manifest.json": manifest,
            f"{self.plan_id}/router.safetensors": b"router",
            f"{self.plan_id}/README.md": b"# card",
            f"{self.plan_id}/report.html": b"<p>report</p>",
            f"{self.plan_id}/model.sig": b"{}",
        }
        self.files = {**self.plan_files(), **release}
        for silo in silos:
            self.files |= self.silo_files(silo)
        self.repository.publish(
            self.plan_id,
            {silo: self.silo_metadata(silo) for silo in silos},
            describe_files(release),
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=self.now,
        )

    def export(self, dest: Path, *, bundle: bool = False) -> Path:
        if bundle:
            self.repository.export_bundle(dest)
        else:
            self.repository.export_release(dest)
        files = self.plan_files() if bundle else self.files
        for path, data in files.items():
            target = dest / "targets" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return dest


@pytest.fixture(scope="session")
def make_federation(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SignedFederation]:
    return lambda **kwargs: SignedFederation(
        tmp_path_factory.mktemp("fed") / "tuf" / "metadata", **kwargs
    )


@pytest.fixture(scope="session")
def _published(
    make_federation, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SignedFederation, Path]:
    federation = make_federation()
    federation.start_plan()
    federation.publish()
    return federation, federation.export(tmp_path_factory.mktemp("published"))


@pytest.fixture
def federation(make_federation) -> SignedFederation:
    """A federation of this test's own, with a published release."""
    own = make_federation()
    own.start_plan()
    own.publish()
    return own


@pytest.fixture
def root(_published) -> bytes:
    return _published[0].root


@pytest.fixture
def keys(_published) -> dict[str, SigningKey]:
    return _published[0].keys


@pytest.fixture
def published(_published) -> Path:
    """The shared release; read only."""
    return _published[1]


@pytest.fixture
def release(_published, tmp_path: Path) -> Path:
    """A copy of the shared release that a test may damage."""
    return Path(shutil.copytree(_published[1], tmp_path / "release"))


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def later() -> Callable[[int], datetime]:
    return lambda days: NOW + timedelta(days=days)
