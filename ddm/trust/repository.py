"""How a federation signs: the aggregator's TUF repository, in one folder of metadata.

Offline keys sign `root` and `targets`, and targets only delegates. `plans`, `release` and one role per silo list
files; `snapshot` and `timestamp` say which versions belong together. One plan at a time: a new plan's delegations
replace the last one's. A role that leaves keeps its version in the snapshot, without length and hashes: TUF clients
that remember the last snapshot refuse one from which an entry disappeared, and ours reads such an entry as "must not
be there".

Not safe for two processes at once; the aggregator holds its folder's lock.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Key,
    MetaFile,
    Role,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from ddm.errors import MissingFileError, RoleError, RollbackError, SetupError
from ddm.files import write_atomic
from ddm.trust.folder import read_small
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import (
    LIMITS,
    METADATA_LIFE,
    TIMESTAMP_LIFE,
    T,
    expiry,
    parse_metadata,
    public_key,
    sign_metadata,
)
from ddm.trust.paths import PLANS, RELEASE, check_path, delegated_paths, is_plan_id, is_silo_id, owner, silo_role
from ddm.trust.silo_role import delegation, read_silo_metadata

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
        root: Sequence[SigningKey],
        root_threshold: int,
        targets: Sequence[SigningKey],
        targets_threshold: int,
        online: SigningKey,
        plans: SigningKey,
        release: SigningKey,
        now: datetime,
    ) -> Self:
        """Found a federation: every role at version 1, no plan yet.

        Args:
            folder: where the metadata goes.
            root: the keys that may change any key, offline.
            root_threshold: how many of them must sign.
            targets: the keys that delegate, offline.
            targets_threshold: how many of them must sign.
            online: signs snapshot and timestamp.
            plans: signs plans.
            release: signs releases.
            now: the present.

        Raises:
            SetupError: the folder holds a federation already.
        """
        repository = cls(folder)
        if (folder / "1.root.json").exists():
            remedy = "A federation is founded once. Choose another folder."
            raise SetupError(str(folder), expected="no federation yet", got="one already", remedy=remedy)
        expires = expiry(now, METADATA_LIFE)
        repository._write("targets", Targets(1, None, expires, {}, _delegations(plans.public, release.public)), targets)
        repository._write(PLANS, Targets(1, None, expires, {}), [plans])
        repository._write(RELEASE, Targets(1, None, expires, {}), [release])
        repository._close({"targets", PLANS, RELEASE}, online, now)
        # Last, so that an interrupted founding can be run again.
        new_root = _new_root(root, root_threshold, targets, targets_threshold, online, expires)
        repository._write("1.root", new_root, root)
        return repository

    def start_plan(
        self,
        plan_id: str,
        silo_keys: Mapping[str, PublicKey],
        plan_files: Files,
        *,
        targets_keys: Sequence[SigningKey],
        plans_key: SigningKey,
        online_key: SigningKey,
        now: datetime,
        release_key: SigningKey | None = None,
    ) -> None:
        """Sign a plan and delegate to exactly its silos.

        Args:
            plan_id: the new plan.
            silo_keys: silo id to enrolled key.
            plan_files: path relative to ``targets/`` to (bytes, sha256).
            targets_keys: enough keys of `targets`.
            plans_key: the key of `plans`.
            online_key: the key of `snapshot` and `timestamp`.
            now: the present.
            release_key: empties the release list at once; without it the last plan's list stays, outside what `release`
                may list by then, until `publish` replaces it.

        Raises:
            RoleError: a path that `plans` may not list, two silos with one key, no silo, or an id that is none.
        """
        _check_plan(plan_id, silo_keys)
        _check_owner(plan_files, plan_id, PLANS)
        before = self._read("targets", Targets)
        plans, release = _role_key(before, PLANS), _role_key(before, RELEASE)
        delegations = _delegations(plans, release, plan_id, silo_keys)
        expires = expiry(now, METADATA_LIFE)
        self._write("targets", Targets(before.version + 1, None, expires, {}, delegations), targets_keys)
        self._write(PLANS, self._next(PLANS, plan_files, now), [plans_key])
        if release_key is not None and self._read(RELEASE, Targets).targets:
            self._write(RELEASE, self._next(RELEASE, {}, now), [release_key])
        self._close({"targets", PLANS, RELEASE}, online_key, now)

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
        """Sign a release of the present plan.

        Args:
            plan_id: the present plan.
            silo_metadata: silo id to the metadata it signed, republished unchanged; a silo left out has left.
            release_files: path relative to ``targets/`` to (bytes, sha256).
            release_key: the key of `release`.
            online_key: the key of `snapshot` and `timestamp`.
            now: the present.

        Raises:
            RoleError: a path that `release` may not list, or a silo or plan that targets does not delegate to.
            RollbackError: a silo's metadata older than what was published before.
            TrustError: a silo's metadata does not verify.
        """
        _check_owner(release_files, plan_id, RELEASE)
        targets = self._read("targets", Targets)
        roles = {silo_id: silo_role(plan_id, silo_id) for silo_id in silo_metadata}
        for silo_id, role in roles.items():
            key = _role_key(targets, role)
            version, _ = read_silo_metadata(silo_metadata[silo_id], plan_id=plan_id, silo_id=silo_id, key=key, now=now)
            self._check_not_older(role, version, silo_metadata[silo_id])
        self._write(RELEASE, self._next(RELEASE, release_files, now), [release_key])
        for silo_id, role in roles.items():
            write_atomic(self.folder / f"{role}.json", silo_metadata[silo_id])
        self._close({"targets", PLANS, RELEASE, *roles.values()}, online_key, now)

    def export_bundle(self, dest: Path) -> None:
        """Write what a silo needs to verify a plan to ``dest/metadata/``."""
        self._export(dest, ["targets.json", "plans.json"])

    def export_release(self, dest: Path) -> None:
        """Write all metadata of the release to ``dest/metadata/``."""
        snapshot = self._read("snapshot", Snapshot)
        self._export(dest, [name for name, meta in snapshot.meta.items() if meta.hashes is not None])

    def _export(self, dest: Path, names: Sequence[str]) -> None:
        roots = [path.name for path in self.folder.glob("*.root.json")]
        for name in [*roots, "timestamp.json", "snapshot.json", *names]:
            write_atomic(dest / "metadata" / name, self._bytes(name))

    def _bytes(self, name: str) -> bytes:
        path = self.folder / name
        if not path.exists():
            raise MissingFileError(str(path), expected="this federation's metadata", got="nothing there")
        return read_small(path, name, LIMITS["targets"])

    def _read(self, role: str, kind: type[T]) -> T:
        return parse_metadata(self._bytes(f"{role}.json"), kind, f"{role}.json").signed

    def _write(self, role: str, signed: T, keys: Sequence[SigningKey]) -> None:
        write_atomic(self.folder / f"{role}.json", sign_metadata(signed, keys))

    def _next(self, role: str, files: Files, now: datetime) -> Targets:
        listed = {path: TargetFile(size, {"sha256": digest}, path) for path, (size, digest) in files.items()}
        return Targets(self._read(role, Targets).version + 1, None, expiry(now, METADATA_LIFE), listed)

    def _close(self, roles: set[str], online: SigningKey, now: datetime) -> None:
        """Say which versions belong together; the timestamp last, since it makes them current."""
        old = self._read("snapshot", Snapshot) if (self.folder / "snapshot.json").exists() else Snapshot(meta={})
        meta = {name: MetaFile(entry.version) for name, entry in old.meta.items()}
        for role in roles:
            data = self._bytes(f"{role}.json")
            version = parse_metadata(data, Targets, f"{role}.json").signed.version
            meta[f"{role}.json"] = MetaFile.from_data(version, data, ["sha256"])
        version = old.version + 1 if old.meta else 1
        self._write("snapshot", Snapshot(version, None, expiry(now, METADATA_LIFE), meta), [online])
        listed = MetaFile.from_data(version, self._bytes("snapshot.json"), ["sha256"])
        exists = (self.folder / "timestamp.json").exists()
        number = self._read("timestamp", Timestamp).version + 1 if exists else 1
        self._write("timestamp", Timestamp(number, None, expiry(now, TIMESTAMP_LIFE), listed), [online])

    def _check_not_older(self, role: str, version: int, data: bytes) -> None:
        seen = self._read("snapshot", Snapshot).meta.get(f"{role}.json")
        if seen is None:
            return
        if version < seen.version:
            raise RollbackError(f"{role}.json", expected=f"version {seen.version} or later", got=f"version {version}")
        if version == seen.version and self._bytes(f"{role}.json") != data:
            raise RollbackError(f"{role}.json", expected=f"version {version} as published", got="other content")


def _new_root(
    root: Sequence[SigningKey],
    root_threshold: int,
    targets: Sequence[SigningKey],
    targets_threshold: int,
    online: SigningKey,
    expires: datetime,
) -> Root:
    keys: dict[str, Key] = {}

    def role(holders: Sequence[SigningKey], threshold: int) -> Role:
        held = [holder.public.tuf_key() for holder in holders]
        keys.update({key.keyid: key for key in held})
        return Role(sorted(key.keyid for key in held), threshold)

    roles = {
        "root": role(root, root_threshold),
        "targets": role(targets, targets_threshold),
        "snapshot": role([online], 1),
        "timestamp": role([online], 1),
    }
    return Root(1, None, expires, keys, roles, consistent_snapshot=False)


def _delegations(
    plans: PublicKey, release: PublicKey, plan_id: str | None = None, silo_keys: Mapping[str, PublicKey] | None = None
) -> Delegations:
    """Delegate to `plans`, `release` and a plan's silos; before the first plan, to nobody's paths."""
    keys: dict[str, Key] = {}
    roles: dict[str, DelegatedRole] = {}
    for name, public in ((PLANS, plans), (RELEASE, release)):
        key = public.tuf_key()
        keys[key.keyid] = key
        paths = delegated_paths(plan_id, name) if plan_id else []
        roles[name] = DelegatedRole(name, [key.keyid], 1, True, paths)
    if plan_id and silo_keys:
        silos = delegation(plan_id, dict(sorted(silo_keys.items()))).delegations
        if silos is not None:
            keys |= silos.keys
            roles |= silos.roles or {}
    return Delegations(keys, roles)


def _role_key(targets: Targets, role: str) -> PublicKey:
    try:
        return public_key(targets.get_key(targets.get_delegated_role(role).keyids[0]))
    except ValueError as error:
        raise RoleError(f"{role}.json", expected="a role that targets delegates to", got="an unknown one") from error


def _check_plan(plan_id: str, silo_keys: Mapping[str, PublicKey]) -> None:
    if not (is_plan_id(plan_id) and silo_keys and all(map(is_silo_id, silo_keys))):
        raise RoleError(ascii(plan_id), expected="a plan id and the ids of its silos", got="something else")
    if len(set(silo_keys.values())) != len(silo_keys):
        raise RoleError(plan_id, expected="a key of its own for each silo", got="one key for two silos")


def _check_owner(files: Files, plan_id: str, role: str) -> None:
    for path in files:
        check_path(path, f"{role}.json")
        if owner(path, plan_id) != role:
            raise RoleError(f"targets/{path}", expected=f"a path of role {role} in plan {plan_id}", got="another")
