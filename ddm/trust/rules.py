"""The rules of verification: decides whether metadata can be trusted, as pure functions without disk, clock or network.

The order is TUF's (specification 1.0.31, section 5): pinned root, root rotations, timestamp, snapshot, targets,
delegated roles; signatures by python-tuf. Its `Updater` is not used because it reads the clock itself, cannot read an
archived release, and writes what it fetches; a test checks that it accepts what is accepted here. Stricter than TUF:

 * every file is canonical and every signature in it verifies (`ddm.trust.metadata`);
 * targets delegates exactly `plans`, `release` and one role for each silo, of the plan or of the earlier plan from
   which the silo's experts are carried, and lists nothing itself;
 * only its owner lists a path (`ddm.trust.paths`), so no role can sign for a silo;
 * no two silos share a key, or share one with `plans` or `release`;
 * there are no metadata files besides those that are used.
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
from ddm.trust.drafts import log_key_of
from ddm.trust.metadata import check_expiry, check_signatures, parse_metadata, public_key
from ddm.trust.paths import PLANS, RELEASE, delegated_paths, is_plan_id, owner, split_silo_role

MAX_ROOT_ROTATIONS = 256


class Stage(Enum):
    """The part of a federation's metadata that must be present."""

    BUNDLE = "bundle"
    RELEASE = "release"


@dataclass(frozen=True)
class Target:
    """The signed description of one file: its length in bytes, its sha256, and the role that signed it."""

    bytes: int
    digest: str
    role: str


@dataclass(frozen=True)
class Resolved:
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
    targets: Mapping[str, Target]
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


def resolve(
    view: Mapping[str, bytes],
    pinned: bytes,
    *,
    stage: Stage,
    now: datetime,
    archived: bool = False,
    remembered: Mapping[int, bytes] | None = None,
) -> Resolved:
    """Verify metadata, and return its content.

    Args:
        view: file name in ``metadata/`` to its bytes.
        pinned: the content of 1.root.json, known out of band.
        stage: a plan's bundle or a whole release.
        now: the time at which it must be valid.
        archived: accept an expired timestamp, and only that.
        remembered: later roots seen before under the same pinned one; a key revoked there stays revoked here.

    Raises:
        TrustError: a check failed; the subject names the file.
        FormatError: a file does not parse.
    """
    root, roots = _root_chain(view, pinned, remembered or {})
    check_expiry(root, now, f"metadata/{root.version}.root.json")
    timestamp = _timestamp(view, root)
    snapshot = _snapshot(view, root, timestamp)
    targets = _targets(view, root, snapshot)
    plan_id = _check_delegations(targets)
    roles = _roles_present(targets, snapshot, stage)
    loaded = {role: _listed(view, role, targets, snapshot) for role in roles}
    signed = {"timestamp": timestamp, "snapshot": snapshot, "targets": targets, **loaded}
    for role, content in signed.items():
        if not (archived and role == "timestamp"):
            check_expiry(content, now, f"metadata/{role}.json")
    listing = _listing(loaded, plan_id, stage)
    silo_roles = list(
        filter(split_silo_role, _delegated(targets) if stage is Stage.BUNDLE else loaded)
    )
    in_folder = _check_names(view, {f"{role}.json" for role in signed}, roots)
    return Resolved(
        root_fingerprint=hashlib.sha256(pinned).hexdigest(),
        plan_id=plan_id,
        targets=listing,
        silo_keys=_silo_keys(targets, silo_roles),
        origins={
            silo_id: origin for origin, silo_id in filter(None, map(split_silo_role, silo_roles))
        },
        removed={
            name.removesuffix(".json"): meta.version
            for name, meta in snapshot.meta.items()
            if meta.hashes is None
        },
        versions={
            "root": max(in_folder),
            **{role: content.version for role, content in signed.items()},
        },
        digests={
            "root": _sha256(in_folder[max(in_folder)]),
            **{role: _sha256(view[f"{role}.json"]) for role in signed},
        },
        keys={role: _keys_of(role, root, targets) for role in signed},
        roots=roots,
        expires=timestamp.expires,
        expired=timestamp.is_expired(now),
        log_keys=_log_keys(roots),
    )


