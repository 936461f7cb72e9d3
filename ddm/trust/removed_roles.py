"""The memory of the silos' roles that a snapshot listed as removed: a later plan must not carry their experts over.

A role goes from the snapshot when its silo is withdrawn or removed, or when a new plan does not carry it over. From
then on the snapshot lists it with the next version, and what the silo signed before is outdated, as for any TUF client
that remembers a snapshot. The memory serves all plans of a federation, since the plan that brings a role back is
another one than the plan whose release showed that it was gone.

A release that a reader has verified before stays readable: it carried the role before the role went.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ddm.errors import RollbackError
from ddm.io.files import write_atomic
from ddm.io.untrusted import read_small
from ddm.protocol.base import Digest, Document, PositiveInt
from ddm.trust.paths import silo_role
from ddm.trust.rules import Resolved

REMOVED_NAME = "removed-roles.json"
MAX_REMOVED_BYTES = 4 * 1024 * 1024  # a snapshot, which lists as many, has at most 2 MB


class RemovedRoles(Document):
    """Roles that are gone, with the first version that would not be outdated, and the ids of the snapshot's keys."""

    format: Literal["archipelago/removed-roles/1"] = "archipelago/removed-roles/1"
    keys: Annotated[tuple[Digest, ...], Field(max_length=64)] = ()
    roles: Annotated[dict[str, PositiveInt], Field(max_length=65536)] = {}


def check_not_gone(before: RemovedRoles, resolved: Resolved) -> None:
    """Refuse a carried role that was seen to be gone; a pure function.

    Args:
        before: what is remembered.
        resolved: verified metadata.

    Raises:
        RollbackError: the subject names the role's metadata.
    """
    gone = _trusted(before, resolved)
    for silo_id, origin in resolved.origins.items():
        role = silo_role(origin, silo_id)
        if origin != resolved.plan_id and resolved.versions.get(role, 0) < gone.get(role, 0):
            raise RollbackError(
                f"metadata/{role}.json",
                expected=f"no expert of {silo_id} from plan {origin}, which was seen without {silo_id}",
                got=f"plan {resolved.plan_id}, which carries it over",
                remedy="Ask the federation why it publishes what a silo withdrew. If this release is older than the "
                "one that you verified last, verify it with another --state.",
            )


def load_removed(folder: Path) -> RemovedRoles:
    """Read the memory below `folder`, empty where there is none.

    Raises:
        DocumentError: it is damaged.
    """
    if not (folder / REMOVED_NAME).exists():
        return RemovedRoles()
    subject = f"state {folder / REMOVED_NAME}"
    data = read_small(folder, REMOVED_NAME, MAX_REMOVED_BYTES, subject=subject)
    return RemovedRoles.parse(data, subject=subject, limit=MAX_REMOVED_BYTES)


def record_removed(folder: Path, resolved: Resolved) -> None:
    """Remember the roles that this snapshot lists as removed; the caller holds the lock of the memory."""
    loaded = load_removed(folder)
    roles = _trusted(loaded, resolved)
    for role, version in resolved.removed.items():
        roles[role] = max(version, roles.get(role, 0))
    record = RemovedRoles(keys=resolved.keys["snapshot"], roles=roles)
    if roles and record != loaded:
        write_atomic(folder / REMOVED_NAME, record.encode())


def _trusted(before: RemovedRoles, resolved: Resolved) -> dict[str, int]:
    """Return the roles, unless a key that signed the snapshot was taken away since: a thief may have added some."""
    return dict(before.roles) if set(before.keys) <= set(resolved.keys["snapshot"]) else {}
