"""The rules of verification: decides whether metadata can be trusted, as pure functions without disk, clock or network.

`verify_metadata` follows the detailed client workflow of the TUF specification (1.0.31, section 5), as far as it is
about metadata; each step below cites its paragraph. Signatures are verified by python-tuf. Its `Updater` downloads the
metadata of a release on a host (`ddm.trust.updater`) and decides nothing alone, because it reads the clock itself and
is less strict; a test checks that it accepts what is accepted here.

The rules, in the order in which they are checked, are
 * The first root is the pinned one, byte for byte (5.2). Each later root has the next version and is signed by the
   threshold of the root before and by its own (5.3.4, 5.3.5). A root that this reader has seen before is not replaced
   by another one. The newest root is not expired (5.3.10).
 * The timestamp is signed by a key that the root names (5.4.2), and states the digest and version of the snapshot that
   is current (5.5.2, 5.5.4). The snapshot states those of targets and of each role below it (5.6.2, 5.6.4), so that
   files of different times cannot be mixed (mix-and-match attack).
 * Nothing is expired (freeze attack; 5.4.4, 5.5.6, 5.6.5). Only for an archived release is an expired timestamp
   accepted.
 * All metadata files were used: there are no others, and no root is missing.

The rules that are stricter than TUF are
 * Every file is canonical and every signature in it verifies (`ddm.trust.metadata`).
 * Targets lists no file. It delegates exactly `plans`, `release` and one role for each silo, of the plan or of the
   earlier plan from which the silo's experts are carried, each with threshold 1 and its own paths.
 * Only its owner lists a path (`ddm.trust.paths`), so that no role can sign for a silo.
 * No two silos share a key, and no silo shares one with `plans` or `release`.
 * What a silo signed names the pinned root. The federation's own roles do not: they stand for nothing but the root, and
   a release without a silo is none.

The versions are compared with those seen before by `ddm.trust.version_store`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from tuf.api.metadata import DelegatedRole, MetaFile, Root, Snapshot, Targets, Timestamp

from ddm.errors import (
    AbsentFileError,
    DigestError,
    FormatError,
    RoleError,
    RollbackError,
    RootError,
    UnlistedFileError,
)
from ddm.io.paths import check_path
from ddm.trust.drafts import delegated_roles, log_key_of
from ddm.trust.metadata import check_expiry, check_signatures, parse_metadata, public_key
from ddm.trust.paths import PLANS, RELEASE, delegated_paths, is_plan_id, owner, split_silo_role
from ddm.trust.silo_role import check_role_federation

# The specification asks for a bound (5.3.3): a chain without end would keep a reader busy for ever.
MAX_ROOT_ROTATIONS = 256


class FolderKind(Enum):
    """What a folder of signed files holds, and so which metadata must be present."""

    BUNDLE = "bundle"
    RELEASE = "release"


@dataclass(frozen=True)
class SignedFile:
    """The signed description of one file: its length in bytes, its sha256, and the role that signed it."""

    bytes: int
    digest: str
    role: str


@dataclass(frozen=True)
class VerifiedMetadata:
    """The content of verified metadata.

    Attributes:
        root_fingerprint: sha256 of 1.root.json.
        plan_id: its plan.
        targets: path relative to ``targets/`` to the signed description of the file.
        silo_keys: silo id to the fingerprint of the key that signed for it; in a bundle, of the key that will have to.
        origins: silo id to the plan for which it signed, for the same silos: this one, or an earlier one.
        removed: roles that the snapshot lists as removed, with the first version that would not be outdated.
        versions: role to version.
        digests: role to the sha256 of its metadata file.
        keys: role to the ids of the keys that hold it, by the newest root or by targets.
        roots: root version to its bytes, the pinned one included.
        expires: when the timestamp expires.
        expired: whether it has, which only `archived` accepts.
        log_keys: verifier keys of the federation's log, as the roots name them, the newest last.
    """

    root_fingerprint: str
    plan_id: str
    targets: Mapping[str, SignedFile]
    silo_keys: Mapping[str, str]
    origins: Mapping[str, str]
    removed: Mapping[str, int]
    versions: Mapping[str, int]
    digests: Mapping[str, str]
    keys: Mapping[str, tuple[str, ...]]
    roots: Mapping[int, bytes]
    expires: datetime
    expired: bool
    log_keys: tuple[str, ...] = ()


def verify_metadata(
    files: Mapping[str, bytes],
    pinned: bytes,
    *,
    kind: FolderKind,
    now: datetime,
    archived: bool = False,
    known_roots: Mapping[int, bytes] | None = None,
) -> VerifiedMetadata:
    """Verify metadata, and return its content.

    Args:
        files: file name in ``metadata/`` to its bytes.
        pinned: the content of 1.root.json, known out of band.
        kind: a plan's bundle or a whole release.
        now: the time at which it must be valid.
        archived: accept an expired timestamp, and only that.
        known_roots: later roots seen before under the same pinned one; a key revoked there stays revoked here.

    Raises:
        TrustError: a check failed; the subject names the file.
        FormatError: a file does not parse.
    """
    # Each file is checked with what the files before it say, so that none of them decides about its own signer.
    root, roots = _verify_root_chain(files, pinned, known_roots or {})
    check_expiry(root, now, f"metadata/{root.version}.root.json")
    timestamp = _verify_timestamp(files, root)
    snapshot = _verify_snapshot(files, root, timestamp)
    targets = _verify_targets(files, root, snapshot)
    plan_id = _check_delegations(targets)
    root_digest = _sha256(pinned)
    delegated = {
        role: _verify_delegated_role(files, role, targets, snapshot, root_digest)
        for role in _roles_to_verify(targets, snapshot, kind)
    }

    # All of them at one time, the caller's: a clock that moves during verification decides nothing.
    signed = {"timestamp": timestamp, "snapshot": snapshot, "targets": targets, **delegated}
    for role, content in signed.items():
        # A freeze attack shows an old state for ever; an archived release is one whose reader knows that it is old.
        if not (archived and role == "timestamp"):
            check_expiry(content, now, f"metadata/{role}.json")

    listing = _merge_listings(delegated, plan_id, kind)
    roots_in_folder = _check_file_names(files, {f"{role}.json" for role in signed}, roots)
    newest_root = max(roots_in_folder)

    # A bundle comes before the submissions: the silos that will have to sign are those that targets names.
    silo_roles = _silo_roles(delegated)
    if kind is FolderKind.BUNDLE:
        silo_roles = _silo_roles(delegated_roles(targets))

    versions = {"root": newest_root}
    digests = {"root": _sha256(roots_in_folder[newest_root])}
    keys = {}
    for role, content in signed.items():
        versions[role] = content.version
        digests[role] = _sha256(files[f"{role}.json"])
        keys[role] = _key_ids(role, root, targets)
    return VerifiedMetadata(
        root_fingerprint=root_digest,
        plan_id=plan_id,
        targets=listing,
        silo_keys={
            silo_id: _key_fingerprint(targets, role) for role, (_, silo_id) in silo_roles.items()
        },
        origins={silo_id: origin for origin, silo_id in silo_roles.values()},
        removed={
            name.removesuffix(".json"): entry.version
            for name, entry in snapshot.meta.items()
            if _is_removed(entry)
        },
        versions=versions,
        digests=digests,
        keys=keys,
        roots=roots,
        expires=timestamp.expires,
        expired=timestamp.is_expired(now),
        log_keys=_log_keys(roots),
    )


def trusted_log_keys(
    files: Mapping[str, bytes],
    pinned: bytes,
    known_roots: Mapping[int, bytes],
) -> tuple[str, ...]:
    """Follow the roots from the pinned one, and return the verifier keys that they name for the log, the newest last.

    Args:
        files: file name to bytes, with every root there is.
        pinned: the content of 1.root.json, known out of band.
        known_roots: later roots seen before.

    Raises:
        TrustError: a root is not signed by the holders before it, or is not the one seen before.
        FormatError: a root does not parse.
    """
    _, roots = _verify_root_chain(files, pinned, known_roots)
    return _log_keys(roots)


def _log_keys(roots: Mapping[int, bytes]) -> tuple[str, ...]:
    """Return the log keys of verified roots; once a root names a log, later ones must name the same log."""
    keys: list[str] = []
    for version in sorted(roots):
        subject = f"metadata/{version}.root.json"
        key = log_key_of(parse_metadata(roots[version], Root, subject).signed)
        # The attack: holders of root start a second log with another history, and readers compare with that one only.
        if keys and _log_name(key) != _log_name(keys[-1]):
            raise RoleError(
                subject,
                expected=f"a key of the log {_log_name(keys[-1])}, as in the root before",
                got="a key of another log" if key else "no log key",
            )
        if key and key not in keys:
            keys.append(key)
    return tuple(keys)


def _log_name(verifier_key: str | None) -> str:
    """Return the name in a verifier key, ``name+hash+base64``."""
    return (verifier_key or "").partition("+")[0]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _metadata_file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise AbsentFileError(f"metadata/{name}", expected="a metadata file", got="no such file")
    return files[name]


def _verify_root_chain(
    files: Mapping[str, bytes],
    pinned: bytes,
    known_roots: Mapping[int, bytes],
) -> tuple[Root, Mapping[int, bytes]]:
    """Follow the roots from the pinned one (5.3); return the newest one, and the bytes of each."""
    root = _verify_pinned_root(files, pinned)
    roots = {1: pinned}
    for version in range(2, MAX_ROOT_ROTATIONS + 2):
        name = f"{version}.root.json"
        known = known_roots.get(version)
        # A root that was seen before counts also where the folder hides it, or a revoked key would be valid again.
        data = files.get(name, known)
        if data is None:
            break
        if known is not None and data != known:
            # Two roots of one version, both signed: one of them is meant for some readers only.
            raise RollbackError(
                f"metadata/{name}",
                expected=f"root {version} as seen before, sha256 {_sha256(known)[:16]}...",
                got=f"sha256 {_sha256(data)[:16]}...",
            )
        root = _verify_next_root(data, root, version)
        roots[version] = data
    return root, roots


def _verify_pinned_root(files: Mapping[str, bytes], pinned: bytes) -> Root:
    """Check that the folder belongs to the pinned root, which is the only source of trust (5.2)."""
    subject = "metadata/1.root.json"
    data = _metadata_file(files, "1.root.json")
    if data != pinned:
        raise RootError(
            subject,
            expected=f"the pinned root, sha256 {_sha256(pinned)[:16]}...",
            got=f"sha256 {_sha256(data)[:16]}...",
        )
    try:
        metadata = parse_metadata(pinned, Root, subject)
    except FormatError as error:
        raise RootError("the pinned root", expected="a 1.root.json", got=str(error)) from error
    if metadata.signed.version != 1:
        raise RootError(subject, expected="version 1", got=f"version {metadata.signed.version}")
    check_signatures(metadata, "root", [metadata.signed], subject)
    return metadata.signed


def _verify_next_root(data: bytes, root: Root, version: int) -> Root:
    """Check a root after `root`, which must be signed by the holders of both (5.3.4) and have this version (5.3.5)."""
    subject = f"metadata/{version}.root.json"
    metadata = parse_metadata(data, Root, subject)
    check_signatures(metadata, "root", [root, metadata.signed], subject)
    if metadata.signed.version != version:
        # An arbitrary version would let a root be skipped, and with it a revocation.
        raise RollbackError(
            subject,
            expected=f"version {version}",
            got=f"version {metadata.signed.version}",
        )
    return metadata.signed


def _verify_timestamp(files: Mapping[str, bytes], root: Root) -> Timestamp:
    subject = "metadata/timestamp.json"
    metadata = parse_metadata(_metadata_file(files, "timestamp.json"), Timestamp, subject)
    check_signatures(metadata, "timestamp", [root], subject)
    return metadata.signed


def _verify_snapshot(files: Mapping[str, bytes], root: Root, timestamp: Timestamp) -> Snapshot:
    subject = "metadata/snapshot.json"
    data = _metadata_file(files, "snapshot.json")
    # The digest first (5.5.2): unknown bytes are not parsed.
    _check_listed_digest(data, timestamp.snapshot_meta, subject)
    metadata = parse_metadata(data, Snapshot, subject)
    check_signatures(metadata, "snapshot", [root], subject)
    _check_listed_version(metadata.signed.version, timestamp.snapshot_meta, subject)
    return metadata.signed


def _verify_targets(files: Mapping[str, bytes], root: Root, snapshot: Snapshot) -> Targets:
    """Check the top-level targets, whose holders decide who signs what, and sign no file themselves."""
    targets = _verify_targets_role(files, "targets", root, snapshot)
    if targets.targets:
        raise RoleError(
            "metadata/targets.json",
            expected="delegations only",
            got=f"{len(targets.targets)} files",
        )
    return targets


def _verify_targets_role(
    files: Mapping[str, bytes],
    role: str,
    delegator: Root | Targets,
    snapshot: Snapshot,
) -> Targets:
    """Check the metadata of `targets` or of a role below it, as the snapshot lists it (5.6.2 to 5.6.4)."""
    subject = f"metadata/{role}.json"
    entry = snapshot.meta.get(f"{role}.json")
    if entry is None or _is_removed(entry):
        raise AbsentFileError(
            "metadata/snapshot.json",
            expected=f"an entry for role {role}",
            got="no entry" if entry is None else "an entry of a removed role",
        )
    data = _metadata_file(files, f"{role}.json")
    _check_listed_digest(data, entry, subject)
    metadata = parse_metadata(data, Targets, subject)
    check_signatures(metadata, role, [delegator], subject)
    _check_listed_version(metadata.signed.version, entry, subject)
    if role != "targets" and metadata.signed.delegations is not None:
        # A silo or `release` that delegated could let a key sign that nobody enrolled.
        num_roles = len(metadata.signed.delegations.roles or {})
        raise RoleError(
            subject,
            expected="no further delegations",
            got=f"delegations to {num_roles} roles",
        )
    return metadata.signed


def _verify_delegated_role(
    files: Mapping[str, bytes],
    role: str,
    targets: Targets,
    snapshot: Snapshot,
    root_digest: str,
) -> Targets:
    """Check the metadata of a role below `targets`, and that a silo signed for this federation."""
    signed = _verify_targets_role(files, role, targets, snapshot)
    # The attack: a root of a stranger's delegates to the true keys of the silos of a public release, and what these
    # silos signed for their own federation verifies under it.
    if split_silo_role(role) is not None:
        check_role_federation(signed, root_digest, f"metadata/{role}.json")
    return signed


def _is_removed(entry: MetaFile) -> bool:
    """Whether a snapshot's entry says that the role was removed: it has a version but no digest."""
    return entry.hashes is None


