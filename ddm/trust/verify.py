"""Verifies plan bundles and releases strictly: the single entry point for ``ddm verify`` and the silo's worker.

The rules are in `ddm.trust.rules`, without I/O. This file reads the folder and keeps what was seen. In this order it

 1. lists the folder, without following any link, and reads ``metadata/`` within bounds;
 2. verifies the metadata from the pinned root (`ddm.trust.rules.verify_metadata`);
 3. compares the versions with those seen before (`ddm.trust.version_store`), which detects a rollback;
 4. compares the silos' keys with those that the caller pinned, and with those seen before
    (`ddm.trust.silo_key_store`);
 5. compares every file with what was signed: none is missing, none is unlisted, and each has the signed bytes;
 6. lets the caller add conditions;
 7. records keys and versions, so that nothing is remembered of a folder that was refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ddm.errors import AbsentFileError, DigestError, RoleError, SignatureError, UnlistedFileError
from ddm.io.files import require_folder
from ddm.io.untrusted import ListedFile, check_digest, list_files, read_small
from ddm.protocol.base import sha256_hex
from ddm.protocol.enrolment import MAX_KEY_HISTORY_BYTES, KeyHistory, KeyRotation
from ddm.trust.key_rotation import open_chain
from ddm.trust.keys import PublicKey, group_fingerprint, parse_fingerprint
from ddm.trust.metadata import LIMITS
from ddm.trust.paths import KEY_HISTORY, silo_role
from ddm.trust.rules import FolderKind, VerifiedMetadata, verify_metadata
from ddm.trust.silo_key_store import SiloKeyClaims, SiloKeyStore
from ddm.trust.version_store import VersionStore

# Over all metadata files together: each of ten thousand files within its own bound would still fill the memory.
MAX_METADATA_BYTES = 64 * 1024 * 1024
# Bundles share one scope, since an older plan after a newer one is a rollback. A release's scope is its plan.
_BUNDLE_SCOPE = "bundle"


def _check_all_now(name: str) -> bool:
    return False


@dataclass(frozen=True)
class PostponedFiles:
    """Files whose digests the caller will check when it opens them, so that large files are read once.

    Attributes:
        selects: whether a file is one of them, by its path below ``targets/<plan_id>/``.
        may_be_absent: whether they may still be missing, because the caller fetches each before it opens it.
    """

    selects: Callable[[str], bool] = _check_all_now
    may_be_absent: bool = False

    def allows_absence(self, path: str) -> bool:
        """Whether a file may be missing."""
        return self.may_be_absent and self.selects(path)


@dataclass(frozen=True)
class VerifiedFile:
    """One file with the signed bytes.

    Attributes:
        path: its location.
        bytes: its length.
        digest: its sha256, to be checked again when the file is opened much later.
        role: the role that signed it.
        digest_checked: whether its digest was checked; if not, only its length was, and the reader must check it.
    """

    path: Path
    bytes: int
    digest: str
    role: str
    digest_checked: bool = True


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
        notices: what the reader should know about silos that changed their key, vanished or appeared since the last
            release.
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
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class KnownSiloKeys:
    """Fingerprints of silos' keys that the reader has from the silos themselves, as people type them.

    Attributes:
        pinned: silo id to the fingerprint that its key must have; the silo must be in the release. A pin is a consent.
        accepted: silo id to the fingerprint of a key that may take the place of the one remembered.
    """

    pinned: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)


def _no_condition(verified: VerifiedRelease) -> None:
    """Accept every verified folder."""


@dataclass(frozen=True)
class _VerificationOptions:
    """What the caller of a verification requires; see `verify_release` for each of them."""

    kind: FolderKind
    state: Path | None
    now: datetime
    pinned_keys: Mapping[str, str] = field(default_factory=dict)
    accepted_keys: Mapping[str, str] = field(default_factory=dict)
    archived: bool = False
    later: PostponedFiles = PostponedFiles()
    before_recording: Callable[[VerifiedRelease], None] = _no_condition


def verify_release(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    known_keys: KnownSiloKeys | None = None,
    archived: bool = False,
    later: PostponedFiles = PostponedFiles(),
    before_recording: Callable[[VerifiedRelease], None] = _no_condition,
    now: datetime | None = None,
) -> VerifiedRelease:
    """Verify a whole release, from the pinned root to the last byte.

    Args:
        folder: holds ``metadata/`` and ``targets/``, and nothing else.
        root: the content of 1.root.json, known out of band.
        state: where to remember versions and the silos' keys; None detects no rollback and no changed key.
        known_keys: what the reader knows about the silos' keys; nothing when None.
        archived: accept an expired timestamp (then `expired` is true), and only that.
        later: the files whose digests the caller will check.
        before_recording: what else must hold before the versions are remembered; raises what it refuses.
        now: the time to verify for; the present when None.

    Raises:
        MissingFileError: no such folder.
        TrustError: a check failed; the subject names the file.
        FormatError: a metadata file does not parse.
    """
    known_keys = known_keys or KnownSiloKeys()
    pinned = _parse_fingerprints(known_keys.pinned)
    accepted = _parse_fingerprints(known_keys.accepted)
    options = _VerificationOptions(
        kind=FolderKind.RELEASE,
        state=state,
        now=now or datetime.now(UTC),
        pinned_keys=pinned,
        # Anybody who pins a key consents to it as well.
        accepted_keys=accepted | pinned,
        archived=archived,
        later=later,
        before_recording=before_recording,
    )
    return _verify_folder(folder, root, options)


def _parse_fingerprints(fingerprints: Mapping[str, str]) -> dict[str, str]:
    return {silo_id: parse_fingerprint(text) for silo_id, text in fingerprints.items()}


def verify_bundle(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    before_recording: Callable[[VerifiedRelease], None] = _no_condition,
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
    options = _VerificationOptions(
        kind=FolderKind.BUNDLE,
        state=state,
        now=now or datetime.now(UTC),
        before_recording=before_recording,
    )
    return _verify_folder(folder, root, options)


def verify_bundle_metadata(
    folder: Path,
    root: bytes,
    *,
    state: Path | None,
    now: datetime | None = None,
    remember: bool = False,
) -> VerifiedMetadata:
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
    options = _VerificationOptions(FolderKind.BUNDLE, state, now or datetime.now(UTC))
    versions = _open_version_store(state, root)
    metadata = _verify_metadata_files(folder, entries, root, options, versions)
    if versions is not None:
        versions.check(_BUNDLE_SCOPE, metadata)
        if remember:
            versions.record(_BUNDLE_SCOPE, metadata)
    return metadata


def verify_release_metadata(
    files: Mapping[str, bytes],
    root: bytes,
    *,
    state: Path | None,
    archived: bool = False,
) -> VerifiedMetadata:
    """Verify a release's metadata alone, before its other files are fetched; nothing is remembered.

    Args:
        files: the bytes of each file by its name in ``metadata/``.
        root: the content of 1.root.json, known out of band.
        state: where versions are remembered; an older release than the one remembered is refused.
        archived: accept an expired timestamp, and only that.

    Raises:
        TrustError: a check failed; the subject names the file.
        FormatError: a metadata file does not parse.
    """
    versions = _open_version_store(state, root)
    known_roots = None
    if versions is not None:
        known_roots = versions.roots()
    metadata = verify_metadata(
        files,
        root,
        kind=FolderKind.RELEASE,
        now=datetime.now(UTC),
        archived=archived,
        known_roots=known_roots,
    )
    if versions is not None:
        versions.check(metadata.plan_id, metadata)
    return metadata


def _verify_folder(folder: Path, root: bytes, options: _VerificationOptions) -> VerifiedRelease:
    # The operator may name a link; below the folder no link is followed.
    folder = require_folder(folder, "a folder")
    # A person who looked at a release on a desktop left its files there. Nobody takes them for signed ones, and nothing
    # opens them. A bundle came from a machine.
    skip_desktop_files = options.kind is FolderKind.RELEASE
    entries = list_files(folder, skip_desktop_files=skip_desktop_files)
    versions = _open_version_store(options.state, root)
    metadata = _verify_metadata_files(folder, entries, root, options, versions)
    scope = metadata.plan_id
    if options.kind is FolderKind.BUNDLE:
        scope = _BUNDLE_SCOPE
    if versions is not None:
        versions.check(scope, metadata)

    _check_pinned_keys(metadata, options.pinned_keys)
    # Read and verified without a state too: a release with a wrong key history is refused for everybody.
    rotations = _read_rotations(folder, metadata)
    silo_keys = None
    claims = SiloKeyClaims(metadata.silo_keys, rotations, options.accepted_keys)
    if versions is not None and options.kind is FolderKind.RELEASE:
        silo_keys = SiloKeyStore(versions.folder)
        claims = replace(claims, unchanged=_unchanged_silos(versions, scope, metadata))
        silo_keys.check(claims)

    verified = VerifiedRelease(
        root_fingerprint=metadata.root_fingerprint,
        plan_id=metadata.plan_id,
        files=_check_files(folder, entries, metadata, options.later),
        silo_keys=metadata.silo_keys,
        versions=metadata.versions,
        expires=metadata.expires,
        expired=metadata.expired,
        origins=metadata.origins,
        log_keys=metadata.log_keys,
    )
    options.before_recording(verified)

    # The keys first: what `unchanged` lets pass must be of a release whose keys were remembered. If the process ended
    # between the two in the other order, the next visit would accept a changed key as one verified before.
    notices: tuple[str, ...] = ()
    if silo_keys is not None:
        notices = silo_keys.record(claims)
    if versions is not None:
        versions.record(scope, metadata)
    return replace(verified, notices=notices)


def _open_version_store(state: Path | None, root: bytes) -> VersionStore | None:
    if state is None:
        return None
    return VersionStore.for_root(state, sha256_hex(root))


def _verify_metadata_files(
    folder: Path,
    entries: Mapping[str, ListedFile],
    root: bytes,
    options: _VerificationOptions,
    versions: VersionStore | None,
) -> VerifiedMetadata:
    """Read the files in ``metadata/`` and verify them from the pinned root."""
    known_roots = None
    if versions is not None:
        known_roots = versions.roots()
    return verify_metadata(
        _read_metadata(folder, entries),
        root,
        kind=options.kind,
        now=options.now,
        archived=options.archived,
        known_roots=known_roots,
    )


def _read_metadata(folder: Path, entries: Mapping[str, ListedFile]) -> Mapping[str, bytes]:
    """Read the files in ``metadata/``, with bounds on each and on all together; none is trusted yet.

    Endless data attack: a file without end, or many large ones, would fill memory before any signature is checked.
    """
    files: dict[str, bytes] = {}
    bytes_left = MAX_METADATA_BYTES
    for path in entries:
        if not path.startswith("metadata/"):
            continue
        name = path.removeprefix("metadata/")
        role = name.removesuffix(".json")
        if name.endswith(".root.json"):
            role = "root"
        limit = LIMITS.get(role, LIMITS["targets"])
        files[name] = read_small(folder, path, min(bytes_left, limit))
        bytes_left -= len(files[name])
    return files


def _unchanged_silos(versions: VersionStore, scope: str, metadata: VerifiedMetadata) -> list[str]:
    """Return the silos whose signed list of files is, to the byte, the one verified before of the same plan."""
    unchanged_roles = versions.unchanged_roles(scope, metadata)
    return [
        silo_id
        for silo_id in metadata.silo_keys
        if silo_role(metadata.origins[silo_id], silo_id) in unchanged_roles
    ]


def _check_pinned_keys(metadata: VerifiedMetadata, pinned_keys: Mapping[str, str]) -> None:
    """Require the keys that the caller knows from the silos themselves, since the aggregator could name others."""
    for silo_id, fingerprint in pinned_keys.items():
        actual = metadata.silo_keys.get(silo_id)
        if actual is None:
            present = ", ".join(sorted(metadata.silo_keys))[:200] or "no silos"
            raise RoleError(
                f"silo {silo_id}",
                expected="part of this release, since its key is pinned",
                got=f"a release of {present}",
            )
        if actual != fingerprint:
            raise SignatureError(
                f"metadata/{metadata.plan_id}.{silo_id}.json",
                expected=f"signed by key {group_fingerprint(fingerprint)}",
                got=group_fingerprint(actual),
            )


def _read_rotations(
    folder: Path, metadata: VerifiedMetadata
) -> Mapping[str, tuple[KeyRotation, ...]]:
    """Read the rotations of the silos' keys from the very bytes that are signed, and verify each of them."""
    path = f"{metadata.plan_id}/{KEY_HISTORY}"
    name = f"targets/{path}"
    signed_file = metadata.targets.get(path)
    if signed_file is None:
        return {}
    # The digest is checked on the bytes that are parsed here. `_check_files` opens the file a second time, and another
    # process could change it in between.
    data = read_small(folder, name, MAX_KEY_HISTORY_BYTES)
    digest = sha256_hex(data)
    if (len(data), digest) != (signed_file.bytes, signed_file.digest):
        raise DigestError(
            name,
            expected=f"sha256 {signed_file.digest[:16]}...",
            got=f"sha256 {digest[:16]}...",
        )
    history = KeyHistory.parse(data, subject=name, limit=MAX_KEY_HISTORY_BYTES)
    chains = {}
    for silo_id, sealed in history.silos.items():
        chain = open_chain(sealed, silo_id=silo_id, root_digest=metadata.root_fingerprint)
        last_key = PublicKey.parse(chain[-1].new_key).fingerprint
        signing_key = metadata.silo_keys.get(silo_id)
        if signing_key != last_key:
            shown_key = (signing_key or "none")[:16]
            raise SignatureError(
                name,
                expected=f"rotations of {silo_id} up to the key that signed, {shown_key}...",
                got=f"rotations up to key {last_key[:16]}...",
            )
        chains[silo_id] = chain
    return chains


