"""Finds published versions of the ensemble, and whether the newest one is the last that the federation signed.

A version and the metadata that list it take effect together (`ddm.io.changes`): the repository never lists a
release that does not exist, and version numbers are consecutive.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from ddm.errors import SetupError
from ddm.io.files import read_bounded
from ddm.protocol.base import check_json, sha256_file
from ddm.publishing.folder import MAX_TUF_BYTES, PublisherFolder


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


def manifest_digest(publisher: PublisherFolder, version: int) -> str | None:
    """Return the sha256 of a version's manifest, None if there is no such version."""
    path = manifest_path(publisher, version)
    return sha256_file(path) if path else None


def check_none_lost(publisher: PublisherFolder) -> None:
    """Refuse to publish if the release signed last is gone: its version number would be used twice.

    Raises:
        SetupError: the metadata list a manifest that is not the newest version's.
    """
    listed = [
        target["hashes"]["sha256"]
        for name, target in _signed(publisher.tuf / "release.json")["targets"].items()
        if name.endswith("/manifest.json")
    ]
    newest_digest = manifest_digest(publisher, newest_version(publisher))
    # A second release with the same number would look to readers like a rollback or a split view.
    if listed and listed != [newest_digest]:
        raise SetupError(
            "releases/",
            expected=f"the version signed last, whose manifest.json has sha256 {' or '.join(listed)}",
            got=f"sha256 {newest_digest} in the newest version" if newest_digest else "no version",
            remedy="Restore releases/ from backup: a version number is never used twice.",
        )


def is_current(publisher: PublisherFolder, version: int) -> bool:
    """Whether nothing was signed since a version was published: its metadata equal the federation's present ones."""
    source = release_folder(publisher, version) / "metadata"
    published = {path.name: path for path in source.glob("*.json")}
    # A rotated root must reach readers, although the release itself is unchanged.
    roots = {path.name for path in publisher.tuf.glob("*.root.json")}
    return roots <= published.keys() and all(
        (publisher.tuf / name).is_file() and sha256_file(path) == sha256_file(publisher.tuf / name)
        for name, path in published.items()
    )


def timestamp_expiry(publisher: PublisherFolder, version: int) -> datetime:
    """Return when a version's timestamp expires."""
    return datetime.fromisoformat(
        _signed(release_folder(publisher, version) / "metadata" / "timestamp.json")["expires"]
    )


def _signed(path: Path) -> dict[str, Any]:
    """Read the signed part of metadata that this federation wrote itself."""
    data = read_bounded(path, MAX_TUF_BYTES)
    signed: dict[str, Any] = check_json(data, subject=path.name, limit=MAX_TUF_BYTES)["signed"]
    return signed
