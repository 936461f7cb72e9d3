"""Checks a plan against this site's policy: rules only, no file, no network, no clock."""

from collections.abc import Iterator
from datetime import datetime
from math import prod

from ddm.errors import PolicyError
from ddm.footprint import (
    encoding_bytes,
    expert_size,
    file_bytes,
    looking_bytes,
    picture_bytes,
    training_bytes,
    widest_layer,
)
from ddm.protocol.limits import Audit
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.statistics.cost import check_total
from ddm.statistics.of_plan import statistic_bytes, statistics_of
from silo.config import AuditPolicy, Policy, SizePolicy
from silo.plan.declared import declared_rules


def check_plan(plan: Plan, policy: Policy, *, silo_id: str, now: datetime, parts: int = 1) -> None:
    """Refuse a plan that requires more than the policy allows.

    Args:
        plan: verified and parsed.
        policy: this site's.
        silo_id: this silo.
        now: the time of acceptance; expiry counts only here, so that a long training outlives the plan.
        parts: into which this machine divides a batch.

    Raises:
        PolicyError: names the first broken rule, what the policy allows and what the plan requires.
    """
    for subject, allowed, required in broken_rules(
        plan, policy, silo_id=silo_id, now=now, parts=parts
    ):
        raise PolicyError(f"plan {plan.plan_id}: {subject}", expected=allowed, got=required)


def broken_rules(
    plan: Plan, policy: Policy, *, silo_id: str, now: datetime, parts: int = 1
) -> Iterator[tuple[str, str, str]]:
    """Yield (subject, what the policy allows, what the plan requires) for every rule that the plan breaks."""
    if silo_id not in plan.silos:
        yield "silos", f"{silo_id} among them", ", ".join(plan.silos)
    if now >= plan.expires_at:
        yield (
            "expiry",
            "a plan still valid on acceptance",
            f"a plan that expired {plan.expires_at.isoformat()}",
        )
    yield from _size_rules(plan, policy.sizes, parts)
    yield from _privacy_rules(plan, policy)
    yield from _training_rules(plan, policy, silo_id)
    yield from declared_rules(plan, policy)
    yield from _audit_rules(plan.audit, policy.audit)


def _size_rules(plan: Plan, allowed: SizePolicy, parts: int) -> Iterator[tuple[str, str, str]]:
    """Compute what the plan's numbers imply, before anything of that size is opened or allocated."""
    network, widest = widest_layer(plan)
    slices = plan.transform.slices if plan.transform else None
    implied, listed = file_bytes(plan), {file.path: file.bytes for file in plan.files}
    largest = max(implied, key=lambda path: max(implied[path], listed[path]))
    numbers = (
        ("values of one sample", max(plan.data.dim, prod(plan.expert_shape)), "max_sample_values"),
        (f"tokens x width of the {network}", widest, "max_layer_values"),
        ("parameters of an expert", expert_size(plan).parameters, "max_parameters"),
        (f"bytes of {largest}", max(implied[largest], listed[largest]), "max_file_bytes"),
        ("bytes of memory to open its files", looking_bytes(plan), "max_memory_bytes"),
        ("slices of one volume", slices.count if slices else 0, "max_slices"),
        ("bytes of memory of what one picture becomes", picture_bytes(plan), "max_memory_bytes"),
        ("bytes of memory to encode images", encoding_bytes(plan), "max_memory_bytes"),
        ("bytes of memory of a training step", training_bytes(plan, parts), "max_memory_bytes"),
    )
    for subject, required, name in numbers:
        yield from _above(subject, required, getattr(allowed, name), f"sizes.{name}")
    for path, size in listed.items():
        if size > implied[path]:
            yield (
                f"bytes of {path}",
                f"at most {implied[path]}, as the plan's sizes imply",
                f"{size}",
            )