def _check_files(
    folder: Path,
    entries: Mapping[str, ListedFile],
    metadata: VerifiedMetadata,
    later: PostponedFiles,
) -> Mapping[str, VerifiedFile]:
    """Compare the folder with the signed files: no file more or less, and the same bytes."""
    signed_files = {f"targets/{path}": signed for path, signed in metadata.targets.items()}
    for name in entries:
        # An extra file could pass for a signed one with people and programs that only look at the folder.
        if not name.startswith("metadata/") and name not in signed_files:
            raise UnlistedFileError(
                name,
                expected="only signed files",
                got="a file that no role lists",
            )
    # A silo has one role, of one plan, so no two plans' files have the same name here.
    path_in_plan = {name: name.split("/", 2)[2] for name in signed_files}
    for name in signed_files:
        if name not in entries and not later.allows_absence(path_in_plan[name]):
            raise AbsentFileError(name, expected="a signed file", got="no such file")

    verified: dict[str, VerifiedFile] = {}
    for name, signed in signed_files.items():
        path = path_in_plan[name]
        is_postponed = later.selects(path)
        if not is_postponed:
            check_digest(folder, name, signed.bytes, signed.digest)
        elif name in entries and entries[name].bytes != signed.bytes:
            # The length at least, so that a truncated file is found now.
            raise DigestError(
                name,
                expected=f"{signed.bytes} bytes",
                got=f"{entries[name].bytes} bytes",
            )
        verified[path] = VerifiedFile(
            folder / name,
            signed.bytes,
            signed.digest,
            signed.role,
            digest_checked=not is_postponed,
        )
    return verified
