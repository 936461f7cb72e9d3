"""Checks a plan against this site's policy: rules only, no file, no network, no clock."""

from collections.abc import Iterator
from datetime import datetime

from ddm.errors import PolicyError
from ddm.privacy.plan_cost import check_total
from ddm.protocol.plan import Plan, most_experts
from silo.config import Policy


def check_plan(plan: Plan, policy: Policy, *, silo_id: str, now: datetime) -> None:
    """Refuse a plan that requires more than the policy allows.

    Args:
        plan: verified and parsed.
        policy: this site's.
        silo_id: this silo.
        now: the time of acceptance; expiry counts only here, so that a long training outlives the plan.

    Raises:
        PolicyError: names the first broken rule, what the policy allows and what the plan requires.
    """
    for subject, allowed, required in broken_rules(plan, policy, silo_id=silo_id, now=now):
        raise PolicyError(f"plan {plan.plan_id}: {subject}", expected=allowed, got=required)


def broken_rules(plan: Plan, policy: Policy, *, silo_id: str, now: datetime) -> Iterator[tuple[str, str, str]]:
    """Yield (subject, what the policy allows, what the plan requires) for every rule that the plan breaks."""
    if silo_id not in plan.silos:
        yield "silos", f"{silo_id} among them", ", ".join(plan.silos)
    if now >= plan.expires_at:
        yield "expiry", "a plan still valid on acceptance", f"a plan that expired {plan.expires_at.isoformat()}"
    yield from _privacy_rules(plan, policy)
    yield from _training_rules(plan, policy)
    if policy.audit.required and not plan.audit.required:
        yield "leak audit", "required", "not required"


def _privacy_rules(plan: Plan, policy: Policy) -> Iterator[tuple[str, str, str]]:
    statistics, total = plan.statistics, plan.statistics.total
    if (policy.privacy.unit, statistics.unit) == ("patient", "image"):
        got = "image; image-level statistics say nothing about a patient, who may have many images"
        yield "privacy unit", "patient", got
    if total.epsilon > policy.privacy.max_epsilon:
        yield "epsilon of all statistics", f"at most {policy.privacy.max_epsilon:g}", f"{total.epsilon:g}"
    if total.delta > policy.privacy.max_delta:
        yield "delta of all statistics", f"at most {policy.privacy.max_delta:g}", f"{total.delta:g}"
    try:
        check_total(plan)
    except PolicyError as error:
        yield "privacy of all statistics together", error.expected or "", error.got or ""


def _training_rules(plan: Plan, policy: Policy) -> Iterator[tuple[str, str, str]]:
    allowed = policy.training
    architecture = plan.expert.architecture.kind
    if architecture not in allowed.architectures:
        yield "architecture", " or ".join(allowed.architectures) or "none", architecture
    num_experts = most_experts(plan)
    classes = plan.statistics.class_counts
    class_bytes = 8 * plan.statistics.counts.num_groups * classes.num_classes if classes else 0
    numbers = (
        ("experts of one silo", num_experts, allowed.max_experts),
        ("training steps of all its experts", num_experts * plan.expert.training.num_steps, allowed.max_steps),
        ("batch size", plan.expert.training.batch_size, allowed.max_batch_size),
        ("steps between checkpoints", plan.expert.training.checkpoint_steps, plan.expert.training.num_steps),
        ("bytes of an expert", plan.limits.expert_bytes, allowed.max_expert_bytes),
        ("bytes of a statistic", plan.limits.statistic_bytes, allowed.max_statistic_bytes),
        ("bytes of the class counts", class_bytes, plan.limits.statistic_bytes),
        ("seconds of training", plan.limits.train_s, allowed.max_train_s),
        ("GPU hours", plan.limits.gpu_hours, allowed.max_gpu_hours),
    )
    for subject, required, most in numbers:
        if required > most:
            yield subject, f"at most {most:g}", f"{required:g}"
