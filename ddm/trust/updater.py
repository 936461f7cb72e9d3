"""Downloads the metadata of a release by python-tuf's own client, from wherever the caller reads its files.

The client fetches each file only once the one above it is verified, within the bounds that the one above states. What
it returns is verified once more by the stricter `ddm.trust.rules`, which alone decide; the client's own memory is a
folder for one call, since `ddm.trust.version_store` remembers.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from ddm.errors import (
    AbsentFileError,
    DigestError,
    ExpiredError,
    RollbackError,
    RootError,
    SignatureError,
    TrustError,
)
from ddm.trust.drafts import delegated_roles
from ddm.trust.metadata import LIMITS, parse_metadata
from ddm.trust.paths import PLANS, RELEASE, split_silo_role
from ddm.trust.rules import MAX_ROOT_ROTATIONS
from ddm.trust.verify import MAX_METADATA_BYTES

ReadFile = Callable[[str, int], bytes]
"""Reads a file of the release by its path, of at most this many bytes."""

# The client's errors, the special ones before the general ones.
_ERRORS: tuple[tuple[type[Exception], type[TrustError]], ...] = (
    (ExpiredMetadataError, ExpiredError),
    (UnsignedMetadataError, SignatureError),
    (BadVersionNumberError, RollbackError),
    (LengthOrHashMismatchError, DigestError),
    (DownloadLengthMismatchError, DigestError),
    (RepositoryError, TrustError),
    (DownloadError, TrustError),
)
_KINDS: Mapping[str, Any] = {"root": Root, "timestamp": Timestamp, "snapshot": Snapshot}


def download_metadata(
    read_file: ReadFile, root: bytes, scratch: Path, *, archived: bool = False
) -> Mapping[str, bytes]:
    """Download the metadata of the release that is current at a host.

    Args:
        read_file: reads the host's files.
        root: the content of 1.root.json, known out of band.
        scratch: an empty folder, for the client's use.
        archived: accept an expired timestamp, and only that, as `ddm.trust.rules.verify_metadata` does.

    Returns:
        The bytes of each file by its name in ``metadata/``; the caller verifies them by the strict rules.

    Raises:
        RootError: the host's release has another root.
        TrustError: the client refuses a file; the subject names it.
        DocumentError: a file is too long, or does not parse.
        AbsentFileError: a file is not there.
    """
    fetcher = _Fetcher(read_file)
    first_root = fetcher.read("1.root.json")
    if first_root != root:
        raise RootError(
            "metadata/1.root.json",
            expected="the pinned root",
            got="another federation's root",
            remedy="Check the address and --root: one of them belongs to another federation.",
        )
    try:
        updater = Updater(
            metadata_dir=str(scratch),
            # The fetcher is given paths, and knows the host.
            metadata_base_url="",
            fetcher=fetcher,
            config=UpdaterConfig(
                max_root_rotations=MAX_ROOT_ROTATIONS,
                root_max_length=LIMITS["root"],
                timestamp_max_length=LIMITS["timestamp"],
                snapshot_max_length=LIMITS["snapshot"],
                targets_max_length=LIMITS["targets"],
            ),
            bootstrap=root,
        )
        if archived:
            _go_back_to_validity(updater, fetcher)
        updater.refresh()
        for path in _paths_of_roles(scratch):
            # Nothing is downloaded for the path: the client loads the role that may list it.
            updater.get_targetinfo(path)
    except DownloadHTTPError as error:
        # Raised below as the absence of a file, where the client does not expect one.
        if isinstance(error.__cause__, AbsentFileError):
            raise error.__cause__ from error
        raise
    except (RepositoryError, DownloadError) as error:
        raise _as_ours(error, fetcher.last_name) from error
    return _downloaded_files(scratch)


class _Fetcher(FetcherInterface):
    """Gives python-tuf's client the files of ``metadata/``, each parsed strictly, all of them together bounded."""

    def __init__(self, read_file: ReadFile) -> None:
        self._read_file = read_file
        self._bytes_left = MAX_METADATA_BYTES
        self.last_name = "metadata"

    def read(self, name: str) -> bytes:
        """Read one file of ``metadata/``."""
        self.last_name = f"metadata/{name}"
        kind = _KINDS.get(name.removesuffix(".json").rpartition(".")[2], Targets)
        limit = LIMITS[kind.type]
        data = self._read_file(self.last_name, min(limit, self._bytes_left))
        self._bytes_left -= len(data)
        # Bounds and schema before the client parses it: it accepts numbers and depths of any size.
        parse_metadata(data, kind, self.last_name, limit=limit)
        return data

    def _fetch(self, url: str) -> Iterator[bytes]:
        # A generator: what is raised before its first item would be wrapped by the client.
        name = url.removeprefix("/")
        try:
            yield self.read(name)
        except AbsentFileError as error:
            raise DownloadHTTPError(str(error), 404) from error


def _go_back_to_validity(updater: Updater, fetcher: _Fetcher) -> None:
    """Let the client verify at a time at which the timestamp was valid.

    The timestamp is not verified yet, so that it can be of any time. Nothing but expiry depends on that, and the strict
    rules compare every other file's with the present afterwards.
    """
    timestamp = parse_metadata(fetcher.read("timestamp.json"), Timestamp, "metadata/timestamp.json")
    last_moment = timestamp.signed.expires - timedelta(seconds=1)
    # The client reads the clock itself and offers no other way to set the time.
    updater._trusted_set.reference_time = min(datetime.now(UTC), last_moment)


def _paths_of_roles(scratch: Path) -> list[str]:
    """Return, for each role below `targets` that the snapshot lists as present, a path that it alone may list."""
    targets = parse_metadata((scratch / "targets.json").read_bytes(), Targets, "targets.json")
    snapshot = parse_metadata((scratch / "snapshot.json").read_bytes(), Snapshot, "snapshot.json")
    roles = delegated_roles(targets.signed)
    plan_id = ""
    plan_paths = roles[PLANS].paths if PLANS in roles else None
    if plan_paths:
        plan_id = plan_paths[0].split("/")[0]
    paths = []
    for role in roles:
        entry = snapshot.signed.meta.get(f"{role}.json")
        # Silos may be missing, and an entry without hashes is of a role that was removed.
        if entry is None or entry.hashes is None:
            continue
        silo_role = split_silo_role(role)
        if silo_role is not None:
            paths.append(f"{silo_role[0]}/silos/{silo_role[1]}/submission.json")
        elif role == PLANS:
            paths.append(f"{plan_id}/plan.json")
        elif role == RELEASE:
            paths.append(f"{plan_id}/manifest.json")
    return paths


def _downloaded_files(scratch: Path) -> Mapping[str, bytes]:
    files = {}
    for path in sorted(scratch.glob("*.json")):
        # `root.json` is the client's own name for the newest root.
        if path.name != "root.json":
            files[path.name] = path.read_bytes()
    for path in sorted((scratch / "root_history").glob("*.root.json")):
        files[path.name] = path.read_bytes()
    return files


def _as_ours(error: Exception, name: str) -> Exception:
    for theirs, ours in _ERRORS:
        if isinstance(error, theirs):
            got = ascii(str(error))[1:-1][:200]
            return ours(name, expected="metadata that the pinned root vouches for", got=got)
    return error
