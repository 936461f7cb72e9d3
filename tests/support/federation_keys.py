"""A federation whose plan and release are made up, for tests of who signs what; keys, ceremonies and files are real."""

import shutil
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from aggregator.config import Federation, FederationSettings
from aggregator.keys.ceremony import complete_change, sign_document
from aggregator.keys.rotation import next_receipts_key
from aggregator.keys.silo_rotation import collect_key_history
from aggregator.membership.registry import active_cards, enroll_silo, read_card
from aggregator.planning.draft import Draft
from aggregator.planning.sign import sign_plan
from aggregator.setup import init_federation
from ddm.planning.fit import PublicImages
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.enrolment import CARD_KIND, AgreedSize, Card, KeyRotation, RotatedCard
from ddm.protocol.plan import Plan
from ddm.protocol.policy import PolicyLimits, PrivacyLimits
from ddm.publishing.keys import load_key
from ddm.routers.sketch import Sketch
from ddm.trust.drafts import Holders
from ddm.trust.envelope import seal
from ddm.trust.key_rotation import seal_rotation
from ddm.trust.keys import SigningKey
from ddm.trust.paths import KEY_HISTORY
from ddm.trust.repository import Repository
from ddm.trust.silo_role import sign_silo_metadata
from tests.support.documents import AGREED, plan_document, to_bytes

PASSPHRASE = b"correct horse"
SILOS = ("east", "north")


def describe_files(base: Path, prefix: str) -> dict[str, tuple[int, str]]:
    """What lies below `base`, as metadata lists it."""
    files = {
        path.relative_to(base).as_posix(): path
        for path in sorted(base.rglob("*"))
        if path.is_file()
    }
    described = {f"{prefix}/{name}": File.of("x", path) for name, path in files.items()}
    return {name: (file.bytes, file.digest) for name, file in described.items()}