def trusted_log_keys(
    view: Mapping[str, bytes], pinned: bytes, remembered: Mapping[int, bytes]
) -> tuple[str, ...]:
    """Follow the roots from the pinned one, and return the verifier keys that they name for the log, the newest last.

    Args:
        view: file name to bytes, with every root there is.
        pinned: the content of 1.root.json, known out of band.
        remembered: later roots seen before.

    Raises:
        TrustError: a root is not signed by the holders before it, or is not the one seen before.
        FormatError: a root does not parse.
    """
    return _log_keys(_root_chain(view, pinned, remembered)[1])


def _log_keys(roots: Mapping[int, bytes]) -> tuple[str, ...]:
    """Return the log keys of verified roots; once a root names a log, later ones must name the same log."""
    found: list[str] = []
    for version in sorted(roots):
        subject = f"metadata/{version}.root.json"
        key = log_key_of(parse_metadata(roots[version], Root, subject).signed)
        if found and (key or "").partition("+")[0] != found[-1].partition("+")[0]:
            expected = f"a key of the log {found[-1].partition('+')[0]}, as in the root before"
            raise RoleError(
                subject, expected=expected, got="a key of another log" if key else "no log key"
            )
        found += [key] if key else []
    return tuple(dict.fromkeys(found))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file(view: Mapping[str, bytes], name: str) -> bytes:
    if name not in view:
        raise AbsentFileError(f"metadata/{name}", expected="a metadata file", got="no such file")
    return view[name]


def _root_chain(
    view: Mapping[str, bytes], pinned: bytes, remembered: Mapping[int, bytes]
) -> tuple[Root, Mapping[int, bytes]]:
    """Follow the roots from the pinned one, each signed by the one before and by itself."""
    first = "metadata/1.root.json"
    if (data := _file(view, "1.root.json")) != pinned:
        expected = f"the pinned root, sha256 {_sha256(pinned)[:16]}..."
        raise RootError(first, expected=expected, got=f"sha256 {_sha256(data)[:16]}...")
    try:
        metadata = parse_metadata(pinned, Root, first)
    except FormatError as error:
        raise RootError("the pinned root", expected="a 1.root.json", got=str(error)) from error
    root, roots = metadata.signed, {1: pinned}
    if root.version != 1:
        raise RootError(first, expected="version 1", got=f"version {root.version}")
    check_signatures(metadata, "root", [root], first)
    for version in range(2, MAX_ROOT_ROTATIONS + 2):
        name = f"{version}.root.json"
        found = view.get(name, remembered.get(version))
        if found is None:
            break
        if remembered.get(version, found) != found:
            expected = (
                f"root {version} as seen before, sha256 {_sha256(remembered[version])[:16]}..."
            )
            raise RollbackError(
                f"metadata/{name}", expected=expected, got=f"sha256 {_sha256(found)[:16]}..."
            )
        metadata = parse_metadata(found, Root, f"metadata/{name}")
        check_signatures(metadata, "root", [root, metadata.signed], f"metadata/{name}")
        if metadata.signed.version != version:
            got = f"version {metadata.signed.version}"
            raise RollbackError(f"metadata/{name}", expected=f"version {version}", got=got)
        root, roots = metadata.signed, {**roots, version: found}
    return root, roots


def _timestamp(view: Mapping[str, bytes], root: Root) -> Timestamp:
    subject = "metadata/timestamp.json"
    metadata = parse_metadata(_file(view, "timestamp.json"), Timestamp, subject)
    check_signatures(metadata, "timestamp", [root], subject)
    return metadata.signed


