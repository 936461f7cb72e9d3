"""Examines a federation's own metadata file by file, so that the operator sees problems before readers refuse it.

`ddm.trust.rules` stops at the first error, as a verifier must. This file reports every error, also for a repository
without a plan.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tuf.api.metadata import MetaFile, Root, Snapshot, Targets, Timestamp

from ddm.errors import AbsentFileError, ArchipelagoError, DigestError, RollbackError
from ddm.io.files import read_bounded
from ddm.trust.metadata import (
    LIMITS,
    METADATA_LIFE,
    TIMESTAMP_LIFE,
    T,
    check_signatures,
    parse_metadata,
)
from ddm.trust.paths import PLANS, RELEASE


@dataclass(frozen=True)
class RoleHealth:
    """The state of one metadata file.

    Attributes:
        name: the file.
        signed_at: when it was signed, computed from its expiry and its period of validity.
        expires: when it expires.
        problem: the error in it, if any.
    """

    name: str
    signed_at: datetime | None = None
    expires: datetime | None = None
    problem: ArchipelagoError | None = None


def examine(folder: Path) -> list[RoleHealth]:
    """Check every role of a repository: its signatures, and that it is the version that the snapshot lists.

    Args:
        folder: holds ``1.root.json`` and the rest.
    """
    return list(_Examination(folder).run())


class _Examination:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root: Root | None = None
        self._targets: Targets | None = None
        self._listed: dict[str, MetaFile] = {}

    def run(self) -> Iterator[RoleHealth]:
        last = max(
            (int(path.name.split(".")[0]) for path in self._folder.glob("[1-9]*.root.json")),
            default=1,
        )
        for version in range(1, last + 1):
            yield self._file(f"{version}.root.json", Root, "root", now_counts=version == last)
        yield self._file("timestamp.json", Timestamp, "timestamp")
        yield self._file("snapshot.json", Snapshot, "snapshot")
        for name in ("targets", PLANS, RELEASE):
            yield self._file(f"{name}.json", Targets, name)

    def _file(self, name: str, kind: type[T], role: str, *, now_counts: bool = True) -> RoleHealth:
        expires = None
        try:
            data = read_bounded(self._folder / name, LIMITS[kind.type])
            metadata = parse_metadata(data, kind, name)
            signed = metadata.signed
            expires = signed.expires if now_counts else None
            self._check_listed(name, data)
            check_signatures(metadata, role, self._delegators(signed, role), name)
            self._remember(signed, role)
        except ArchipelagoError as error:
            return RoleHealth(name, expires=expires, problem=error)
        life = TIMESTAMP_LIFE if role == "timestamp" else METADATA_LIFE
        return RoleHealth(name, signed_at=signed.expires - life, expires=expires)

    def _delegators(
        self, signed: Root | Timestamp | Snapshot | Targets, role: str
    ) -> list[Root | Targets]:
        if isinstance(signed, Root):
            wanted = self._root.version + 1 if self._root else 1
            if signed.version != wanted:
                raise RollbackError(
                    f"{wanted}.root.json",
                    expected=f"version {wanted}",
                    got=f"version {signed.version}",
                )
            return [self._root, signed] if self._root else [signed]
        delegator = self._targets if role in (PLANS, RELEASE) else self._root
        if delegator is None:
            source = "targets" if role in (PLANS, RELEASE) else "root"
            raise AbsentFileError(
                f"{role}.json",
                expected=f"a valid {source} that delegates to it",
                got=f"an invalid or missing {source}",
            )
        return [delegator]

    def _check_listed(self, name: str, data: bytes) -> None:
        entry = self._listed.get(name)
        found, listed = (
            hashlib.sha256(data).hexdigest(),
            (entry.hashes or {}).get("sha256", "") if entry else "",
        )
        if entry and entry.hashes and listed != found:
            expected = f"sha256 {listed[:16]}... of version {entry.version}, as listed"
            raise DigestError(name, expected=expected, got=f"sha256 {found[:16]}...")

    def _remember(self, signed: Root | Timestamp | Snapshot | Targets, role: str) -> None:
        if isinstance(signed, Root):
            self._root = signed
        elif isinstance(signed, Timestamp):
            self._listed["snapshot.json"] = signed.snapshot_meta
        elif isinstance(signed, Snapshot):
            self._listed.update(signed.meta)
        elif isinstance(signed, Targets) and role == "targets":
            self._targets = signed