def _check_listed_digest(data: bytes, entry: MetaFile, subject: str) -> None:
    """Refuse bytes that are not those that the file above lists: mix-and-match, or a change on the way."""
    listed_digest = (entry.hashes or {}).get("sha256", "")
    digest = _sha256(data)
    if len(data) != entry.length or digest != listed_digest:
        raise DigestError(
            subject,
            expected=f"{entry.length} bytes, sha256 {listed_digest[:16]}...",
            got=f"{len(data)} bytes, sha256 {digest[:16]}...",
        )


def _check_listed_version(version: int, entry: MetaFile, subject: str) -> None:
    if version != entry.version:
        raise RollbackError(subject, expected=f"version {entry.version}", got=f"version {version}")


def _check_delegations(targets: Targets) -> str:
    """Require the delegations of one plan, exactly as the repository writes them; return the plan's id.

    The paths of `plans` name the plan. A role of another plan is that of a silo whose experts are carried over.
    """
    roles = delegated_roles(targets)
    plan_id = _check_role_names(roles)
    for role in roles.values():
        _check_delegation(role, plan_id)
    _check_keys_differ(roles)
    return plan_id


def _check_role_names(roles: Mapping[str, DelegatedRole]) -> str:
    """Require `plans`, `release` and one role for each of one or more silos; return the plan's id."""
    subject = "metadata/targets.json"
    silo_roles = [split_silo_role(name) for name in roles if name not in (PLANS, RELEASE)]
    silo_ids = [silo_role[1] for silo_role in silo_roles if silo_role is not None]
    plan_id = ""
    plan_paths = roles[PLANS].paths if PLANS in roles else None
    if plan_paths:
        plan_id = plan_paths[0].split("/")[0]
    if None in silo_roles or not silo_ids or not is_plan_id(plan_id) or RELEASE not in roles:
        raise RoleError(
            subject,
            expected="delegations to plans, release and the silos of one plan",
            got=", ".join(sorted(roles))[:200] or "no delegations",
        )
    if len(set(silo_ids)) != len(silo_ids):
        # A silo with a role of this plan and one of an earlier plan would be counted with two experts.
        raise RoleError(
            subject,
            expected="one role for each silo",
            got=f"{len(silo_ids)} roles of {len(set(silo_ids))} silos",
        )
    return plan_id