def _snapshot(view: Mapping[str, bytes], root: Root, timestamp: Timestamp) -> Snapshot:
    subject = "metadata/snapshot.json"
    data = _file(view, "snapshot.json")
    _check_listed(data, timestamp.snapshot_meta, subject)
    metadata = parse_metadata(data, Snapshot, subject)
    check_signatures(metadata, "snapshot", [root], subject)
    _check_version(metadata.signed.version, timestamp.snapshot_meta, subject)
    return metadata.signed


def _targets(view: Mapping[str, bytes], root: Root, snapshot: Snapshot) -> Targets:
    targets = _listed(view, "targets", root, snapshot)
    if targets.targets:
        raise RoleError(
            "metadata/targets.json",
            expected="delegations only",
            got=f"{len(targets.targets)} files",
        )
    return targets


def _listed(
    view: Mapping[str, bytes], role: str, delegator: Root | Targets, snapshot: Snapshot
) -> Targets:
    """Load the metadata of one targets role as the snapshot lists it."""
    subject = f"metadata/{role}.json"
    meta = snapshot.meta.get(f"{role}.json")
    if meta is None or meta.hashes is None:
        got = "no entry" if meta is None else "an entry of a removed role"
        raise AbsentFileError(
            "metadata/snapshot.json", expected=f"an entry for role {role}", got=got
        )
    data = _file(view, f"{role}.json")
    _check_listed(data, meta, subject)
    metadata = parse_metadata(data, Targets, subject)
    check_signatures(metadata, role, [delegator], subject)
    _check_version(metadata.signed.version, meta, subject)
    if role != "targets" and metadata.signed.delegations is not None:
        num = len(metadata.signed.delegations.roles or {})
        raise RoleError(
            subject, expected="no further delegations", got=f"delegations to {num} roles"
        )
    return metadata.signed


def _check_listed(data: bytes, meta: MetaFile, subject: str) -> None:
    digest = (meta.hashes or {}).get("sha256", "")
    if len(data) != meta.length or _sha256(data) != digest:
        expected = f"{meta.length} bytes, sha256 {digest[:16]}..."
        raise DigestError(
            subject, expected=expected, got=f"{len(data)} bytes, sha256 {_sha256(data)[:16]}..."
        )


def _check_version(version: int, meta: MetaFile, subject: str) -> None:
    if version != meta.version:
        raise RollbackError(subject, expected=f"version {meta.version}", got=f"version {version}")


def _delegated(targets: Targets) -> Mapping[str, DelegatedRole]:
    return (targets.delegations.roles if targets.delegations else None) or {}


def _check_delegations(targets: Targets) -> str:
    """Require the delegations of one plan, exactly as the repository writes them; return the plan's id.

    The paths of `plans` name the plan. A role of another plan is that of a silo whose experts are carried over.
    """
    subject = "metadata/targets.json"
    roles = _delegated(targets)
    names = [split_silo_role(role) for role in roles if role not in (PLANS, RELEASE)]
    silos = [name[1] for name in names if name]
    listed = (roles[PLANS].paths if PLANS in roles else None) or [""]
    plan_id = listed[0].split("/")[0]
    if None in names or not silos or not is_plan_id(plan_id) or RELEASE not in roles:
        got = ", ".join(sorted(roles))[:200] or "no delegations"
        raise RoleError(
            subject, expected="delegations to plans, release and the silos of one plan", got=got
        )
    if len(set(silos)) != len(silos):
        got = f"{len(silos)} roles of {len(set(silos))} silos"
        raise RoleError(subject, expected="one role for each silo", got=got)
    users: dict[str, str] = {}
    for role in roles.values():
        paths = delegated_paths(_plan_of(role.name, plan_id), role.name)
        if role != DelegatedRole(role.name, role.keyids, 1, True, paths):
            got = f"threshold {role.threshold} and paths {ascii(role.paths or [])[:200]}"
            expected = f"role {role.name} terminating, with threshold 1 and exactly its own paths"
            raise RoleError(subject, expected=expected, got=got)
        if role.name not in (PLANS, RELEASE) and len(role.keyids) != 1:
            raise RoleError(
                subject, expected=f"one key for role {role.name}", got=f"{len(role.keyids)} keys"
            )
        for keyid in role.keyids:
            other = users.setdefault(keyid, role.name)
            if other != role.name and {role.name, other} != {PLANS, RELEASE}:
                got = f"one key for {other} and {role.name}"
                raise RoleError(subject, expected="a different key for each silo", got=got)
    return plan_id


