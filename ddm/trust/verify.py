"""Verifies plan bundles and releases strictly: the single entry point for ``ddm verify`` and the silo's worker.

The rules are in `ddm.trust.rules`, without I/O. This file walks the folder, passes on the metadata, compares every file
with what was signed, and records the versions seen.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from ddm.errors import AbsentFileError, DigestError, RoleError, SignatureError, UnlistedFileError
from ddm.io.files import require_folder
from ddm.io.untrusted import FileEntry, check_digest, list_files, read_small
from ddm.protocol.base import sha256_hex
from ddm.protocol.enrolment import MAX_KEY_HISTORY_BYTES, KeyHistory, KeyRotation
from ddm.trust.key_rotation import open_chain
from ddm.trust.keys import PublicKey, group_fingerprint, parse_fingerprint
from ddm.trust.metadata import LIMITS
from ddm.trust.paths import KEY_HISTORY, silo_role
from ddm.trust.rules import Resolved, Stage, resolve
from ddm.trust.silo_keys import Found, KeyMemory
from ddm.trust.state import Memory, default_state

__all__ = [
    "VerifiedFile",
    "VerifiedRelease",
    "check_bundle_metadata",
    "default_state",
    "verify_bundle",
    "verify_release",
]

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
        files: path relative to the folder of its plan to the file; a silo whose experts are carried over has only files
            below ``silos/``, in the folder of the plan for which it signed.
        origins: silo id to the plan for which it signed, for the silos of `silo_keys`.
        silo_keys: silo id to the fingerprint of the key that targets lists for it, for each silo present; in a bundle,
            for each silo of the plan.
        versions: role to version.
        expires: when the timestamp expires.
        expired: whether it has, which only `archived` accepts.
        told: what the reader should know of silos that changed their key, vanished or appeared since the last release.
        log_keys: verifier keys of the federation's log, as the roots name them, the newest last.
    """

    root_fingerprint: str
    plan_id: str
    files: Mapping[str, VerifiedFile]
    silo_keys: Mapping[str, str]
    versions: Mapping[str, int]
    expires: datetime
    expired: bool
    origins: Mapping[str, str] = field(default_factory=dict)
    log_keys: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


def _accept(verified: VerifiedRelease) -> None:
    """Add no condition."""


