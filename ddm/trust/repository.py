"""The aggregator's TUF repository: signs and updates a federation's metadata in one folder.

Offline keys sign `root` and `targets`, and targets only delegates; their holders sign drafts, which arrive here signed
(`ddm.trust.drafts`, `ddm.trust.ceremony`). `plans`, `release` and one role per silo list files; `snapshot` and
`timestamp` state which versions belong together.

There is one plan at a time: a new plan's delegations replace those before, except for the roles of silos that the new
plan carries over. A removed role keeps an entry in the snapshot, with the next version and without length and hashes.
TUF clients that remember the last snapshot refuse one from which an entry disappeared (specification 5.5.5), and refuse
the role's earlier metadata as outdated; our verifier reads such an entry as "must be absent".

Everything signed is checked before it is written, with the same functions that readers use: what readers would refuse
is then an error of the operator's command, and not of a published release.

Each method writes several files, one after the other. To survive a crash in between, a caller works on a copy of the
folder and replaces the original with it (`ddm.io.changes`), holding the federation's signing lock.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from tuf.api.metadata import MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from ddm.errors import MissingFileError, RoleError, RollbackError, SetupError
from ddm.io.files import write_atomic
from ddm.io.paths import check_path
from ddm.io.untrusted import read_small
from ddm.protocol.base import sha256_hex
from ddm.trust.drafts import Delegates, Holders, draft_root, draft_targets, holders_of, log_key_of
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import (
    LIMITS,
    METADATA_LIFE,
    TIMESTAMP_LIFE,
    T,
    check_signatures,
    expiry,
    parse_metadata,
    public_key,
    sign_metadata,
)
from ddm.trust.paths import PLANS, RELEASE, owner, silo_role
from ddm.trust.schema import MAX_VERSION
from ddm.trust.silo_role import read_silo_metadata

# Path relative to ``targets/`` to length in bytes and sha256.
Files = Mapping[str, tuple[int, str]]


class Repository:
    """The metadata of one federation.

    Args:
        folder: holds ``1.root.json`` and the rest, i.e. ``<fed>/tuf/metadata``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        root: bytes,
        targets: bytes,
        plans_key: SigningKey,
        release_key: SigningKey,
        online_key: SigningKey,
        now: datetime,
    ) -> Self:
        """Create a federation: every role at version 1, no plan yet.

        Args:
            folder: where the metadata goes.
            root: the first root, signed by its holders.
            targets: the first targets, signed by its holders.
            plans_key: the key of `plans`.
            release_key: the key of `release`.
            online_key: the key of `snapshot` and `timestamp`.
            now: the present.

        Raises:
            SetupError: the folder holds a federation already.
            SignatureError: a document is not signed as the root requires.
        """
        repository = cls(folder)
        if (folder / "1.root.json").exists():
            raise SetupError(
                str(folder),
                expected="a folder without a federation",
                got="an existing federation",
                remedy="A federation is created once. Choose another folder.",
            )
        # In the order in which each document is checked with the one before it.
        repository._install_root(root)
        repository._install_targets(targets)
        expires = expiry(now, METADATA_LIFE)
        repository._write(PLANS, Targets(1, None, expires, {}), plans_key)
        repository._write(RELEASE, Targets(1, None, expires, {}), release_key)
        repository._write_snapshot({"targets", PLANS, RELEASE}, online_key, now)
        return repository

    @property
    def root_digest(self) -> str:
        """The digest of the first root, which names the federation."""
        return sha256_hex(self._read_file("1.root.json"))

    def root(self) -> Root:
        """Read the current root."""
        data = self._read_file(f"{self._root_version()}.root.json")
        return parse_metadata(data, Root, "root").signed

    def targets(self) -> Targets:
        """Read the current targets."""
        return self._read("targets", Targets)

    def delegates(self) -> Delegates:
        """Read the delegations of the current targets."""
        return Delegates.from_targets(self.targets())

    def next_root(
        self,
        changed: Mapping[str, Holders],
        now: datetime,
        log_key: str | None = None,
    ) -> Root:
        """Draft the root with other holders or another log key; it is valid once old and new holders have signed."""
        root = self.root()
        holders = {**holders_of(root), **changed}
        return draft_root(root.version + 1, holders, now, log_key or log_key_of(root))

    def next_targets(self, delegates: Delegates, now: datetime) -> Targets:
        """Draft the targets with these delegations."""
        return draft_targets(self.targets().version + 1, delegates, now)

    def start_plan(
        self,
        plan_id: str,
        plan_files: Files,
        *,
        targets: bytes,
        plans_key: SigningKey,
        release_key: SigningKey,
        online_key: SigningKey,
        now: datetime,
    ) -> None:
        """Sign a plan and delegate to exactly its silos; the release list is emptied.

        Args:
            plan_id: the new plan.
            plan_files: path relative to ``targets/`` to (bytes, sha256).
            targets: delegates to the plan's silos, signed by the holders of `targets`.
            plans_key: the key of `plans`.
            release_key: the key of `release`.
            online_key: the key of `snapshot` and `timestamp`.
            now: the present.

        Raises:
            RoleError: a path that `plans` may not list, or delegations of another plan or without silos.
            SignatureError: `targets` is not signed by its holders, or a key is not its role's.
            RollbackError: `targets` does not follow the current version.
        """
        # All of the input before the first write.
        _check_owner(plan_files, plan_id, PLANS)
        delegates = Delegates.from_targets(parse_metadata(targets, Targets, "targets.json").signed)
        if delegates.plan_id != plan_id or not delegates.silos:
            raise RoleError(
                "targets.json",
                expected=f"delegations to silos of {plan_id}",
                got=f"delegations to {len(delegates.silos)} silos "
                f"of {delegates.plan_id or 'no plan'}",
            )
        carried_roles = self._present_roles() & delegates.roles.keys()
        self._install_targets(targets)
        self._write(PLANS, self._next_listing(PLANS, plan_files, now), plans_key)
        # The files of the last release are no longer what `release` stands for.
        if self._read(RELEASE, Targets).targets:
            self._write(RELEASE, self._next_listing(RELEASE, {}, now), release_key)
        self._write_snapshot({"targets", PLANS, RELEASE} | carried_roles, online_key, now)

    def renew(
        self,
        *,
        root: bytes | None = None,
        targets: bytes | None = None,
        plans_key: SigningKey | None = None,
        release_key: SigningKey | None = None,
        online_key: SigningKey,
        now: datetime,
    ) -> None:
        """Put new keys or delegations into force; the roles keep their files, removed silos excepted.

        Args:
            root: the next root, signed by the holders of the old and of the new one.
            targets: the next targets, signed by the holders that the newest root names.
            plans_key: re-signs the list of `plans`, if its key is new.
            release_key: re-signs the list of `release`, if its key is new.
            online_key: the key of `snapshot` and `timestamp` that the newest root names.
            now: the present.

        Raises:
            SignatureError: a document is not signed by its holders, or a key is not its role's.
            RollbackError: a document does not follow the current version.
        """
        present_roles = self._present_roles()
        # The root first: it names the holders who must have signed the targets.
        if root is not None:
            self._install_root(root)
        if targets is not None:
            self._install_targets(targets)
        for role, key in ((PLANS, plans_key), (RELEASE, release_key)):
            if key is not None:
                old = self._read(role, Targets)
                renewed = Targets(old.version + 1, None, expiry(now, METADATA_LIFE), old.targets)
                self._write(role, renewed, key)
        silo_roles = present_roles & self.delegates().roles.keys()
        self._write_snapshot({"targets", PLANS, RELEASE} | silo_roles, online_key, now)

    def publish(
        self,
        plan_id: str,
        silo_metadata: Mapping[str, bytes],
        release_files: Files,
        *,
        release_key: SigningKey,
        online_key: SigningKey,
        now: datetime,
    ) -> None:
        """Sign a release of the current plan.

        Args:
            plan_id: the current plan.
            silo_metadata: silo id to the metadata that it signed, republished unchanged; other silos are removed.
            release_files: path relative to ``targets/`` to (bytes, sha256).
            release_key: the key of `release`.
            online_key: the key of `snapshot` and `timestamp`.
            now: the present.

        Raises:
            RoleError: a path that `release` may not list, or a silo or plan that targets does not delegate to.
            RollbackError: a silo's metadata older than what was published before.
            TrustError: a silo's metadata does not verify.
        """
        # With the rule of the readers: the key of `release` cannot list a silo's files, nor a plan's.
        _check_owner(release_files, plan_id, RELEASE)
        targets = self.targets()
        carried = Delegates.from_targets(targets).carried
        root_digest = self.root_digest
        # Read once for all silos: snapshot and list of silos grow together.
        published = self._read("snapshot", Snapshot).meta
        data_of_role = {}
        for silo_id, data in silo_metadata.items():
            origin = carried.get(silo_id, plan_id)
            role = silo_role(origin, silo_id)
            key = _role_key(targets, role)
            version, _ = read_silo_metadata(
                data,
                root_digest=root_digest,
                plan_id=origin,
                silo_id=silo_id,
                key=key,
                now=now,
            )
            self._check_not_older(role, version, data, published)
            data_of_role[role] = data
        # Nothing is written before all of it was checked.
        self._write(RELEASE, self._next_listing(RELEASE, release_files, now), release_key)
        for role, data in data_of_role.items():
            write_atomic(self.folder / f"{role}.json", data)
        self._write_snapshot({"targets", PLANS, RELEASE, *data_of_role}, online_key, now)

    def export_bundle(self, dest: Path) -> None:
        """Write what a silo needs to verify a plan to ``dest/metadata/``."""
        self._export(dest, ["targets.json", "plans.json"])

    def export_release(self, dest: Path) -> None:
        """Write all metadata of the release to ``dest/metadata/``."""
        self._export(dest, [f"{role}.json" for role in self._present_roles()])

    def _export(self, dest: Path, names: Sequence[str]) -> None:
        # Every root: a reader follows them one by one from the first.
        roots = [path.name for path in self.folder.glob("*.root.json")]
        for name in [*roots, "timestamp.json", "snapshot.json", *names]:
            write_atomic(dest / "metadata" / name, self._read_file(name))

    def _present_roles(self) -> set[str]:
        """Return the roles that the snapshot lists as present."""
        return {
            name.removesuffix(".json")
            for name, entry in self._read("snapshot", Snapshot).meta.items()
            if entry.hashes is not None
        }

    def _exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _read_file(self, name: str) -> bytes:
        if not self._exists(name):
            raise MissingFileError(
                str(self.folder / name),
                expected="this federation's metadata",
                got="no such file",
            )
        return read_small(self.folder, name, LIMITS["targets"])

    def _read(self, role: str, kind: type[T]) -> T:
        return parse_metadata(self._read_file(f"{role}.json"), kind, f"{role}.json").signed

    def _root_version(self) -> int:
        return max(
            (int(path.name.split(".")[0]) for path in self.folder.glob("[1-9]*.root.json")),
            default=0,
        )

    def _install_root(self, data: bytes) -> None:
        # Roots are numbered without a gap, since readers fetch them one after the other.
        version = self._root_version() + 1
        name = f"{version}.root.json"
        metadata = parse_metadata(data, Root, name)
        if metadata.signed.version != version:
            raise RollbackError(
                name,
                expected=f"version {version}",
                got=f"version {metadata.signed.version}",
            )
        # A new root needs the threshold of the old one too, or readers of the old one will not follow.
        delegators = [metadata.signed]
        if version > 1:
            delegators = [self.root(), metadata.signed]
        check_signatures(metadata, "root", delegators, name)
        write_atomic(self.folder / name, data)

    def _install_targets(self, data: bytes) -> None:
        version = 1
        if self._exists("targets.json"):
            version = self.targets().version + 1
        metadata = parse_metadata(data, Targets, "targets.json")
        # A ceremony takes days. Meanwhile another one may have replaced the targets, whose changes would be undone.
        if metadata.signed.version != version:
            raise RollbackError(
                "targets.json",
                expected=f"version {version}",
                got=f"version {metadata.signed.version}",
            )
        check_signatures(metadata, "targets", [self.root()], "targets.json")
        write_atomic(self.folder / "targets.json", data)

    def _write(self, role: str, signed: T, key: SigningKey) -> None:
        """Sign and write, after checking that the key holds the role, which otherwise only readers would notice."""
        data = sign_metadata(signed, [key])
        metadata = parse_metadata(data, type(signed), role)
        delegator: Root | Targets = self.root()
        if role in (PLANS, RELEASE):
            delegator = self.targets()
        check_signatures(metadata, role, [delegator], f"{role}.json")
        write_atomic(self.folder / f"{role}.json", data)

    def _next_listing(self, role: str, files: Files, now: datetime) -> Targets:
        """Draft the next version of `plans` or `release`, which lists these files."""
        listing = {
            path: TargetFile(size, {"sha256": digest}, path)
            for path, (size, digest) in files.items()
        }
        version = self._read(role, Targets).version + 1
        return Targets(version, None, expiry(now, METADATA_LIFE), listing)

    def _write_snapshot(
        self,
        present_roles: set[str],
        online_key: SigningKey,
        now: datetime,
    ) -> None:
        """Write the snapshot and then the timestamp, which makes these versions current."""
        version = 1
        entries: dict[str, MetaFile] = {}
        if self._exists("snapshot.json"):
            old = self._read("snapshot", Snapshot)
            version = old.version + 1
            # Every earlier role keeps an entry; those that are present replace theirs below.
            entries = {name: _removed_entry(entry) for name, entry in old.meta.items()}
        for role in present_roles:
            data = self._read_file(f"{role}.json")
            role_version = parse_metadata(data, Targets, f"{role}.json").signed.version
            entries[f"{role}.json"] = MetaFile.from_data(role_version, data, ["sha256"])
        snapshot = Snapshot(version, None, expiry(now, METADATA_LIFE), entries)
        self._write("snapshot", snapshot, online_key)

        timestamp_version = 1
        if self._exists("timestamp.json"):
            timestamp_version = self._read("timestamp", Timestamp).version + 1
        # Last of all: until the timestamp is written, readers see the state before.
        listed = MetaFile.from_data(version, self._read_file("snapshot.json"), ["sha256"])
        timestamp = Timestamp(timestamp_version, None, expiry(now, TIMESTAMP_LIFE), listed)
        self._write("timestamp", timestamp, online_key)

    def _check_not_older(
        self,
        role: str,
        version: int,
        data: bytes,
        published: Mapping[str, MetaFile],
    ) -> None:
        """Refuse a silo's metadata that readers would refuse as a rollback, or that differ under one version."""
        entry = published.get(f"{role}.json")
        if entry is None:
            return
        if version < entry.version:
            raise RollbackError(
                f"{role}.json",
                expected=f"version {entry.version} or later",
                got=f"version {version}",
            )
        if version == entry.version and self._read_file(f"{role}.json") != data:
            raise RollbackError(
                f"{role}.json",
                expected=f"version {version} as published before",
                got=f"version {version} with other content",
            )


def _removed_entry(entry: MetaFile) -> MetaFile:
    """Return the entry of a role that is no longer present: without length and hashes.

    When a role goes, its entry gets the next version, so that the role's earlier metadata is older than the entry.
    """
    version = entry.version
    if entry.hashes is not None:
        version = min(version + 1, MAX_VERSION)
    return MetaFile(version)


def _role_key(targets: Targets, role: str) -> PublicKey:
    try:
        return public_key(targets.get_key(targets.get_delegated_role(role).keyids[0]))
    except ValueError as error:
        raise RoleError(
            f"{role}.json",
            expected="a role that targets delegates to",
            got="a role without a delegation",
        ) from error


def _check_owner(files: Files, plan_id: str, role: str) -> None:
    for path in files:
        check_path(path, f"{role}.json")
        path_owner = owner(path, plan_id)
        if path_owner != role:
            raise RoleError(
                f"targets/{path}",
                expected=f"a path of role {role} in plan {plan_id}",
                got=f"a path of {path_owner or 'no role'}",
            )
