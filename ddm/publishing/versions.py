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
from ddm.publishing.home import MAX_TUF_BYTES, Home


def newest_version(home: Home) -> int:
    """Return the highest version that is published, 0 before the first."""
    found = (int(path.name) for path in home.releases.glob("[1-9]*") if path.name.isdigit())
    return max(found, default=0)


def release_folder(home: Home, version: int) -> Path:
    """Return the folder of a version."""
    return home.releases / str(version)


def manifest_path(home: Home, version: int) -> Path | None:
    """Return the path of a version's manifest, None if there is no such version."""
    return next(release_folder(home, version).glob("targets/*/manifest.json"), None)


def manifest_digest(home: Home, version: int) -> str | None:
    """Return the sha256 of a version's manifest, None if there is no such version."""
    path = manifest_path(home, version)
    return sha256_file(path) if path else None


def check_none_lost(home: Home) -> None:
    """Refuse to publish if the release signed last is gone: its version number would be used twice.

    Raises:
        SetupError: the metadata list a manifest that is not the newest version's.
    """
    listed = [
        target["hashes"]["sha256"]
        for name, target in _signed(home.tuf / "release.json")["targets"].items()
        if name.endswith("/manifest.json")
    ]
    found = manifest_digest(home, newest_version(home))
    if listed and listed != [found]:
        raise SetupError(
            "releases/",
            expected=f"the version signed last, whose manifest.json has sha256 {' or '.join(listed)}",
            got=f"sha256 {found} in the newest version" if found else "no version",
            remedy="Restore releases/ from backup: a version number is never used twice.",
        )


def is_current(home: Home, version: int) -> bool:
    """Whether nothing was signed since a version was published: its metadata equal the federation's present ones."""
    source = release_folder(home, version) / "metadata"
    published = {path.name: path for path in source.glob("*.json")}
    roots = {path.name for path in home.tuf.glob("*.root.json")}
    return roots <= published.keys() and all(
        (home.tuf / name).is_file() and sha256_file(path) == sha256_file(home.tuf / name)
        for name, path in published.items()
    )


def timestamp_expiry(home: Home, version: int) -> datetime:
    """Return when a version's timestamp expires."""
    return datetime.fromisoformat(
        _signed(release_folder(home, version) / "metadata" / "timestamp.json")["expires"]
    )


def _signed(path: Path) -> dict[str, Any]:
    """Read the signed part of metadata that this federation wrote itself."""
    data = read_bounded(path, MAX_TUF_BYTES)
    signed: dict[str, Any] = check_json(data, subject=path.name, limit=MAX_TUF_BYTES)["signed"]
    return signed
