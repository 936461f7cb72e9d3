"""Verifies plan bundles and releases strictly: the single entry point for ``ddm verify`` and the silo's worker.

The rules are in `ddm.trust.rules`, without I/O. This file walks the folder, passes on the metadata, compares every file
with what was signed, and records the versions seen.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from ddm.errors import AbsentFileError, DigestError, RoleError, SignatureError, UnlistedFileError
from ddm.io.files import require_folder
from ddm.io.untrusted import Entry, check_digest, read_small, scan
from ddm.trust.keys import group_fingerprint, parse_fingerprint
from ddm.trust.metadata import LIMITS
from ddm.trust.rules import Resolved, Stage, resolve
from ddm.trust.state import Memory, default_state

__all__ = ["VerifiedFile", "VerifiedRelease", "default_state", "verify_bundle", "verify_release"]

MAX_METADATA_BYTES = 64 * 1024 * 1024
_NO_PINS: Mapping[str, str] = MappingProxyType({})


def _none(name: str) -> bool:
    return False


@dataclass(frozen=True)
class VerifiedFile:
    """One file with the signed bytes.

    Attributes:
        path: its location.
        bytes: its length.
        digest: its sha256, to be checked again when the file is opened much later.
        role: the role that signed it.
        read: whether its digest was checked; if not, only its length was, and the reader must check the digest.
    """

    path: Path
    bytes: int
    digest: str
    role: str
    read: bool = True


@dataclass(frozen=True)
class VerifiedRelease:
    """A folder with exactly the signed files.

    Attributes:
        root_fingerprint: sha256 of the pinned 1.root.json.
        plan_id: its plan.
        files: path relative to ``targets/<plan_id>/`` to the file.
        silo_keys: silo id to the fingerprint of the key that targets lists for it, for each silo present.
        versions: role to version.
        expires: when the timestamp expires.
        expired: whether it has, which only `archived` accepts.
        log_keys: verifier keys of the federation's log, as the roots name them, the newest last.
    """

    root_fingerprint: str
    plan_id: str
    files: Mapping[str, VerifiedFile]
    silo_keys: Mapping[str, str]
    versions: Mapping[str, int]
    expires: datetime
    expired: bool
    log_keys: tuple[str, ...] = ()


def _accept(verified: VerifiedRelease) -> None:
    """Add no condition."""


def verify_release(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    silo_keys: Mapping[str, str] = _NO_PINS,
    archived: bool = False,
    later: Callable[[str], bool] = _none,
    before_recording: Callable[[VerifiedRelease], None] = _accept,
    now: datetime | None = None,
) -> VerifiedRelease:
    """Verify a whole release, from the pinned root to the last byte.

    Args:
        folder: holds ``metadata/`` and ``targets/``, and nothing else.
        root: the content of 1.root.json, known out of band.
        state: where to remember versions; None detects no rollback.
        silo_keys: silo id to the fingerprint its key must have.
        archived: accept an expired timestamp (then `expired` is true), and only that.
        later: selects files, by path below ``targets/<plan_id>/``, whose digests the caller will check when it opens
            them, so that large files are read once.
        before_recording: what else must hold before the versions are remembered; raises what it refuses.
        now: the time to verify for; the present when None.

    Raises:
        MissingFileError: no such folder.
        TrustError: a check failed; the subject names the file.
        FormatError: a metadata file does not parse.
    """
    pins = {silo_id: parse_fingerprint(fingerprint) for silo_id, fingerprint in silo_keys.items()}
    return _verify(
        folder,
        root,
        Stage.RELEASE,
        state=state,
        pins=pins,
        archived=archived,
        later=later,
        before_recording=before_recording,
        now=now,
    )


def verify_bundle(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    before_recording: Callable[[VerifiedRelease], None] = _accept,
    now: datetime | None = None,
) -> VerifiedRelease:
    """Verify a plan's bundle: plan.json and its tensors, without any submission.

    Args:
        folder: holds ``metadata/`` and ``targets/``, and nothing else.
        root: the content of 1.root.json, known out of band.
        state: where to remember versions; an older plan after a newer one is a rollback too.
        before_recording: what else must hold before the versions are remembered; raises what it refuses.
        now: the time to verify for; the present when None.

    Raises:
        MissingFileError: no such folder.
        TrustError: a check failed; the subject names the file.
        FormatError: a metadata file does not parse.
    """
    return _verify(
        folder,
        root,
        Stage.BUNDLE,
        state=state,
        pins=_NO_PINS,
        archived=False,
        later=_none,
        before_recording=before_recording,
        now=now,
    )


def _verify(
    folder: Path,
    root: bytes,
    stage: Stage,
    *,
    state: Path | None,
    pins: Mapping[str, str],
    archived: bool,
    later: Callable[[str], bool],
    before_recording: Callable[[VerifiedRelease], None],
    now: datetime | None,
) -> VerifiedRelease:
    folder = require_folder(folder, "a folder")
    entries = scan(folder)
    memory = Memory.of(state, hashlib.sha256(root).hexdigest()) if state else None
    resolved = resolve(
        _read_metadata(folder, entries),
        root,
        stage=stage,
        now=now or datetime.now(UTC),
        archived=archived,
        remembered=memory.roots() if memory else None,
    )
    scope = "bundle" if stage is Stage.BUNDLE else resolved.plan_id
    if memory:
        memory.check(scope, resolved)
    _check_pins(resolved, pins)
    files = _check_files(folder, entries, resolved, later)
    verified = VerifiedRelease(
        root_fingerprint=resolved.root_fingerprint,
        plan_id=resolved.plan_id,
        files=files,
        silo_keys=resolved.silo_keys,
        versions=resolved.versions,
        expires=resolved.expires,
        expired=resolved.expired,
        log_keys=resolved.log_keys,
    )
    before_recording(verified)
    if memory:
        memory.record(scope, resolved)
    return verified


def _read_metadata(folder: Path, entries: Mapping[str, Entry]) -> Mapping[str, bytes]:
    """Read the files in ``metadata/``, with bounds on each and on all together; none is trusted yet."""
    view: dict[str, bytes] = {}
    left = MAX_METADATA_BYTES
    for name in entries:
        if not name.startswith("metadata/"):
            continue
        kind = "root" if name.endswith(".root.json") else name.removeprefix("metadata/").removesuffix(".json")
        data = read_small(folder, name, min(left, LIMITS.get(kind, LIMITS["targets"])))
        left -= len(data)
        view[name.removeprefix("metadata/")] = data
    return view


def _check_pins(resolved: Resolved, pins: Mapping[str, str]) -> None:
    for silo_id, fingerprint in pins.items():
        found = resolved.silo_keys.get(silo_id)
        if found is None:
            present = ", ".join(sorted(resolved.silo_keys))[:200] or "no silos"
            expected = "part of this release, since its key is pinned"
            raise RoleError(f"silo {silo_id}", expected=expected, got=f"a release of {present}")
        if found != fingerprint:
            subject = f"metadata/{resolved.plan_id}.{silo_id}.json"
            expected = f"signed by key {group_fingerprint(fingerprint)}"
            raise SignatureError(subject, expected=expected, got=group_fingerprint(found))


def _check_files(
    folder: Path, entries: Mapping[str, Entry], resolved: Resolved, later: Callable[[str], bool]
) -> Mapping[str, VerifiedFile]:
    """Compare the folder with the signed files: no file more or less, and the same bytes."""
    signed = {f"targets/{path}": target for path, target in resolved.targets.items()}
    for name in entries:
        if not name.startswith("metadata/") and name not in signed:
            raise UnlistedFileError(name, expected="only signed files", got="a file that no role lists")
    for name in signed:
        if name not in entries:
            raise AbsentFileError(name, expected="a signed file", got="no such file")
    files: dict[str, VerifiedFile] = {}
    for name, target in signed.items():
        entry, relative = entries[name], name.removeprefix(f"targets/{resolved.plan_id}/")
        if not (postponed := later(relative)):
            check_digest(folder, name, target.bytes, target.digest)
        elif entry.bytes != target.bytes:
            raise DigestError(name, expected=f"{target.bytes} bytes", got=f"{entry.bytes} bytes")
        files[relative] = VerifiedFile(entry.path, target.bytes, target.digest, target.role, read=not postponed)
    return files