def _above(subject: str, required: float, most: float, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield a rule that allows less than is required; `name` is its line in policy.toml."""
    if required > most:
        yield subject, f"at most {most:.15g} ({name} in policy.toml)", f"{required:.15g}"


def _privacy_rules(plan: Plan, policy: Policy) -> Iterator[tuple[str, str, str]]:
    statistics, total = plan.statistics, plan.spends
    if not statistics.private:
        yield (
            "relation of the statistics",
            "replace_one",
            "none: a plan of one owner's islands, for no silo",
        )
    if (policy.privacy.unit, statistics.unit) == ("patient", "image"):
        got = "image; image-level statistics say nothing about a patient, who may have many images"
        yield "privacy unit", "patient", got
    yield from _above(
        "epsilon of the plan", total.epsilon, policy.privacy.max_epsilon, "privacy.max_epsilon"
    )
    yield from _above(
        "delta of the plan", total.delta, policy.privacy.max_delta, "privacy.max_delta"
    )
    try:
        check_total(plan)
    except PolicyError as error:
        yield "privacy of all statistics together", error.expected or "", error.got or ""


def _training_rules(plan: Plan, policy: Policy, silo_id: str) -> Iterator[tuple[str, str, str]]:
    allowed = policy.training
    architecture = plan.expert.architecture.kind
    if architecture not in allowed.architectures:
        yield "architecture", " or ".join(allowed.architectures) or "none", architecture
    num_experts = max_experts_per_silo(plan)
    numbers = (
        ("experts of one silo", num_experts, "max_experts"),
        (
            "training steps of all its experts",
            num_experts * plan.expert.training.num_steps,
            "max_steps",
        ),
        ("batch size", plan.expert.training.batch_size, "max_batch_size"),
        ("bytes of an expert", plan.limits.expert_bytes, "max_expert_bytes"),
        ("bytes of a statistic", plan.limits.statistic_bytes, "max_statistic_bytes"),
        ("seconds of training", plan.limits.train_s, "max_train_s"),
        ("GPU hours", plan.limits.gpu_hours, "max_gpu_hours"),
    )
    for subject, required, name in numbers:
        yield from _above(subject, required, getattr(allowed, name), f"training.{name}")
    checkpoint_steps = plan.expert.training.checkpoint_steps
    own_limits = [("steps between checkpoints", checkpoint_steps, plan.expert.training.num_steps)]
    agreed = plan.agreed.get(silo_id)
    # For as many units as were agreed, not for as many as there are: a limit is no question about the data.
    num_units = 0 if agreed is None else agreed.units(plan.statistics.unit) or 0
    names = statistics_of(plan.statistics)
    for kind, num_bytes in statistic_bytes(plan, num_units).items():
        subject = f"bytes of the {names[kind].name}"
        own_limits.append((subject, num_bytes, plan.limits.statistic_bytes))
    for subject, required, limit in own_limits:
        if required > limit:
            yield subject, f"at most the plan's own {limit:.15g}", f"{required:.15g}"


def _audit_rules(required: Audit, allowed: AuditPolicy) -> Iterator[tuple[str, str, str]]:
    """Hold the plan's limits, which decide what passes, against the loosest ones that this site lets pass."""
    if allowed.required and not required.required:
        yield "leak audit", "required", "not required"
    if required.min_holdout_units < allowed.min_holdout_units:
        least = f"at least {allowed.min_holdout_units} (audit.min_holdout_units in policy.toml)"
        yield "held-out units that the leak audit needs", least, f"{required.min_holdout_units}"
    limits = (
        ("AUC that passes the leak audit", required.max_mia_auc, "max_mia_auc"),
        ("share of members found that passes the leak audit", required.max_mia_tpr, "max_mia_tpr"),
        (
            "share of near copies that passes the leak audit",
            required.max_near_copy_rate,
            "max_near_copy_rate",
        ),
    )
    for subject, most, name in limits:
        yield from _above(subject, most, getattr(allowed, name), f"audit.{name}")
