"""A silo's signature over its submission: its own TUF role, checked before any other part is parsed.

The role's name contains plan and silo, and the paths that it may list begin with both. A submission can therefore
neither be sent again for another plan, nor sent in another silo's name. The role also names the federation: its silo
signs for this one, regardless of who delegates to its key.
"""

from collections.abc import Mapping
from datetime import datetime

from tuf.api.metadata import DelegatedRole, Delegations, Key, TargetFile, Targets

from ddm.errors import DocumentError, ReplayError, RoleError
from ddm.io.paths import check_path
from ddm.protocol.federation import check_federation
from ddm.trust.keys import PublicKey, SigningKey
from ddm.trust.metadata import (
    METADATA_LIFE,
    check_expiry,
    check_signatures,
    expiry,
    parse_metadata,
    sign_metadata,
)
from ddm.trust.paths import delegated_paths, is_plan_id, is_silo_id, owner, silo_role

MAX_SILO_METADATA_BYTES = 256 * 1024
# A field that only this package reads; TUF clients keep fields that they do not know, and the signature covers it.
_FEDERATION_FIELD = "root_digest"


def sign_silo_metadata(
    plan_id: str,
    silo_id: str,
    files: Mapping[str, tuple[int, str]],
    key: SigningKey,
    *,
    root_digest: str,
    version: int,
    now: datetime,
) -> bytes:
    """Sign one silo's submission for one plan of one federation.

    Args:
        plan_id: the plan.
        silo_id: the silo.
        files: path relative to ``targets/``, i.e. ``<plan_id>/silos/<silo_id>/...``, to (bytes, sha256).
        key: the silo's key.
        root_digest: sha256 of the federation's first root.
        version: higher for each new submission of the same plan.
        now: the present; the signature is valid for five years.

    Returns:
        The role's metadata file; it is published unchanged.

    Raises:
        RoleError: a path that this silo may not list.
        DocumentError: no submission.json, or an invalid id.
    """
    subject = f"{silo_role(plan_id, silo_id)}.json"
    if not (is_plan_id(plan_id) and is_silo_id(silo_id)):
        got = f"{ascii(plan_id[:60])} and {ascii(silo_id[:60])}"
        raise DocumentError("ids to sign for", expected="a plan id and a silo id", got=got)
    # The aggregator refuses a submission with any other path, and the silo would learn of it only then.
    _check_paths(files, plan_id, silo_id, subject)
    targets = {
        path: TargetFile(size, {"sha256": digest}, path) for path, (size, digest) in files.items()
    }
    signed = Targets(
        version,
        None,
        expiry(now, METADATA_LIFE),
        targets,
        unrecognized_fields={_FEDERATION_FIELD: root_digest},
    )
    return sign_metadata(signed, [key])


def check_role_federation(signed: Targets, root_digest: str, subject: str) -> None:
    """Refuse a silo's role that was signed for another federation, or for none.

    Raises:
        FederationError: it does not name the federation with this first root.
    """
    check_federation(signed.unrecognized_fields.get(_FEDERATION_FIELD), root_digest, subject)


def verify_silo_metadata(
    data: bytes,
    *,
    root_digest: str,
    plan_id: str,
    silo_id: str,
    key: PublicKey,
    now: datetime,
) -> Mapping[str, tuple[int, str]]:
    """Check the signature over a submission.

    Args:
        data: the role's metadata file as received.
        root_digest: sha256 of the first root of the federation that it must be for.
        plan_id: the plan that it must be for.
        silo_id: the silo that sent it, by its registered node.
        key: that silo's enrolled key.
        now: the time at which it must be valid.

    Returns:
        Path relative to ``targets/`` to (bytes, sha256).

    Raises:
        DocumentError: too large, malformed, not canonical, or without submission.json.
        SignatureError: not signed by this key only.
        ExpiredError: past its expiry.
        FederationError: signed for another federation.
        ReplayError: signed for another plan.
        RoleError: it lists a path that is not this silo's, or delegates.
        UnsafePathError: it lists a path that could leave its folder.
    """
    _, files = read_silo_metadata(
        data,
        root_digest=root_digest,
        plan_id=plan_id,
        silo_id=silo_id,
        key=key,
        now=now,
    )
    return files


def read_silo_metadata(
    data: bytes,
    *,
    root_digest: str,
    plan_id: str,
    silo_id: str,
    key: PublicKey,
    now: datetime,
) -> tuple[int, Mapping[str, tuple[int, str]]]:
    """Check as `verify_silo_metadata` does, and also return the signed version."""
    role = silo_role(plan_id, silo_id)
    subject = f"{role}.json"
    metadata = parse_metadata(data, Targets, subject, limit=MAX_SILO_METADATA_BYTES)
    tuf_key, delegated_role = silo_delegation(plan_id, silo_id, key)
    # Targets that delegate to this silo only, whatever the federation's own targets say.
    delegator = Targets(delegations=Delegations({tuf_key.keyid: tuf_key}, {role: delegated_role}))
    check_signatures(metadata, role, [delegator], subject)
    signed = metadata.signed
    check_role_federation(signed, root_digest, subject)
    check_expiry(signed, now, subject)
    if signed.delegations is not None:
        # A role below this one could list files under a key that nobody enrolled.
        num_roles = len(signed.delegations.roles or {})
        raise RoleError(
            subject,
            expected="no further delegations",
            got=f"delegations to {num_roles} roles",
        )
    files = {path: (file.length, file.hashes["sha256"]) for path, file in signed.targets.items()}
    _check_paths(files, plan_id, silo_id, subject)
    return signed.version, files


def silo_delegation(plan_id: str, silo_id: str, key: PublicKey) -> tuple[Key, DelegatedRole]:
    """Return a silo's key as TUF lists it, and its role for one plan: its own paths and no others."""
    tuf_key = key.tuf_key()
    role = silo_role(plan_id, silo_id)
    paths = delegated_paths(plan_id, role)
    return tuf_key, DelegatedRole(role, [tuf_key.keyid], threshold=1, terminating=True, paths=paths)


def _check_paths(
    files: Mapping[str, tuple[int, str]],
    plan_id: str,
    silo_id: str,
    subject: str,
) -> None:
    role = silo_role(plan_id, silo_id)
    for path in files:
        # First, since the messages below repeat parts of the path.
        check_path(path, subject)
        path_plan_id = path.split("/")[0]
        if path_plan_id != plan_id:
            raise ReplayError(
                subject,
                expected=f"files of plan {plan_id}",
                got=f"files of {path_plan_id[:60]}",
            )
        if owner(path, plan_id) != role:
            raise RoleError(
                f"targets/{path}",
                expected=f"only paths below {plan_id}/silos/{silo_id}/",
                got=f"a path listed by role {role}",
            )
    if f"{plan_id}/silos/{silo_id}/submission.json" not in files:
        raise DocumentError(
            subject,
            expected="submission.json among its files",
            got=f"{len(files)} other files",
        )