def verify_release(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    silo_keys: Mapping[str, str] = _NO_PINS,
    accepted_keys: Mapping[str, str] = _NO_PINS,
    archived: bool = False,
    later: Callable[[str], bool] = _none,
    before_recording: Callable[[VerifiedRelease], None] = _accept,
    now: datetime | None = None,
) -> VerifiedRelease:
    """Verify a whole release, from the pinned root to the last byte.

    Args:
        folder: holds ``metadata/`` and ``targets/``, and nothing else.
        root: the content of 1.root.json, known out of band.
        state: where to remember versions and the silos' keys; None detects no rollback and no changed key.
        silo_keys: silo id to the fingerprint its key must have; this is a consent to that key as well.
        accepted_keys: silo id to the fingerprint of a key that may take the place of the one remembered.
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
    accepted = {
        silo_id: parse_fingerprint(fingerprint) for silo_id, fingerprint in accepted_keys.items()
    } | pins
    asked = _Asked(Stage.RELEASE, state, pins, accepted, archived, later, before_recording)
    return _verify(folder, root, asked, now or datetime.now(UTC))


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
    asked = _Asked(Stage.BUNDLE, state, before_recording=before_recording)
    return _verify(folder, root, asked, now or datetime.now(UTC))


def check_bundle_metadata(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    now: datetime | None = None,
    remember: bool = False,
) -> Resolved:
    """Verify a bundle's metadata alone, before its other files are fetched, copied or read; nothing else is looked at.

    Args:
        folder: holds ``metadata/``.
        root: the content of 1.root.json, known out of band.
        state: where versions are remembered; an older plan after a newer one is a rollback.
        now: the time to verify for; the present when None.
        remember: record the versions, once the caller has compared every file with what is signed.

    Raises:
        TrustError: a check failed; the subject names the file.
        FormatError: a metadata file does not parse.
    """
    entries = {f"metadata/{name}": entry for name, entry in list_files(folder / "metadata").items()}
    memory = Memory.of(state, hashlib.sha256(root).hexdigest()) if state else None
    resolved = resolve(
        _read_metadata(folder, entries),
        root,
        stage=Stage.BUNDLE,
        now=now or datetime.now(UTC),
        remembered=memory.roots() if memory else None,
    )
    if memory:
        memory.check("bundle", resolved)
        if remember:
            memory.record("bundle", resolved)
    return resolved


@dataclass(frozen=True)
class _Asked:
    """What the caller of a verification asked for."""

    stage: Stage
    state: Path | None
    pins: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)
    archived: bool = False
    later: Callable[[str], bool] = _none
    before_recording: Callable[[VerifiedRelease], None] = _accept


def _verify(folder: Path, root: bytes, asked: _Asked, now: datetime) -> VerifiedRelease:
    folder = require_folder(folder, "a folder")
    entries = list_files(folder)
    memory = Memory.of(asked.state, hashlib.sha256(root).hexdigest()) if asked.state else None
    resolved = resolve(
        _read_metadata(folder, entries),
        root,
        stage=asked.stage,
        now=now,
        archived=asked.archived,
        remembered=memory.roots() if memory else None,
    )
    scope = "bundle" if asked.stage is Stage.BUNDLE else resolved.plan_id
    if memory:
        memory.check(scope, resolved)
    _check_pins(resolved, asked.pins)
    rotations = _read_rotations(folder, resolved)
    silo_keys, found = None, Found(resolved.silo_keys, rotations, asked.accepted)
    if memory and asked.stage is Stage.RELEASE:
        same = memory.unchanged(scope, resolved)
        unchanged = [
            silo_id
            for silo_id in found.keys
            if silo_role(resolved.origins[silo_id], silo_id) in same
        ]
        silo_keys, found = KeyMemory(memory.folder), replace(found, unchanged=unchanged)
        silo_keys.check(found)
    files = _check_files(folder, entries, resolved, asked.later)
    verified = VerifiedRelease(
        root_fingerprint=resolved.root_fingerprint,
        plan_id=resolved.plan_id,
        files=files,
        silo_keys=resolved.silo_keys,
        versions=resolved.versions,
        expires=resolved.expires,
        expired=resolved.expired,
        origins=resolved.origins,
        log_keys=resolved.log_keys,
    )
    asked.before_recording(verified)
    # The keys first: what `unchanged` lets pass must be of a release whose keys were remembered.
    told = silo_keys.record(found) if silo_keys else ()
    if memory:
        memory.record(scope, resolved)
    return replace(verified, told=told)


def _read_metadata(folder: Path, entries: Mapping[str, FileEntry]) -> Mapping[str, bytes]:
    """Read the files in ``metadata/``, with bounds on each and on all together; none is trusted yet."""
    view: dict[str, bytes] = {}
    left = MAX_METADATA_BYTES
    for name in entries:
        if not name.startswith("metadata/"):
            continue
        kind = (
            "root"
            if name.endswith(".root.json")
            else name.removeprefix("metadata/").removesuffix(".json")
        )
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


def _read_rotations(folder: Path, resolved: Resolved) -> Mapping[str, tuple[KeyRotation, ...]]:
    """Read the rotations of the silos' keys from the very bytes that are signed, and verify each of them."""
    name = f"targets/{resolved.plan_id}/{KEY_HISTORY}"
    target = resolved.targets.get(name.removeprefix("targets/"))
    if target is None:
        return {}
    data = read_small(folder, name, MAX_KEY_HISTORY_BYTES)
    if (len(data), sha256_hex(data)) != (target.bytes, target.digest):
        raise DigestError(
            name,
            expected=f"sha256 {target.digest[:16]}...",
            got=f"sha256 {sha256_hex(data)[:16]}...",
        )
    history = KeyHistory.parse(data, subject=name, limit=MAX_KEY_HISTORY_BYTES)
    chains = {}
    for silo_id, sealed in history.silos.items():
        chains[silo_id] = open_chain(sealed, silo_id=silo_id, root_digest=resolved.root_fingerprint)
        last = PublicKey.parse(chains[silo_id][-1].new_key).fingerprint
        if (signed := resolved.silo_keys.get(silo_id)) != last:
            expected = (
                f"rotations of {silo_id} up to the key that signed, {(signed or 'none')[:16]}..."
            )
            raise SignatureError(name, expected=expected, got=f"rotations up to key {last[:16]}...")
    return chains


def _check_files(
    folder: Path, entries: Mapping[str, FileEntry], resolved: Resolved, later: Callable[[str], bool]
) -> Mapping[str, VerifiedFile]:
    """Compare the folder with the signed files: no file more or less, and the same bytes."""
    signed = {f"targets/{path}": target for path, target in resolved.targets.items()}
    for name in entries:
        if not name.startswith("metadata/") and name not in signed:
            raise UnlistedFileError(
                name, expected="only signed files", got="a file that no role lists"
            )
    for name in signed:
        if name not in entries:
            raise AbsentFileError(name, expected="a signed file", got="no such file")
    files: dict[str, VerifiedFile] = {}
    for name, target in signed.items():
        # A silo has one role, of one plan, so no two plans' files have the same name here.
        entry, relative = entries[name], name.split("/", 2)[2]
        if not (postponed := later(relative)):
            check_digest(folder, name, target.bytes, target.digest)
        elif entry.bytes != target.bytes:
            raise DigestError(name, expected=f"{target.bytes} bytes", got=f"{entry.bytes} bytes")
        files[relative] = VerifiedFile(
            entry.path, target.bytes, target.digest, target.role, read=not postponed
        )
    return files
