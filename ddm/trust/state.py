"""The memory of verified versions, which detects rollbacks to older versions with valid signatures.

There is one folder per pinned root, with one file per plan (and one for plan bundles, where an older plan is a rollback
too), one of the silos' roles that are gone (`ddm.trust.removed_roles`), and every later root seen, so that a revoked
key stays revoked. It is written only after complete verification.

A thief of the online key can sign versions so high that no later one follows (a fast-forward attack). Therefore, as the
TUF specification says (5.3.11), the memory of timestamp and snapshot goes when the newest root takes a key from them.
The specification's memory of all other versions is in the snapshot and goes with it; here each role's version was read
from metadata that its own keys signed, and goes only if these keys were taken away as well.
"""

import os
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
from ddm.trust.remembering import remembering
from ddm.trust.removed_roles import check_not_gone, load_removed, record_removed
from ddm.trust.rules import MAX_ROOT_ROTATIONS, Resolved

MAX_STATE_BYTES = 1024 * 1024
_ONLINE = ("timestamp", "snapshot")


class _Seen(Model):
    """One role's version, the sha256 of its file, and the ids of the keys that held the role."""

    version: PositiveInt
    digest: Digest
    keys: Annotated[tuple[Digest, ...], Field(max_length=64)] = ()


class _Record(Document):
    format: Literal["archipelago/trust-state/1"] = "archipelago/trust-state/1"
    roles: dict[str, _Seen]


def default_state() -> Path:
    """Return the default folder: below ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (
        Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    ) / "archipelago"


@dataclass(frozen=True)
class Memory:
    """The versions seen under one pinned root.

    Attributes:
        folder: where it is kept.
    """

    folder: Path

    @classmethod
    def of(cls, state: Path, root_fingerprint: str) -> "Memory":
        """Return the memory of one federation below the folder `state`."""
        return cls(state / root_fingerprint)

    def roots(self) -> Mapping[int, bytes]:
        """Return the later roots seen before, version to bytes."""
        found: dict[int, bytes] = {}
        for version in range(2, MAX_ROOT_ROTATIONS + 2):
            name = f"{version}.root.json"
            if not (self.folder / name).exists():
                break
            found[version] = read_small(
                self.folder, name, LIMITS["root"], subject=f"remembered {name}"
            )
        return found

    def check(self, scope: str, resolved: Resolved) -> None:
        """Refuse a version older than one seen, or the same version with other content.

        Args:
            scope: a plan's id, or ``bundle``.
            resolved: verified metadata.

        Raises:
            RollbackError: the subject names the metadata file.
            DocumentError: the memory itself is damaged.
        """
        check_not_older(still_trusted(self._load(scope), resolved), resolved)
        self._check_carried(scope, resolved)

    def record(self, scope: str, resolved: Resolved) -> None:
        """Remember verified metadata, unless another process has recorded something newer meanwhile.

        Raises:
            RollbackError: another process has.
            SetupError: the folder cannot be written.
        """
        with remembering(self.folder, "an old release cannot be noticed"):
            loaded = self._load(scope)
            before = still_trusted(loaded, resolved)
            check_not_older(before, resolved)
            self._check_carried(scope, resolved)
            now = {
                role: _Seen(
                    version=version, digest=resolved.digests[role], keys=resolved.keys.get(role, ())
                )
                for role, version in resolved.versions.items()
            }
            for version, data in resolved.roots.items():
                path = self.folder / f"{version}.root.json"
                if version > 1 and not path.exists():
                    write_atomic(path, data)
            record = _Record(roles={**before, **now})
            if record.roles != loaded:
                write_atomic(self._path(scope), record.encode())
            record_removed(self.folder, resolved)

    def _check_carried(self, scope: str, resolved: Resolved) -> None:
        """Refuse experts carried over from an earlier plan although their silo was seen to be gone from it."""
        # the very release that was verified before stays readable
        if "snapshot" not in self.unchanged(scope, resolved):
            check_not_gone(load_removed(self.folder), resolved)

    def unchanged(self, scope: str, resolved: Resolved) -> frozenset[str]:
        """Return the roles whose metadata are, to the byte, those seen before."""
        before = self._load(scope)
        return frozenset(
            role for role, seen in before.items() if resolved.digests.get(role) == seen.digest
        )

    def _path(self, scope: str) -> Path:
        return self.folder / f"{scope}.json"

    def _load(self, scope: str) -> Mapping[str, _Seen]:
        path = self._path(scope)
        if not path.exists():
            return {}
        subject = f"state {path}"
        try:
            return _Record.parse(
                read_small(self.folder, path.name, MAX_STATE_BYTES, subject=subject),
                subject=subject,
            ).roles
        except DocumentError as error:
            error.remedy = "The memory is damaged. Delete this file only if you know that the release is current."
            raise


def still_trusted(before: Mapping[str, _Seen], resolved: Resolved) -> Mapping[str, _Seen]:
    """Forget what a stolen key may have signed, once the newest root took the online roles from a key; a pure function.

    The memory of the root itself never goes.
    """
    rotated = {
        role
        for role, seen in before.items()
        if not set(seen.keys) <= set(resolved.keys.get(role, seen.keys))
    }
    if rotated.isdisjoint(_ONLINE):
        return before
    return {role: seen for role, seen in before.items() if role not in {*_ONLINE, *rotated}}


def check_not_older(before: Mapping[str, _Seen], resolved: Resolved) -> None:
    """Compare each role's version with the one seen before; a pure function.

    Raises:
        RollbackError: a lower version, or the same version with other content.
    """
    for role, version in resolved.versions.items():
        seen = before.get(role)
        subject = f"metadata/{version}.root.json" if role == "root" else f"metadata/{role}.json"
        if seen is not None and version < seen.version:
            raise RollbackError(
                subject, expected=f"version {seen.version} or later", got=f"version {version}"
            )
        if seen is not None and version == seen.version and resolved.digests[role] != seen.digest:
            expected = f"version {version} as seen before, sha256 {seen.digest[:16]}..."
            raise RollbackError(
                subject, expected=expected, got=f"sha256 {resolved.digests[role][:16]}..."
            )
