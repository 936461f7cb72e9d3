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
from ddm.trust.silo_role import delegation

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
            got = f"{len(self.keys)} holders with {len(set(self.keys))} different keys"
            raise SetupError("holders", expected="a different key for each holder", got=got)
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
            silo_role(self.carried.get(name, str(self.plan_id)), name): key
            for name, key in self.silos.items()
        }

    def without(self, silo_id: str) -> Self:
        """Return the same without one silo."""
        silos, carried = dict(self.silos), dict(self.carried)
        silos.pop(silo_id, None)
        carried.pop(silo_id, None)
        return replace(self, silos=silos, carried=carried)

    @classmethod
    def of(cls, targets: Targets) -> Self:
        """Read them from `targets`."""
        keys: dict[str, PublicKey] = {}
        silos: dict[str, PublicKey] = {}
        carried: dict[str, str] = {}
        roles = (targets.delegations.roles if targets.delegations else None) or {}
        plan_id = next((path.split("/")[0] for path in roles[PLANS].paths or []), None)
        for name, role in roles.items():
            keys[name] = public_key(targets.get_key(role.keyids[0]))
            if silo := split_silo_role(name):
                silos[silo[1]] = keys[name]
                carried |= {silo[1]: silo[0]} if silo[0] != plan_id else {}
        return cls(keys[PLANS], keys[RELEASE], plan_id, silos, carried)


def holders_of(root: Root) -> dict[str, Holders]:
    """Read the holders of each top role."""
    return {
        name: Holders(tuple(public_key(root.keys[keyid]) for keyid in role.keyids), role.threshold)
        for name, role in root.roles.items()
    }


def draft_root(
    version: int, holders: Mapping[str, Holders], now: datetime, log_key: str | None = None
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
        held = [key.tuf_key() for key in holders[name].keys]
        keys.update({key.keyid: key for key in held})
        roles[name] = Role(sorted(key.keyid for key in held), holders[name].threshold)
    # A field that TUF does not know; other clients keep it, and its signature covers it.
    added = {LOG_KEY_FIELD: log_key} if log_key else {}
    return Root(version, None, expiry(now, METADATA_LIFE), keys, roles, False, added)


def log_key_of(root: Root) -> str | None:
    """Read the verifier key of the federation's log, None where the root names no log."""
    found = root.unrecognized_fields.get(LOG_KEY_FIELD)
    return found if isinstance(found, str) else None


def draft_targets(version: int, delegates: Delegates, now: datetime) -> Targets:
    """Draft `targets`, which lists no file and delegates each path to one role; before the first plan, no path at all.

    Raises:
        RoleError: two silos with one key, or an invalid id.
    """
    plan_id, silos = delegates.plan_id, delegates.silos
    plans = [] if plan_id is None else [plan_id, *delegates.carried.values()]
    wrong = [each for each in plans if not is_plan_id(each)]
    wrong += [name for name in silos if plan_id is not None and not is_silo_id(name)]
    if wrong:
        subject = f"plan {ascii(str(plan_id)[:60])}"
        raise RoleError(subject, expected="a plan id and silo ids", got=ascii(wrong[0][:60]))
    if len(set(silos.values())) != len(silos):
        got = f"{len(set(silos.values()))} keys for {len(silos)} silos"
        raise RoleError(str(plan_id), expected="a different key for each silo", got=got)
    keys: dict[str, Key] = {}
    roles: dict[str, DelegatedRole] = {}
    for name, public in ((PLANS, delegates.plans), (RELEASE, delegates.release)):
        key = public.tuf_key()
        keys[key.keyid] = key
        paths = delegated_paths(plan_id, name) if plan_id else []
        roles[name] = DelegatedRole(name, [key.keyid], 1, True, paths)
    for silo_id, silo_key in sorted(silos.items()) if plan_id else []:
        below = delegation(
            delegates.carried.get(silo_id, str(plan_id)), {silo_id: silo_key}
        ).delegations
        if below is not None:
            keys |= below.keys
            roles |= below.roles or {}
    return Targets(version, None, expiry(now, METADATA_LIFE), {}, Delegations(keys, roles))