def _check_delegation(role: DelegatedRole, plan_id: str) -> None:
    """Require that a role may sign its own paths and no others, alone."""
    subject = "metadata/targets.json"
    paths = delegated_paths(_plan_of(role.name, plan_id), role.name)
    if role != DelegatedRole(role.name, role.keyids, 1, True, paths):
        raise RoleError(
            subject,
            expected=f"role {role.name} terminating, with threshold 1 and exactly its own paths",
            got=f"threshold {role.threshold} and paths {ascii(role.paths or [])[:200]}",
        )
    if role.name not in (PLANS, RELEASE) and len(role.keyids) != 1:
        # With a second key somebody else could sign for the silo, with threshold 1 as well as the silo itself.
        raise RoleError(
            subject,
            expected=f"one key for role {role.name}",
            got=f"{len(role.keyids)} keys",
        )


def _check_keys_differ(roles: Mapping[str, DelegatedRole]) -> None:
    """Refuse one key for two silos, or for a silo and the federation; `plans` and `release` may share theirs."""
    role_of_key: dict[str, str] = {}
    for role in roles.values():
        for keyid in role.keyids:
            other = role_of_key.setdefault(keyid, role.name)
            if other != role.name and {role.name, other} != {PLANS, RELEASE}:
                # The aggregator would sign as a silo that has no key of its own.
                raise RoleError(
                    "metadata/targets.json",
                    expected="a different key for each silo",
                    got=f"one key for {other} and {role.name}",
                )


