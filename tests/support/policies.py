"""Policies for tests that are about one rule: what they leave open fits the plan."""

from collections.abc import Sequence
from typing import Any

from silo.config import DataPolicy, Policy

_USUAL: dict[str, dict[str, Any]] = {"privacy": {"unit": "image"}, "training": {"min_images": 20}}


def ordinary_policy(policy: Policy | None = None, shape: Sequence[int] = (1, 8, 8)) -> Policy:
    """Return a policy that counts images, takes few of them, and declares arrays of this shape, unless it says so."""
    policy = policy or Policy()
    changes: dict[str, Any] = {}
    for name, usual in _USUAL.items():
        part = getattr(policy, name)
        changes[name] = part.model_copy(
            update={
                field: value for field, value in usual.items() if field not in part.model_fields_set
            }
        )
    if policy.data == DataPolicy():
        changes["data"] = DataPolicy(
            kind="arrays", shape=tuple(shape), classes=2, captions=True, min_images=10**6
        )
    if "plans" not in policy.model_fields_set:
        changes["plans"] = policy.plans.model_copy(update={"accept": "policy"})
    return policy.model_copy(update=changes)
