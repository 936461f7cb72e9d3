"""The store of verified versions, which detects a rollback to older versions that still have valid signatures.

There is one folder for each pinned root. It holds

 * one file for each plan with the version and digest of every role, and one for plan bundles, where an older plan is
   a rollback too;
 * `removed-roles.json`, the roles of silos that a snapshot listed as removed;
 * every later root that was seen, so that a revoked key stays revoked.

It is written only after complete verification. The rules that the store follows are

 * *Rollback* (TUF specification 1.0.31, 5.4.3, 5.5.5): no role has a lower version than before, nor the same version
   with other content.
 * *Fast-forward* (5.3.11): a thief of the online key can sign versions so high that no later one follows. When the
   newest root takes a key from `timestamp` or `snapshot`, their versions are forgotten. The specification keeps the
   versions of all other roles in the snapshot, and forgets them with it. Here each role's version was read from
   metadata that the role's own keys signed, and is forgotten only if these keys were taken away as well.
 * *Removed roles*: a role leaves the snapshot when its silo is withdrawn or removed, or when a new plan does not carry
   it over. From then on the snapshot lists it with the next version, and what the silo signed before is outdated, as
   for any TUF client that remembers a snapshot. No later version of the same plan may publish it again, and no later
   plan may carry it over. This record serves all plans of a federation, since the plan that carries a role is not the
   plan whose release showed that it was gone.
 * A release that this reader has verified before stays readable, also if it shows a role that was removed later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import DocumentError, RollbackError
from ddm.io.files import write_atomic
from ddm.io.untrusted import read_small
from ddm.protocol.base import Digest, Document, Model, PositiveInt
from ddm.trust.metadata import LIMITS
from ddm.trust.paths import silo_role, split_silo_role
from ddm.trust.rules import MAX_ROOT_ROTATIONS, VerifiedMetadata
from ddm.trust.state_folder import locked_state_folder

REMOVED_NAME = "removed-roles.json"
MAX_STATE_BYTES = 1024 * 1024
# A snapshot, which lists as many roles, has at most 2 MB.
MAX_REMOVED_BYTES = 4 * 1024 * 1024
_ONLINE = ("timestamp", "snapshot")


class _RoleVersion(Model):
    """One role's version, the sha256 of its file, and the ids of the keys that held the role."""

    version: PositiveInt
    digest: Digest
    keys: Annotated[tuple[Digest, ...], Field(max_length=64)] = ()


class _VersionRecord(Document):
    format: Literal["archipelago/trust-state/1"] = "archipelago/trust-state/1"
    roles: dict[str, _RoleVersion]


class RemovedRoles(Document):
    """Roles that are gone.

    Attributes:
        keys: ids of the keys that held the snapshot.
        roles: role to the first version that would not be outdated.
        left: those of them that went in a later version of their own plan, and not because another plan began.
    """

    format: Literal["archipelago/removed-roles/1"] = "archipelago/removed-roles/1"
    keys: Annotated[tuple[Digest, ...], Field(max_length=64)] = ()
    roles: Annotated[dict[str, PositiveInt], Field(max_length=65536)] = {}
    left: Annotated[tuple[str, ...], Field(max_length=65536)] = ()


@dataclass(frozen=True)
class VersionStore:
    """The versions seen under one pinned root.

    Attributes:
        folder: where it is kept.
    """

    folder: Path

    @classmethod
    def for_root(cls, state: Path, root_fingerprint: str) -> "VersionStore":
        """Return the store of one federation below the folder `state`."""
        return cls(state / root_fingerprint)

    def roots(self) -> Mapping[int, bytes]:
        """Return the later roots seen before, version to bytes."""
        roots: dict[int, bytes] = {}
        for version in range(2, MAX_ROOT_ROTATIONS + 2):
            name = f"{version}.root.json"
            if not (self.folder / name).exists():
                break
            subject = f"remembered {name}"
            roots[version] = read_small(self.folder, name, LIMITS["root"], subject=subject)
        return roots

    def check(self, scope: str, metadata: VerifiedMetadata) -> None:
        """Refuse a version older than one seen, or the same version with other content.

        Args:
            scope: a plan's id, or ``bundle``.
            metadata: verified metadata.

        Raises:
            RollbackError: the subject names the metadata file.
            DocumentError: the store itself is damaged.
        """
        check_not_older(still_trusted(self._load(scope), metadata), metadata)
        self._check_removed(scope, metadata)

    def record(self, scope: str, metadata: VerifiedMetadata) -> None:
        """Remember verified metadata, unless another process has recorded something newer meanwhile.

        Raises:
            RollbackError: another process has.
            SetupError: the folder cannot be written.
        """
        with locked_state_folder(self.folder, "an old release cannot be noticed"):
            # The check that the caller made was without the lock: another process may have recorded a newer version.
            stored = self._load(scope)
            trusted = still_trusted(stored, metadata)
            check_not_older(trusted, metadata)
            self._check_removed(scope, metadata)

            # The roots first. If the process ends here, the next one knows a revoked key, which is never too early.
            for version, data in metadata.roots.items():
                path = self.folder / f"{version}.root.json"
                if version > 1 and not path.exists():
                    write_atomic(path, data)

            current = {
                role: _RoleVersion(
                    version=version,
                    digest=metadata.digests[role],
                    keys=metadata.keys.get(role, ()),
                )
                for role, version in metadata.versions.items()
            }
            record = _VersionRecord(roles={**trusted, **current})
            if record.roles != stored:
                write_atomic(self._path(scope), record.encode())
            record_removed(self.folder, metadata)

    def unchanged_roles(self, scope: str, metadata: VerifiedMetadata) -> frozenset[str]:
        """Return the roles whose metadata are, to the byte, those seen before."""
        return frozenset(
            role
            for role, stored in self._load(scope).items()
            if metadata.digests.get(role) == stored.digest
        )

    def _check_removed(self, scope: str, metadata: VerifiedMetadata) -> None:
        """Refuse experts of a silo that was seen to be gone from the plan for which it signed them."""
        # The very release that was verified before stays readable.
        if "snapshot" not in self.unchanged_roles(scope, metadata):
            check_not_removed(load_removed(self.folder), metadata)

    def _path(self, scope: str) -> Path:
        return self.folder / f"{scope}.json"

    def _load(self, scope: str) -> Mapping[str, _RoleVersion]:
        path = self._path(scope)
        if not path.exists():
            return {}
        subject = f"state {path}"
        try:
            data = read_small(self.folder, path.name, MAX_STATE_BYTES, subject=subject)
            return _VersionRecord.parse(data, subject=subject).roles
        except DocumentError as error:
            # Starting again without the file would silently accept a rollback, so that a person has to decide.
            error.remedy = "The memory is damaged. Delete this file only if you know that the release is current."
            raise