def _plan_of(role: str, plan_id: str) -> str:
    """Return the plan whose files a role lists: for a silo's role the one in its name."""
    silo_role = split_silo_role(role)
    if silo_role is None:
        return plan_id
    return silo_role[0]


def _roles_to_verify(targets: Targets, snapshot: Snapshot, kind: FolderKind) -> list[str]:
    """Return the roles that the snapshot lists as present: silos may be missing, but no other roles added."""
    delegated = delegated_roles(targets)
    present = {name for name, entry in snapshot.meta.items() if not _is_removed(entry)}
    unknown = present - {"targets.json", *(f"{role}.json" for role in delegated)}
    if unknown:
        raise RoleError(
            "metadata/snapshot.json",
            expected="roles that targets delegates to",
            got=f"role {sorted(unknown)[0]} as well",
        )
    if kind is FolderKind.BUNDLE:
        return [PLANS]
    silo_roles = [
        role for role in delegated if role not in (PLANS, RELEASE) and f"{role}.json" in present
    ]
    return [PLANS, RELEASE, *silo_roles]


def _merge_listings(
    delegated: Mapping[str, Targets],
    plan_id: str,
    kind: FolderKind,
) -> Mapping[str, SignedFile]:
    """Merge the files that the roles list, each path from its owner only; require the documents of each role."""
    listing: dict[str, SignedFile] = {}
    for role, content in delegated.items():
        for path, file in content.targets.items():
            # Before the path is used anywhere: it must not lead out of the folder.
            check_path(path, f"metadata/{role}.json")
            # TUF lets any delegation with a matching pattern list a path; here a path has one owner.
            path_owner = owner(path, _plan_of(role, plan_id))
            if path_owner != role:
                raise RoleError(
                    f"targets/{path}",
                    expected=f"a file that only role {path_owner or '(none)'} lists",
                    got=f"listed by role {role}",
                )
            listing[path] = SignedFile(file.length, file.hashes["sha256"], role)

    # A silo's role that lists nothing would count as a silo that took part.
    required = [f"{plan_id}/plan.json"]
    if kind is FolderKind.RELEASE:
        required.append(f"{plan_id}/manifest.json")
        for origin, silo_id in _silo_roles(delegated).values():
            required.append(f"{origin}/silos/{silo_id}/submission.json")
    for path in required:
        if path not in listing:
            raise AbsentFileError(
                f"targets/{path}",
                expected=f"listed by role {owner(path, path.split('/')[0])}",
                got="not listed",
            )
    return listing


