"""Compares a plan with what a site's policy allows, as its card states it: rules only, no file, no network, no clock.

A silo holds each plan against these rules before it opens a file of it. `aggregator plan` applies the same rules to the
cards of all silos before it signs, so that both come to the same answer.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ddm.errors import PolicyError
from ddm.footprint import (
    encoding_bytes,
    expert_size,
    file_bytes,
    inspection_bytes,
    picture_bytes,
    training_bytes,
    widest_layer,
)
from ddm.io.tensors import stored_bytes
from ddm.models import expected_tensors
from ddm.protocol.limits import Audit
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.protocol.policy import AuditLimits, PolicyLimits, SizeLimits
from ddm.statistics.cost import check_total
from ddm.statistics.of_plan import statistic_bytes, statistics_of


class BrokenRule(NamedTuple):
    """A rule of a site's policy that a plan breaks.

    Attributes:
        subject: what the rule is about.
        allowed: what the policy allows.
        required: what the plan requires.
    """

    subject: str
    allowed: str
    required: str


def rules_of_limits(plan: Plan, limits: PolicyLimits, silo_id: str) -> Iterator[BrokenRule]:
    """Yield every limit of a silo's policy that the plan exceeds, and each of its own that it exceeds at this silo."""
    yield from _size_rules(plan, limits.sizes, limits.batch_parts)
    yield from _privacy_rules(plan, limits, silo_id)
    yield from _training_rules(plan, limits, silo_id)
    if limits.licences and plan.licence not in limits.licences:
        yield BrokenRule(
            "licence of the releases",
            f"{' or '.join(limits.licences)} (approval.licences in policy.toml)",
            plan.licence,
        )
    yield from _audit_rules(plan.audit, limits.audit)


def _exceeds(subject: str, required: float, max_allowed: float, field: str) -> Iterator[BrokenRule]:
    """Yield a rule that allows less than is required; `field` is its line in policy.toml."""
    if required > max_allowed:
        yield BrokenRule(
            subject,
            f"at most {max_allowed:.15g} ({field} in policy.toml)",
            f"{required:.15g}",
        )


def _size_rules(plan: Plan, sizes: SizeLimits, parts: int) -> Iterator[BrokenRule]:
    """Compute what the plan's numbers imply, before anything of that size is opened or allocated."""
    # A sample is an image in one stage and a latent in another; the larger one decides.
    sample_values = max(plan.data.dim, prod(plan.expert_shape))
    yield from _exceeds(
        "values of one sample", sample_values, sizes.max_sample_values, "sizes.max_sample_values"
    )
    network, layer_values = widest_layer(plan)
    yield from _exceeds(
        f"tokens x width of the {network}",
        layer_values,
        sizes.max_layer_values,
        "sizes.max_layer_values",
    )
    yield from _exceeds(
        "parameters of an expert",
        expert_size(plan).parameters,
        sizes.max_parameters,
        "sizes.max_parameters",
    )
    yield from _file_rules(plan, sizes)
    if plan.transform and plan.transform.slices:
        num_slices = plan.transform.slices.count
        yield from _exceeds(
            "slices of one volume", num_slices, sizes.max_slices, "sizes.max_slices"
        )
    # Estimates for the worst moment of each stage (ddm/footprint.py).
    memory_bytes = {
        "to open its files": inspection_bytes(plan),
        "of what one picture becomes": picture_bytes(plan),
        "to encode images": encoding_bytes(plan),
        "of a training step": training_bytes(plan, parts),
    }
    for purpose, num_bytes in memory_bytes.items():
        yield from _exceeds(
            f"bytes of memory {purpose}",
            num_bytes,
            sizes.max_memory_bytes,
            "sizes.max_memory_bytes",
        )


def _file_rules(plan: Plan, sizes: SizeLimits) -> Iterator[BrokenRule]:
    """Compare the sizes that the plan lists for its files with those that its numbers imply."""
    implied_bytes = file_bytes(plan)
    listed_bytes = {file.path: file.bytes for file in plan.files}
    # The larger of both counts: a plan may list less than it makes the site allocate.
    largest_bytes = {}
    for path, size in implied_bytes.items():
        largest_bytes[path] = max(size, listed_bytes[path])
    largest = max(largest_bytes, key=lambda path: largest_bytes[path])
    yield from _exceeds(
        f"bytes of {largest}", largest_bytes[largest], sizes.max_file_bytes, "sizes.max_file_bytes"
    )
    for path, num_bytes in listed_bytes.items():
        if num_bytes > implied_bytes[path]:
            yield BrokenRule(
                f"bytes of {path}",
                f"at most {implied_bytes[path]}, as the plan's sizes imply",
                f"{num_bytes}",
            )