def still_trusted(
    stored: Mapping[str, _RoleVersion], metadata: VerifiedMetadata
) -> Mapping[str, _RoleVersion]:
    """Forget what a stolen key may have signed, once the newest root took the online roles from a key; a pure function.

    The version of the root itself is never forgotten.

    Source:
        TUF specification 1.0.31, 5.3.11.
    """
    rotated = set()
    for role, version in stored.items():
        # A role that this metadata does not show has lost no key as far as is known.
        current_keys = metadata.keys.get(role, version.keys)
        if not set(version.keys) <= set(current_keys):
            rotated.add(role)
    if rotated.isdisjoint(_ONLINE):
        return stored
    forgotten = {*_ONLINE, *rotated}
    return {role: version for role, version in stored.items() if role not in forgotten}


def check_not_older(stored: Mapping[str, _RoleVersion], metadata: VerifiedMetadata) -> None:
    """Compare each role's version with the one seen before; a pure function.

    Raises:
        RollbackError: a lower version, or the same version with other content.
    """
    for role, version in metadata.versions.items():
        before = stored.get(role)
        if before is None:
            continue
        subject = f"metadata/{role}.json"
        if role == "root":
            subject = f"metadata/{version}.root.json"

        # Rollback attack: an earlier version, whose signatures are valid until they expire.
        if version < before.version:
            raise RollbackError(
                subject,
                expected=f"version {before.version} or later",
                got=f"version {version}",
            )
        # Equivocation: two readers are given different content under one version.
        digest = metadata.digests[role]
        if version == before.version and digest != before.digest:
            raise RollbackError(
                subject,
                expected=f"version {version} as seen before, sha256 {before.digest[:16]}...",
                got=f"sha256 {digest[:16]}...",
            )


def check_not_removed(removed: RemovedRoles, metadata: VerifiedMetadata) -> None:
    """Refuse a role that was seen to be gone; a pure function.

    The attack: experts that their silo withdrew are published again, under the silo's old and still valid signature, in
    a later version of their plan or in a plan that carries them over.

    Args:
        removed: what is remembered.
        metadata: verified metadata.

    Raises:
        RollbackError: the subject names the role's metadata.
    """
    removed = _still_removed(removed, metadata)
    for silo_id, origin in metadata.origins.items():
        role = silo_role(origin, silo_id)
        if origin == metadata.plan_id:
            # The next plan removes the roles of the one before, whose releases may be read all the same; and a plan's
            # bundle names silos that have not signed yet.
            if role not in removed.left or role not in metadata.versions:
                continue
        if metadata.versions.get(role, 0) < removed.roles.get(role, 0):
            raise RollbackError(
                f"metadata/{role}.json",
                expected=f"no expert of {silo_id} from plan {origin}, which was seen without {silo_id}",
                got=f"a release of plan {metadata.plan_id} that publishes it again",
                remedy="Ask the federation why it publishes what a silo withdrew. If this release is older than the "
                "one that you verified last, verify it with another --state.",
            )


def load_removed(folder: Path) -> RemovedRoles:
    """Read the removed roles below `folder`, empty where there is no file.

    Raises:
        DocumentError: the file is damaged.
    """
    if not (folder / REMOVED_NAME).exists():
        return RemovedRoles()
    subject = f"state {folder / REMOVED_NAME}"
    data = read_small(folder, REMOVED_NAME, MAX_REMOVED_BYTES, subject=subject)
    return RemovedRoles.parse(data, subject=subject, limit=MAX_REMOVED_BYTES)


def record_removed(folder: Path, metadata: VerifiedMetadata) -> None:
    """Remember the roles that this snapshot lists as removed; the caller holds the lock of the folder."""
    stored = load_removed(folder)
    known = _still_removed(stored, metadata)
    roles = dict(known.roles)
    left = set(known.left)
    for role, version in metadata.removed.items():
        roles[role] = max(version, roles.get(role, 0))
        silo_role_parts = split_silo_role(role)
        if silo_role_parts is not None and silo_role_parts[0] == metadata.plan_id:
            left.add(role)
    record = RemovedRoles(keys=metadata.keys["snapshot"], roles=roles, left=tuple(sorted(left)))
    if roles and record != stored:
        write_atomic(folder / REMOVED_NAME, record.encode())


def _still_removed(removed: RemovedRoles, metadata: VerifiedMetadata) -> RemovedRoles:
    """Return the removed roles, or none if a key that signed the snapshot was taken away since."""
    # A thief of that key may have listed any silo as removed, which would make honest releases unreadable.
    if not set(removed.keys) <= set(metadata.keys["snapshot"]):
        return RemovedRoles()
    return removed
