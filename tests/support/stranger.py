"""A stranger without any key of a federation, who publishes its release again under a root of trust of their own.

The hospitals' signed parts are moved over unchanged, byte for byte: their roles, submissions and experts, and with them
the plan for which they signed. Everything else is signed again.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from tuf.api.metadata import Root, Targets

from ddm.loading.log import entry_of
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.manifest import Manifest
from ddm.publishing.log import TransparencyLog
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets, holders_of, log_key_of
from ddm.trust.keys import SigningKey
from ddm.trust.log.entries import FederationOpened, LogEntry, PlanSigned
from ddm.trust.log.note import VerifierKey
from ddm.trust.metadata import parse_metadata, sign_metadata
from ddm.trust.model_signature import MODEL_SIGNATURE_NAME, sign_model
from ddm.trust.paths import LOG_NAMES, PLAN_LOG_NAMES, PLANS, RELEASE, owner
from ddm.trust.repository import Repository
from tests.support.thief import forge_metadata, list_again

LOG_NAME = "archipelago/stranger/0123456789abcdef"
ROLES = ("root", "targets", "online", "plans", "release", "log")


@dataclass
class Stranger:
    """Whoever has a public release, and keys of their own.

    Attributes:
        release: a published release, which is only read.
        folder: where the stranger works.
        keys: the stranger's keys, by role.
    """

    release: Path
    folder: Path
    keys: dict[str, SigningKey] = field(
        default_factory=lambda: {role: SigningKey.generate() for role in ROLES}
    )

    @property
    def copy(self) -> Path:
        """The stranger's copy of the release."""
        return self.folder / "release"

    @property
    def root(self) -> Path:
        """The stranger's root of trust."""
        return self.folder / "1.root.json"

    def replace_root(self) -> None:
        """Sign a root that names the federation's own keys for every other role; nothing else is touched."""
        shutil.copytree(self.release, self.copy)
        original = self.copy / "metadata" / "1.root.json"
        old_root = parse_metadata(original.read_bytes(), Root, "root").signed
        holders = holders_of(old_root) | {"root": Holders((self.keys["root"].public,))}
        root = draft_root(1, holders, now_utc(), log_key_of(old_root))
        original.write_bytes(sign_metadata(root, [self.keys["root"]]))
        shutil.copyfile(original, self.root)

    def sign_again(self) -> None:
        """Sign everything that the federation signed with the stranger's own keys, in a log of the stranger's own."""
        shutil.copytree(self.release / "targets", self.copy / "targets")
        delegates = self._delegates()
        plan_id = str(delegates.plan_id)
        targets = self.copy / "targets" / plan_id
        repository = self._found(delegates)
        self._enter_in_log(targets)
        digests = {
            path.relative_to(targets).as_posix(): sha256_hex(path.read_bytes())
            for path in targets.rglob("*")
            if path.is_file() and path.name != MODEL_SIGNATURE_NAME
        }
        model_key = ec.generate_private_key(ec.SECP256R1())
        (targets / MODEL_SIGNATURE_NAME).write_bytes(sign_model(plan_id, digests, model_key))

        online = {"online_key": self.keys["online"], "now": now_utc()}
        draft = repository.next_targets(delegates, now_utc())
        repository.start_plan(
            plan_id,
            self._listed(targets, PLANS),
            targets=sign_metadata(draft, [self.keys["targets"]]),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            **online,
        )
        repository.export_bundle(self.copy)
        self._publish(targets, list(delegates.roles))

    def _delegates(self) -> Delegates:
        """Return the delegations of the release, with the stranger's keys in place of the federation's."""
        data = (self.release / "metadata" / "targets.json").read_bytes()
        original = Delegates.from_targets(parse_metadata(data, Targets, "targets").signed)
        return Delegates(
            self.keys["plans"].public,
            self.keys["release"].public,
            original.plan_id,
            original.silos,
            original.carried,
        )

    def _found(self, delegates: Delegates) -> Repository:
        log_key = VerifierKey(LOG_NAME, self.keys["log"].public)
        online = Holders((self.keys["online"].public,))
        holders = {
            "root": Holders((self.keys["root"].public,)),
            "targets": Holders((self.keys["targets"].public,)),
            "snapshot": online,
            "timestamp": online,
        }
        root = sign_metadata(draft_root(1, holders, now_utc(), str(log_key)), [self.keys["root"]])
        self.root.write_bytes(root)
        first_targets = draft_targets(1, Delegates(delegates.plans, delegates.release), now_utc())
        return Repository.create(
            self.folder / "tuf",
            root=root,
            targets=sign_metadata(first_targets, [self.keys["targets"]]),
            plans_key=self.keys["plans"],
            release_key=self.keys["release"],
            online_key=self.keys["online"],
            now=now_utc(),
        )

    def _enter_in_log(self, targets: Path) -> None:
        """Enter plan and manifest in the stranger's log, and write the proofs of both."""
        manifest_data = (targets / "manifest.json").read_bytes()
        manifest = Manifest.parse(manifest_data, subject="manifest")
        opened = FederationOpened(
            federation="stranger", root_digest=sha256_hex(self.root.read_bytes())
        )
        plan = PlanSigned(plan_id=manifest.plan_id, plan_digest=manifest.plan_digest)
        version = entry_of(manifest, sha256_hex(manifest_data))
        log = TransparencyLog().extended([opened, plan, version])
        log = log.sign(LOG_NAME, self.keys["log"])
        entries: tuple[tuple[LogEntry, tuple[str, ...]], ...]
        entries = ((plan, PLAN_LOG_NAMES), (version, LOG_NAMES))
        for entry, names in entries:
            for name, proof in zip(names, log.prove(entry, []), strict=True):
                (targets / name).write_bytes(proof)

    def _publish(self, targets: Path, silo_roles: list[str]) -> None:
        """List the release's files, and the hospitals' roles as they are; our own repository would refuse to."""
        metadata = self.copy / "metadata"
        shutil.copyfile(self.folder / "tuf" / "release.json", metadata / "release.json")
        listing = {
            name: {"length": size, "hashes": {"sha256": digest}}
            for name, (size, digest) in self._listed(targets, RELEASE).items()
        }
        forge_metadata(
            metadata / "release.json",
            self.keys["release"],
            lambda signed: signed.update(targets=listing),
        )
        names = [f"{role}.json" for role in silo_roles]
        present = [name for name in names if (self.release / "metadata" / name).is_file()]
        for name in present:
            shutil.copyfile(self.release / "metadata" / name, metadata / name)
        list_again(metadata, self.keys["online"], "release.json", *present)

    def _listed(self, targets: Path, role: str) -> dict[str, tuple[int, str]]:
        """Return the files that a role of the stranger's lists."""
        files = {}
        for path in targets.rglob("*"):
            name = f"{targets.name}/{path.relative_to(targets).as_posix()}"
            if path.is_file() and owner(name, targets.name) == role:
                file = File.of("x", path)
                files[name] = (file.bytes, file.digest)
        return files