def _privacy_rules(plan: Plan, limits: PolicyLimits, silo_id: str) -> Iterator[BrokenRule]:
    """Compare unit, epsilon and delta of the plan with what the policy allows one plan."""
    statistics = plan.statistics
    privacy = limits.privacy
    if not statistics.private:
        yield BrokenRule(
            "relation of the statistics",
            "replace_one",
            "none: a plan of one owner's islands, for no silo",
        )
    # The reverse is allowed: what hides a patient hides each image of the patient.
    if privacy.unit == "patient" and statistics.unit == "image":
        yield BrokenRule(
            "privacy unit",
            "patient",
            "image; image-level statistics say nothing about a patient, who may have many images",
        )
    # A site that counted no patients for its card would stop at the first image without one.
    agreed = plan.agreed.get(silo_id)
    if statistics.unit == "patient" and agreed is not None and agreed.patients is None:
        yield BrokenRule(
            "privacy unit", "image: the card of this silo states no patients", "patient"
        )
    # Statistics and private training together: a unit is in both.
    spends = plan.spends
    yield from _exceeds(
        "epsilon of the plan", spends.epsilon, privacy.max_epsilon, "privacy.max_epsilon"
    )
    yield from _exceeds("delta of the plan", spends.delta, privacy.max_delta, "privacy.max_delta")
    try:
        check_total(plan)
    except PolicyError as error:
        yield BrokenRule(
            "privacy of all statistics together", error.expected or "", error.got or ""
        )


def _training_rules(plan: Plan, limits: PolicyLimits, silo_id: str) -> Iterator[BrokenRule]:
    """Compare what training costs with what the policy allows, and with the plan's own limits."""
    allowed = limits.training
    training = plan.expert.training
    architecture = plan.expert.architecture.kind
    if architecture not in allowed.architectures:
        allowed_names = " or ".join(allowed.architectures) or "none"
        yield BrokenRule("architecture", allowed_names, architecture)
    num_experts = max_experts_per_silo(plan)
    numbers = (
        ("experts of one silo", num_experts, "max_experts"),
        ("training steps of all its experts", num_experts * training.num_steps, "max_steps"),
        ("batch size", training.batch_size, "max_batch_size"),
        ("bytes of an expert", plan.limits.expert_bytes, "max_expert_bytes"),
        ("bytes of a statistic", plan.limits.statistic_bytes, "max_statistic_bytes"),
        ("seconds of training", plan.limits.train_s, "max_train_s"),
        ("GPU hours", plan.limits.gpu_hours, "max_gpu_hours"),
    )
    for subject, required, name in numbers:
        yield from _exceeds(subject, required, getattr(allowed, name), f"training.{name}")

    specs = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    yield from _exceeds_own("size of an expert", stored_bytes(specs), plan.limits.expert_bytes)
    # For as many units as were agreed, not for as many as there are: a limit is not a question about the data.
    num_units = 0
    agreed = plan.agreed.get(silo_id)
    if agreed is not None:
        num_units = agreed.units(plan.statistics.unit)
    statistics = statistics_of(plan.statistics)
    for kind, num_bytes in statistic_bytes(plan, num_units).items():
        subject = f"bytes of the {statistics[kind].name}"
        yield from _exceeds_own(subject, num_bytes, plan.limits.statistic_bytes)


def _exceeds_own(subject: str, required: float, limit: float) -> Iterator[BrokenRule]:
    """Find a plan that contradicts itself."""
    if required > limit:
        expected = f"at most the plan's own {limit:.15g}"
        yield BrokenRule(subject, expected, f"{required:.15g}")


def _audit_rules(audit: Audit, limits: AuditLimits) -> Iterator[BrokenRule]:
    """Compare the plan's limits, which decide what passes the audit, with the loosest that this site accepts."""
    if limits.required and not audit.required:
        yield BrokenRule("leak audit", "required", "not required")
    # With fewer units held out, the audit would pass experts that it cannot judge.
    if audit.min_holdout_units < limits.min_holdout_units:
        yield BrokenRule(
            "held-out units that the leak audit needs",
            f"at least {limits.min_holdout_units} (audit.min_holdout_units in policy.toml)",
            f"{audit.min_holdout_units}",
        )
    yield from _exceeds(
        "AUC that passes the leak audit",
        audit.max_mia_auc,
        limits.max_mia_auc,
        "audit.max_mia_auc",
    )
    yield from _exceeds(
        "share of members found that passes the leak audit",
        audit.max_mia_tpr,
        limits.max_mia_tpr,
        "audit.max_mia_tpr",
    )
    yield from _exceeds(
        "share of near copies that passes the leak audit",
        audit.max_near_copy_rate,
        limits.max_near_copy_rate,
        "audit.max_near_copy_rate",
    )
