"""Checks a federation's own metadata file by file, so that the operator sees problems before readers refuse it.

`ddm.trust.rules` stops at the first error, as a verifier must. This file reports every error, also for a repository
that has no plan yet.
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
class MetadataStatus:
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


def check_repository_files(folder: Path) -> list[MetadataStatus]:
    """Check every role of a repository: its signatures, and that it is the version that the snapshot lists.

    Args:
        folder: holds ``1.root.json`` and the rest.
    """
    return list(_RepositoryCheck(folder).check_files())


class _RepositoryCheck:
    """One pass over the files in TUF's order: each file is checked with what the valid files before it say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The newest valid file of each kind so far; None while there is none.
        self._root: Root | None = None
        self._targets: Targets | None = None
        self._listed_files: dict[str, MetaFile] = {}

    def check_files(self) -> Iterator[MetadataStatus]:
        # A root that is missing in between shows as a problem of the file with its name.
        last_version = max(
            (int(path.name.split(".")[0]) for path in self._folder.glob("[1-9]*.root.json")),
            default=1,
        )
        for version in range(1, last_version + 1):
            # An earlier root may have expired, since only the newest one must be valid now.
            yield self._check_file(
                f"{version}.root.json",
                Root,
                "root",
                report_expiry=version == last_version,
            )
        yield self._check_file("timestamp.json", Timestamp, "timestamp")
        yield self._check_file("snapshot.json", Snapshot, "snapshot")
        for role in ("targets", PLANS, RELEASE):
            yield self._check_file(f"{role}.json", Targets, role)

    def _check_file(
        self,
        name: str,
        kind: type[T],
        role: str,
        *,
        report_expiry: bool = True,
    ) -> MetadataStatus:
        expires = None
        try:
            data = read_bounded(self._folder / name, LIMITS[kind.type])
            metadata = parse_metadata(data, kind, name)
            signed = metadata.signed
            # Known before the checks, so that a problem does not hide when the file expires.
            if report_expiry:
                expires = signed.expires
            self._check_listed(name, data)
            check_signatures(metadata, role, self._delegators(signed, role), name)
            # Only what is valid is used to check the files after it.
            self._keep_valid(signed, role)
        except ArchipelagoError as error:
            return MetadataStatus(name, expires=expires, problem=error)
        life = METADATA_LIFE
        if role == "timestamp":
            life = TIMESTAMP_LIFE
        return MetadataStatus(name, signed_at=signed.expires - life, expires=expires)

    def _delegators(
        self, signed: Root | Timestamp | Snapshot | Targets, role: str
    ) -> list[Root | Targets]:
        """Return the metadata that names the role's keys; for a new root the old one and the new one."""
        if isinstance(signed, Root):
            return self._root_delegators(signed)
        delegator: Root | Targets | None = self._root
        source = "root"
        if role in (PLANS, RELEASE):
            delegator = self._targets
            source = "targets"
        if delegator is None:
            raise AbsentFileError(
                f"{role}.json",
                expected=f"a valid {source} that delegates to it",
                got=f"an invalid or missing {source}",
            )
        return [delegator]

    def _root_delegators(self, signed: Root) -> list[Root | Targets]:
        next_version = 1
        if self._root is not None:
            next_version = self._root.version + 1
        if signed.version != next_version:
            raise RollbackError(
                f"{next_version}.root.json",
                expected=f"version {next_version}",
                got=f"version {signed.version}",
            )
        if self._root is None:
            return [signed]
        return [self._root, signed]

    def _check_listed(self, name: str, data: bytes) -> None:
        """Refuse a file that is not the one that timestamp or snapshot lists, where these could be read."""
        entry = self._listed_files.get(name)
        # An entry without hashes is that of a removed role, whose file must be absent; readers check that.
        if entry is None or not entry.hashes:
            return
        listed_digest = entry.hashes.get("sha256", "")
        digest = hashlib.sha256(data).hexdigest()
        if digest != listed_digest:
            expected = f"sha256 {listed_digest[:16]}... of version {entry.version}, as listed"
            raise DigestError(name, expected=expected, got=f"sha256 {digest[:16]}...")

    def _keep_valid(self, signed: Root | Timestamp | Snapshot | Targets, role: str) -> None:
        if isinstance(signed, Root):
            self._root = signed
        elif isinstance(signed, Timestamp):
            self._listed_files["snapshot.json"] = signed.snapshot_meta
        elif isinstance(signed, Snapshot):
            self._listed_files.update(signed.meta)
        elif role == "targets":
            self._targets = signed