def _check_file_names(
    files: Mapping[str, bytes],
    used_names: set[str],
    roots: Mapping[int, bytes],
) -> Mapping[int, bytes]:
    """Require that every metadata file in the folder was used; return the roots among them."""
    root_names = {f"{version}.root.json" for version in roots}
    unused = sorted(set(files) - used_names - root_names)
    if unused:
        next_root = f"{len(roots) + 1}.root.json"
        if unused[0].endswith(".root.json") and next_root not in files:
            # A later root is there and its predecessor is not: name the missing file, not the one that is too many.
            _metadata_file(files, next_root)
        raise UnlistedFileError(
            f"metadata/{unused[0]}",
            expected="only listed metadata files",
            got=f"{len(unused)} unlisted",
        )
    in_folder = {
        version: data for version, data in roots.items() if f"{version}.root.json" in files
    }
    for version in range(1, max(in_folder)):
        _metadata_file(files, f"{version}.root.json")
    return in_folder


def _key_ids(role: str, root: Root, targets: Targets) -> tuple[str, ...]:
    delegator: Root | Targets = targets
    if role in root.roles:
        delegator = root
    return tuple(sorted(delegator.get_delegated_role(role).keyids))


def _silo_roles(roles: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the roles of silos among these, each with its plan and its silo."""
    silo_roles = {}
    for role in roles:
        parts = split_silo_role(role)
        if parts is not None:
            silo_roles[role] = parts
    return silo_roles


def _key_fingerprint(targets: Targets, role: str) -> str:
    """Return the fingerprint of a silo's key, as targets enrolled it."""
    keyid = targets.get_delegated_role(role).keyids[0]
    return public_key(targets.get_key(keyid)).fingerprint
