"""Finds published versions of the ensemble, and whether the newest one is the last that the federation signed.

A version and the metadata that list it take effect together (`ddm.io.changes`): the repository never lists a
release that does not exist, and version numbers are consecutive.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddm.errors import SetupError
from ddm.io.files import read_bounded
from ddm.protocol.base import MAX_DOCUMENT_BYTES, check_json, sha256_file, sha256_hex
from ddm.protocol.manifest import Manifest
from ddm.publishing.folder import MAX_TUF_BYTES, PublisherFolder


@dataclass(frozen=True)
class NewestVersion:
    """The newest version that is published.

    Attributes:
        number: the number of the version, 1 for the first.
        manifest: what it states.
        manifest_digest: sha256 of the manifest.
        current_until: when its timestamp expires, from when on readers refuse it; None where metadata were signed since
            the version was published, as by a key rotation, which reach readers only with a new version.
    """

    number: int
    manifest: Manifest
    manifest_digest: str
    current_until: datetime | None


def newest_version(publisher: PublisherFolder) -> int:
    """Return the highest version that is published, 0 before the first."""
    folders = publisher.releases.glob("[1-9]*")
    versions = (int(path.name) for path in folders if path.name.isdigit())
    return max(versions, default=0)


def release_folder(publisher: PublisherFolder, version: int) -> Path:
    """Return the folder of a version."""
    return publisher.releases / str(version)


def manifest_path(publisher: PublisherFolder, version: int) -> Path | None:
    """Return the path of a version's manifest, None if there is no such version."""
    return next(release_folder(publisher, version).glob("targets/*/manifest.json"), None)


def read_newest(publisher: PublisherFolder) -> NewestVersion | None:
    """Read the newest version, which must be the one signed last; None before the first.

    Raises:
        SetupError: the release signed last is gone.
    """
    number = newest_version(publisher)
    path = manifest_path(publisher, number)
    if path is None:
        check_none_lost(publisher, None)
        return None
    data = read_bounded(path, MAX_DOCUMENT_BYTES)
    digest = sha256_hex(data)
    check_none_lost(publisher, digest)
    manifest = Manifest.parse(data, subject=path.name)
    current_until = None
    if is_current(publisher, number):
        current_until = timestamp_expiry(publisher, number)
    return NewestVersion(number, manifest, digest, current_until)


def check_none_lost(publisher: PublisherFolder, newest_digest: str | None) -> None:
    """Refuse to publish if the release signed last is gone: its version number would be used twice.

    Args:
        publisher: the publisher whose metadata list the release signed last.
        newest_digest: sha256 of the newest version's manifest, None where no version is there.

    Raises:
        SetupError: the metadata list a manifest that is not the newest version's.
    """
    targets = _signed(publisher.tuf / "release.json")["targets"]
    listed_digests = [
        target["hashes"]["sha256"]
        for name, target in targets.items()
        if name.endswith("/manifest.json")
    ]
    # A second release with the same number would look to readers like a rollback or a split view.
    if listed_digests and listed_digests != [newest_digest]:
        got = "no version"
        if newest_digest is not None:
            got = f"sha256 {newest_digest} in the newest version"
        raise SetupError(
            "releases/",
            expected=f"the version signed last, whose manifest.json has sha256 {' or '.join(listed_digests)}",
            got=got,
            remedy="Restore releases/ from backup: a version number is never used twice.",
        )


def is_current(publisher: PublisherFolder, version: int) -> bool:
    """Whether nothing was signed since a version was published: its metadata equal the federation's present ones."""
    source = release_folder(publisher, version) / "metadata"
    published = {path.name: path for path in source.glob("*.json")}
    # A rotated root must reach readers, although the release itself is unchanged.
    roots = {path.name for path in publisher.tuf.glob("*.root.json")}
    if not roots <= published.keys():
        return False
    for name, path in published.items():
        present = publisher.tuf / name
        if not present.is_file() or sha256_file(path) != sha256_file(present):
            return False
    return True


def timestamp_expiry(publisher: PublisherFolder, version: int) -> datetime:
    """Return when a version's timestamp expires."""
    timestamp = _signed(release_folder(publisher, version) / "metadata" / "timestamp.json")
    return datetime.fromisoformat(timestamp["expires"])


def _signed(path: Path) -> dict[str, Any]:
    """Read the signed part of metadata that this federation wrote itself."""
    data = read_bounded(path, MAX_TUF_BYTES)
    signed: dict[str, Any] = check_json(data, subject=path.name, limit=MAX_TUF_BYTES)["signed"]
    return signed
