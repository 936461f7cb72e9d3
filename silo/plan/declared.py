"""Compares a plan with the facts that a site declared about its data: rules only, which never see an image.

A plan that does not fit is refused for what policy.toml states, not for what the images are: so its bounds are no
questions about them. `silo.data.declared` compares the data with the same facts, before there is any plan.
"""

from collections.abc import Iterator

from ddm.images.layout import row_shapes
from ddm.limits import BrokenRule
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.classes import Classes
from ddm.protocol.latent import Autoencoder
from ddm.protocol.partition import RandomPartition
from ddm.protocol.plan import Plan
from silo.config import DataPolicy, Policy

_HOW = "; `silo scan SITE` says what its data are"


def declared_rules(plan: Plan, policy: Policy) -> Iterator[BrokenRule]:
    """Yield every declaration of the site that the plan does not fit."""
    # Compared with what the site declared, never with its images: so a refusal tells nothing about them.
    min_images = max(plan.partition.min_images, policy.training.min_images)
    # A random partition divides the images, and each part must have as many as the plan demands.
    if isinstance(plan.partition, RandomPartition):
        min_images *= plan.partition.num_parts
    if min_images > policy.min_images:
        yield BrokenRule(
            "fewest images",
            f"at most {policy.min_images} (data.min_images in policy.toml, else training.min_images)",
            f"{min_images}",
        )
    yield from _sample_rules(plan, policy.data)
    if isinstance(plan.condition, TextCondition) and not policy.data.captions:
        yield BrokenRule(
            "condition",
            "captions = true under [data] in policy.toml",
            "texts, which this site does not declare",
        )
    yield from _class_rules(plan, policy.data)


def _sample_rules(plan: Plan, data: DataPolicy) -> Iterator[BrokenRule]:
    """Compare the kind, shape and range of the data."""
    # Volumes in files of their own go through the default transform where a plan has none, see `silo.data.cohort`.
    takes_pictures = plan.transform is not None or len(plan.data.shape) == 4
    match data.kind:
        case None if not takes_pictures:
            yield BrokenRule(
                "kind of the data",
                f"one that this site declared (data.kind in policy.toml{_HOW})",
                f"data of shape {plan.data.shape}",
            )
        case "pictures" if not takes_pictures:
            yield BrokenRule(
                "kind of the data",
                "a table [transform], or volumes: this site declares pictures (data.kind)",
                "arrays as they are",
            )
        case "latents" if not isinstance(plan.latent, Autoencoder):
            yield BrokenRule(
                "kind of the data",
                "an autoencoder: this site declares latents (data.kind)",
                "experts of images",
            )
        case "latents" if data.shape != plan.expert_shape:
            yield BrokenRule(
                "shape of a latent",
                f"{data.shape} (data.shape in policy.toml)",
                f"{plan.expert_shape}",
            )
        case "arrays" if plan.transform is None:
            yield from _array_rules(plan, data)


def _array_rules(plan: Plan, data: DataPolicy) -> Iterator[BrokenRule]:
    """Compare arrays that a plan takes as they are."""
    if data.shape not in row_shapes(plan.data):
        yield BrokenRule(
            "shape of an image",
            f"{data.shape} (data.shape in policy.toml)",
            f"{plan.data.shape}",
        )
    plan_low, plan_high = plan.data.range
    # Whole numbers have no declared range: their type fixes it, and they are scaled to that of the plan.
    low, high = data.range or plan.data.range
    if not plan_low <= low < high <= plan_high:
        yield BrokenRule(
            "range of values",
            f"{low:g} to {high:g} within it (data.range in policy.toml)",
            f"{plan_low:g} to {plan_high:g}",
        )


def _class_rules(plan: Plan, data: DataPolicy) -> Iterator[BrokenRule]:
    """Compare the classes that the plan conditions on or counts with those that the site declared."""
    if isinstance(plan.condition, ClassCondition):
        plan_classes = plan.condition.classes
    elif plan.statistics.class_counts:
        plan_classes = Classes(plan.statistics.class_counts.num_classes)
    else:
        return
    site_classes = data.known_classes
    if site_classes is None:
        yield BrokenRule(
            "classes",
            "some that this site declared (data.classes in policy.toml)",
            plan_classes.words(),
        )
        return
    # Every class of the site needs a number in the plan; the plan may have more classes.
    numbers = [str(number) for number in range(site_classes.num)]
    names = site_classes.names or numbers
    if any(plan_classes.number(name) is None for name in names):
        yield BrokenRule(
            "classes",
            f"among others {site_classes.words()} (data.classes in policy.toml)",
            plan_classes.words(),
        )
