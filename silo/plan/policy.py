"""Checks a plan against this site's policy: rules only, no file, no network, no clock."""

from collections.abc import Iterator
from datetime import datetime

from ddm.errors import PolicyError
from ddm.limits import BrokenRule, rules_of_limits
from ddm.protocol.plan import Plan
from silo.config import Policy
from silo.plan.declared import declared_rules


def check_plan(plan: Plan, policy: Policy, *, silo_id: str, now: datetime, parts: int = 1) -> None:
    """Refuse a plan that requires more than the policy allows.

    Args:
        plan: verified and parsed.
        policy: this site's.
        silo_id: this silo.
        now: the time of acceptance; expiry counts only here, so that a long training outlives the plan.
        parts: the parts into which this machine divides a batch.

    Raises:
        PolicyError: names the first broken rule, what the policy allows and what the plan requires.
    """
    rules = broken_rules(plan, policy, silo_id=silo_id, now=now, parts=parts)
    # The first one is enough to refuse; `broken_rules` is lazy, so that the others are not computed.
    for rule in rules:
        raise PolicyError(
            f"plan {plan.plan_id}: {rule.subject}", expected=rule.allowed, got=rule.required
        )


def broken_rules(
    plan: Plan, policy: Policy, *, silo_id: str, now: datetime, parts: int = 1
) -> Iterator[BrokenRule]:
    """Yield every rule that the plan breaks."""
    if silo_id not in plan.silos:
        yield BrokenRule("silos", f"{silo_id} among them", ", ".join(plan.silos))
    if now >= plan.expires_at:
        yield BrokenRule(
            "expiry",
            "a plan still valid on acceptance",
            f"a plan that expired {plan.expires_at.isoformat()}",
        )
    # What the site's card states: `aggregator plan` holds the plan against the same rules before it is signed.
    yield from rules_of_limits(plan, policy.public_limits(parts), silo_id)
    yield from declared_rules(plan, policy)