@dataclass
class KeyedFederation:
    """A federation whose every key is at hand: the operator's, the holders' and the silos'."""

    path: Path
    silos: dict[str, SigningKey] = field(default_factory=dict)
    holders: dict[str, SigningKey] = field(default_factory=dict)
    now: datetime = field(default_factory=now_utc)

    @property
    def federation(self) -> Federation:
        """The operator's folder."""
        return Federation(self.path / "fed")

    @property
    def root(self) -> bytes:
        """What everybody pinned."""
        return (self.federation.tuf / "1.root.json").read_bytes()

    @property
    def repository(self) -> Repository:
        """The metadata."""
        return Repository(self.federation.tuf)

    @classmethod
    def published(cls, path: Path) -> "KeyedFederation":
        """Found a federation of two silos with a plan and a release, `first`."""
        keyed = cls(path)
        keyed.found()
        for silo_id in SILOS:
            keyed.enroll(silo_id)
        keyed.plan(1)
        keyed.publish(1, keyed.path / "first")
        return keyed

    def copy(self, path: Path) -> "KeyedFederation":
        """The same, in another place."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return KeyedFederation(path, dict(self.silos), dict(self.holders), self.now)

    def found(self, root: Holders | None = None, targets: Holders | None = None) -> list[str]:
        """Make the federation."""
        settings = FederationSettings(
            name="digits", host="127.0.0.1", port=9092, licence="CC-BY-4.0"
        )
        return init_federation(self.federation, settings, PASSPHRASE, root=root, targets=targets)

    def enroll(self, silo_id: str, key: SigningKey | None = None) -> None:
        """Enroll a silo with a new key, or with this one."""
        self.silos[silo_id] = key or SigningKey.generate()
        public = ec.generate_private_key(ec.SECP256R1()).public_key()
        node = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        card = Card(
            root_digest=self.federation.root_digest,
            silo_id=silo_id,
            signing_key=str(self.silos[silo_id].public),
            node_key=node,
            agreed=AgreedSize.model_validate(AGREED),
            limits=PolicyLimits(privacy=PrivacyLimits(unit="image")),
            created_at=now_utc(),
        )
        path = self.path / f"{silo_id}.card.json"
        path.write_bytes(seal(card.encode(), CARD_KIND, self.silos[silo_id]))
        enroll_silo(self.federation, path)

    def rotate(self, silo_id: str) -> Path:
        """Give a silo a new key, which its old key announces; return what the silo hands out. No plan names it yet."""
        path = self.path / f"{silo_id}.card.json"
        old = self.silos[silo_id]
        new = SigningKey.generate()
        card_bytes = path.read_bytes()
        rotations: tuple[str, ...] = ()
        if b"rotated-card" in card_bytes:
            before = RotatedCard.parse(card_bytes, subject="card")
            card_bytes = before.card.encode()
            rotations = before.rotations
        card = read_card(card_bytes).model_copy(update={"signing_key": str(new.public)})
        rotation = KeyRotation(
            root_digest=sha256_hex(self.root),
            silo_id=silo_id,
            number=len(rotations) + 1,
            old_key=str(old.public),
            new_key=str(new.public),
            at=now_utc(),
        )
        # A card carries all rotations, so that whoever knows an earlier key can follow them.
        rotations = (*rotations, seal_rotation(rotation, old, new).decode())
        sealed = seal(card.encode(), CARD_KIND, new).decode()
        path.write_bytes(RotatedCard(card=sealed, rotations=rotations).encode())
        self.silos[silo_id] = new
        return path

    def draft(self, number: int, silos: tuple[str, ...] = SILOS) -> Draft:
        """A plan that nobody could carry out, but anybody can sign."""
        folder = self.path / f"draft-{number}"
        document = plan_document(plan_id=f"digits-{number:08x}", silos=sorted(silos))
        document["root_digest"] = self.federation.root_digest
        document["receipt_key"] = str(next_receipts_key(self.federation))
        files = []
        for entry in document["files"]:
            (folder / "plan").mkdir(parents=True, exist_ok=True)
            (folder / entry["path"]).write_bytes(entry["path"].encode())
            files.append(File.of(entry["path"], folder / entry["path"]).model_dump())
        plan = Plan.parse(to_bytes(document | {"files": files}), subject="plan")
        few = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        sketch = Sketch.fit(few, torch.zeros(4, dtype=torch.int64), rank=1, num_groups=1)
        return Draft(plan, folder, PublicImages(few, few), sketch)

    def plan(self, number: int, silos: tuple[str, ...] = SILOS) -> list[str]:
        """Sign a plan."""
        return sign_plan(self.federation, self.draft(number, silos), PASSPHRASE)

    def publish(self, number: int, dest: Path, silos: tuple[str, ...] | None = None) -> Path:
        """Publish made-up experts of a plan, as files and as metadata, and return the release."""
        plan_id = f"digits-{number:08x}"
        targets = dest / "targets" / plan_id
        shutil.copytree(self.federation.plan_targets(plan_id), targets)
        roles = {}
        plan, _ = self.federation.current_plan()
        for silo_id in silos or tuple(active_cards(self.federation, plan)):
            home = targets / "silos" / silo_id
            home.mkdir(parents=True)
            (home / "submission.json").write_text(f'{{"silo":"{silo_id}"}}')
            (home / "expert.safetensors").write_bytes(silo_id.encode() * 40)
            roles[silo_id] = self.silo_metadata(number, silo_id, home)
        (targets / "manifest.json").write_bytes(b"{}")
        (targets / "router.safetensors").write_bytes(b"router" * 50)
        if history := collect_key_history(self.federation, roles):
            (targets / KEY_HISTORY).write_bytes(history.encode())
        release = {
            name: file
            for name, file in describe_files(targets, plan_id).items()
            if name.split("/")[1:] in (["manifest.json"], ["router.safetensors"], [KEY_HISTORY])
        }
        self.repository.publish(
            plan_id,
            roles,
            release,
            release_key=load_key(self.federation, "release", PASSPHRASE),
            online_key=load_key(self.federation, "online", PASSPHRASE),
            now=now_utc(),
        )
        self.repository.export_release(dest)
        return dest

    def silo_metadata(self, number: int, silo_id: str, home: Path) -> bytes:
        """What a silo signs of the files in `home`."""
        plan_id = f"digits-{number:08x}"
        files = describe_files(home, f"{plan_id}/silos/{silo_id}")
        return sign_silo_metadata(
            plan_id,
            silo_id,
            files,
            self.silos[silo_id],
            root_digest=self.federation.root_digest,
            version=1,
            now=self.now,
        )

    def hold(self, *names: str, threshold: int) -> Holders:
        """Make holders' keys."""
        for name in names:
            self.holders.setdefault(name, SigningKey.generate())
        return Holders(tuple(self.holders[name].public for name in names), threshold)

    def document(self, role: str) -> Path:
        """The document of a role that waits."""
        (document,) = self.federation.path.glob(f"ceremony/{role}-*.json")
        return document

    def sign(self, role: str, *names: str) -> None:
        """Sign what waits, each holder on a machine with nothing but that document."""
        for name in names:
            away = self.path / f"machine of {name}"
            away.mkdir(exist_ok=True)
            document = Path(shutil.copy(self.document(role), away))
            shutil.copy(sign_document(document, self.holders[name]), self.document(role).parent)

    def complete(self) -> str:
        """Put into force what waits."""
        return complete_change(self.federation, PASSPHRASE).purpose
