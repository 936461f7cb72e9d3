"""Drafts of `root` and `targets` for their holders to sign, made from plain values; no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Self

from tuf.api.metadata import DelegatedRole, Delegations, Key, Role, Root, Targets

from ddm.errors import RoleError, SetupError
from ddm.trust.keys import PublicKey
from ddm.trust.metadata import METADATA_LIFE, expiry, public_key
from ddm.trust.paths import (
    PLANS,
    RELEASE,
    delegated_paths,
    is_plan_id,
    is_silo_id,
    silo_role,
    split_silo_role,
)
from ddm.trust.silo_role import silo_delegation

# A field of the root that only this package reads; TUF clients keep fields that they do not know.
LOG_KEY_FIELD = "log_key"
TOP_ROLES = ("root", "targets", "snapshot", "timestamp")


@dataclass(frozen=True)
class Holders:
    """The holders of a role.

    Attributes:
        keys: one key per holder.
        threshold: how many of them must sign.

    Raises:
        SetupError: no key, a key twice, or a threshold below 1 or above the number of keys.
    """

    keys: tuple[PublicKey, ...]
    threshold: int = 1

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            # One person with two places would reach a threshold of two alone.
            raise SetupError(
                "holders",
                expected="a different key for each holder",
                got=f"{len(self.keys)} holders with {len(set(self.keys))} different keys",
            )
        if not 1 <= self.threshold <= len(self.keys):
            expected = f"between 1 and the number of holders, {len(self.keys)}"
            raise SetupError("threshold of holders", expected=expected, got=str(self.threshold))


@dataclass(frozen=True)
class Delegates:
    """The delegations of `targets`: two roles of the federation, and the silos of at most one plan.

    A silo that the plan carries over keeps the role of the plan for which it signed.

    Attributes:
        plans: the key that signs plans.
        release: the key that signs releases.
        plan_id: the plan; None before the first one.
        silos: silo id to its key.
        carried: silo id to the earlier plan for which it signed, of silos that the plan carries over.
    """

    plans: PublicKey
    release: PublicKey
    plan_id: str | None = None
    silos: Mapping[str, PublicKey] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> Mapping[str, PublicKey]:
        """The role of each silo, and its key."""
        return {
            silo_role(self.origin(silo_id), silo_id): key for silo_id, key in self.silos.items()
        }

    def origin(self, silo_id: str) -> str:
        """Return the plan for which a silo signed: this one, or the earlier one from which it is carried over."""
        return self.carried.get(silo_id, str(self.plan_id))

    def without(self, silo_id: str) -> Self:
        """Return the same without one silo."""
        silos = {name: key for name, key in self.silos.items() if name != silo_id}
        carried = {name: origin for name, origin in self.carried.items() if name != silo_id}
        return replace(self, silos=silos, carried=carried)

    @classmethod
    def from_targets(cls, targets: Targets) -> Self:
        """Read them from `targets`, which this federation wrote itself."""
        keys: dict[str, PublicKey] = {}
        silos: dict[str, PublicKey] = {}
        carried: dict[str, str] = {}
        roles = delegated_roles(targets)
        # The paths of `plans` name the current plan; before the first plan it has none.
        plan_id = None
        plan_paths = roles[PLANS].paths
        if plan_paths:
            plan_id = plan_paths[0].split("/")[0]
        for name, role in roles.items():
            keys[name] = public_key(targets.get_key(role.keyids[0]))
            silo_role_parts = split_silo_role(name)
            if silo_role_parts is None:
                continue
            origin, silo_id = silo_role_parts
            silos[silo_id] = keys[name]
            if origin != plan_id:
                carried[silo_id] = origin
        return cls(keys[PLANS], keys[RELEASE], plan_id, silos, carried)


def delegated_roles(targets: Targets) -> Mapping[str, DelegatedRole]:
    """Return the roles that `targets` delegates to, by name; none where it delegates nothing."""
    if targets.delegations is None:
        return {}
    return targets.delegations.roles or {}


def holders_of(root: Root) -> dict[str, Holders]:
    """Read the holders of each top role."""
    return {
        name: Holders(tuple(public_key(root.keys[keyid]) for keyid in role.keyids), role.threshold)
        for name, role in root.roles.items()
    }


def draft_root(
    version: int,
    holders: Mapping[str, Holders],
    now: datetime,
    log_key: str | None = None,
) -> Root:
    """Draft a root.

    Args:
        version: 1, or one more than the root before.
        holders: role to its holders, for each of `TOP_ROLES`.
        now: the present; the root is valid for five years.
        log_key: the verifier key of the federation's log, ``name+hash+base64``.
    """
    keys: dict[str, Key] = {}
    roles = {}
    for name in TOP_ROLES:
        role_keys = {key.keyid: key for key in (key.tuf_key() for key in holders[name].keys)}
        keys |= role_keys
        roles[name] = Role(sorted(role_keys), holders[name].threshold)
    # A field that TUF does not know; other clients keep it, and the signatures cover it.
    extra_fields = {}
    if log_key:
        extra_fields[LOG_KEY_FIELD] = log_key
    return Root(
        version=version,
        spec_version=None,
        expires=expiry(now, METADATA_LIFE),
        keys=keys,
        roles=roles,
        consistent_snapshot=False,
        unrecognized_fields=extra_fields,
    )


def log_key_of(root: Root) -> str | None:
    """Read the verifier key of the federation's log, None where the root names no log."""
    log_key = root.unrecognized_fields.get(LOG_KEY_FIELD)
    return log_key if isinstance(log_key, str) else None


def draft_targets(version: int, delegates: Delegates, now: datetime) -> Targets:
    """Draft `targets`, which lists no file and delegates each path to one role; before the first plan, no path at all.

    Raises:
        RoleError: two silos with one key, or an invalid id.
    """
    plan_id = delegates.plan_id
    if plan_id is not None:
        _check_ids(plan_id, delegates)
    num_keys = len(set(delegates.silos.values()))
    # Anybody who has the key of two silos could answer for both.
    if num_keys != len(delegates.silos):
        raise RoleError(
            str(plan_id),
            expected="a different key for each silo",
            got=f"{num_keys} keys for {len(delegates.silos)} silos",
        )
    keys: dict[str, Key] = {}
    roles: dict[str, DelegatedRole] = {}
    # `plans` and `release` are there from the start, without a path before the first plan.
    for name, public in ((PLANS, delegates.plans), (RELEASE, delegates.release)):
        key = public.tuf_key()
        keys[key.keyid] = key
        paths = delegated_paths(plan_id, name) if plan_id else []
        roles[name] = DelegatedRole(name, [key.keyid], 1, True, paths)
    if plan_id is not None:
        for silo_id, silo_key in sorted(delegates.silos.items()):
            key, role = silo_delegation(delegates.origin(silo_id), silo_id, silo_key)
            keys[key.keyid] = key
            roles[role.name] = role
    return Targets(version, None, expiry(now, METADATA_LIFE), {}, Delegations(keys, roles))


def _check_ids(plan_id: str, delegates: Delegates) -> None:
    """Refuse ids that could not be told apart in the name of a role, or that readers refuse."""
    invalid = [name for name in (plan_id, *delegates.carried.values()) if not is_plan_id(name)]
    invalid += [silo_id for silo_id in delegates.silos if not is_silo_id(silo_id)]
    if invalid:
        raise RoleError(
            f"plan {ascii(plan_id[:60])}",
            expected="a plan id and silo ids",
            got=ascii(invalid[0][:60]),
        )