def _plan_of(role: str, plan_id: str) -> str:
    """Return the plan whose files a role lists: for a silo's role the one in its name."""
    name = split_silo_role(role)
    return name[0] if name else plan_id


def _roles_present(targets: Targets, snapshot: Snapshot, stage: Stage) -> list[str]:
    """Return the roles to load: those that the snapshot lists as present; silos may be missing, but no others added."""
    roles = list(_delegated(targets))
    live = {name for name, meta in snapshot.meta.items() if meta.hashes is not None}
    strange = live - {"targets.json", *(f"{role}.json" for role in roles)}
    if strange:
        raise RoleError(
            "metadata/snapshot.json",
            expected="roles that targets delegates to",
            got=f"role {sorted(strange)[0]} as well",
        )
    if stage is Stage.BUNDLE:
        return [PLANS]
    return [PLANS, RELEASE] + [
        r for r in roles if r not in (PLANS, RELEASE) and f"{r}.json" in live
    ]


def _listing(loaded: Mapping[str, Targets], plan_id: str, stage: Stage) -> Mapping[str, Target]:
    """Merge the files that the roles list, each path from its owner only."""
    listing: dict[str, Target] = {}
    for role, content in loaded.items():
        for path, file in content.targets.items():
            check_path(path, f"metadata/{role}.json")
            if (found := owner(path, _plan_of(role, plan_id))) != role:
                expected = f"a file that only role {found or '(none)'} lists"
                raise RoleError(f"targets/{path}", expected=expected, got=f"listed by role {role}")
            listing[path] = Target(file.length, file.hashes["sha256"], role)
    required = [f"{plan_id}/plan.json"]
    if stage is Stage.RELEASE:
        silos = [name for name in map(split_silo_role, loaded) if name]
        required += [
            f"{plan_id}/manifest.json",
            *(f"{plan}/silos/{silo}/submission.json" for plan, silo in silos),
        ]
    for path in required:
        if path not in listing:
            expected = f"listed by role {owner(path, path.split('/')[0])}"
            raise AbsentFileError(f"targets/{path}", expected=expected, got="not listed")
    return listing


def _check_names(
    view: Mapping[str, bytes], names: set[str], roots: Mapping[int, bytes]
) -> Mapping[int, bytes]:
    """Require that every metadata file in the folder was used; return the roots among them."""
    unlisted = sorted(set(view) - names - {f"{version}.root.json" for version in roots})
    if (
        unlisted
        and unlisted[0].endswith(".root.json")
        and f"{len(roots) + 1}.root.json" not in view
    ):
        _file(view, f"{len(roots) + 1}.root.json")
    if unlisted:
        got = f"{len(unlisted)} unlisted"
        raise UnlistedFileError(
            f"metadata/{unlisted[0]}", expected="only listed metadata files", got=got
        )
    in_folder = {version: data for version, data in roots.items() if f"{version}.root.json" in view}
    for version in range(1, max(in_folder)):
        _file(view, f"{version}.root.json")
    return in_folder


def _keys_of(role: str, root: Root, targets: Targets) -> tuple[str, ...]:
    delegator = root if role in root.roles else targets
    return tuple(sorted(delegator.get_delegated_role(role).keyids))


def _silo_keys(targets: Targets, roles: Iterable[str]) -> Mapping[str, str]:
    """Return the fingerprints of the silos' keys, as targets enrolled them, for the silos among these roles."""
    found = {}
    for role in roles:
        name = split_silo_role(role)
        if name:
            keyid = targets.get_delegated_role(role).keyids[0]
            found[name[1]] = public_key(targets.get_key(keyid)).fingerprint
    return found
