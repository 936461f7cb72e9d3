"""Compares a plan with the facts that a site declared about its data: rules only, which never see an image.

A plan that does not fit is refused for what policy.toml says, not for what the images are: so its bounds are no
questions about them. `silo.data.declared` holds the data against the same facts, before there is any plan.
"""

from collections.abc import Iterator

from ddm.images.layout import row_shapes
from ddm.protocol.architecture import ClassCondition, TextCondition
from ddm.protocol.classes import Classes
from ddm.protocol.latent import Autoencoder
from ddm.protocol.partition import RandomPartition
from ddm.protocol.plan import Plan
from silo.config import DataPolicy, Policy

Rule = tuple[str, str, str]
_HOW = "; `silo scan SITE` says what its data are"


def declared_rules(plan: Plan, policy: Policy) -> Iterator[Rule]:
    """Yield (subject, what the site declared, what the plan requires) for everything that does not fit."""
    data, least = policy.data, policy.least_images
    parts = plan.partition.num_parts if isinstance(plan.partition, RandomPartition) else 1
    fewest = parts * max(plan.partition.min_images, policy.training.min_images)
    if fewest > least:
        yield (
            "fewest images",
            f"at most {least} (data.min_images in policy.toml, else training.min_images)",
            f"{fewest}",
        )
    yield from _samples(plan, data)
    if isinstance(plan.condition, TextCondition) and not data.captions:
        yield (
            "condition",
            "captions = true under [data] in policy.toml",
            "texts, which this site does not declare",
        )
    yield from _classes(plan, data)


def _samples(plan: Plan, data: DataPolicy) -> Iterator[Rule]:
    subject, shape = "kind of the data", plan.data.shape
    if data.kind in (None, "pictures") and (plan.transform or len(shape) == 4):
        return
    if data.kind is None:
        yield (
            subject,
            f"one that this site declared (data.kind in policy.toml{_HOW})",
            f"data of shape {shape}",
        )
    elif data.kind == "latents":
        if not isinstance(plan.latent, Autoencoder):
            yield (
                subject,
                "an autoencoder: this site declares latents (data.kind)",
                "experts of images",
            )
        elif data.shape != plan.expert_shape:
            yield (
                "shape of a latent",
                f"{data.shape} (data.shape in policy.toml)",
                f"{plan.expert_shape}",
            )
    elif plan.transform:
        return
    elif data.kind == "pictures":
        expected = "a table [transform], or volumes: this site declares pictures (data.kind)"
        yield subject, expected, "arrays as they are"
    else:
        if data.shape not in row_shapes(plan.data):
            yield "shape of an image", f"{data.shape} (data.shape in policy.toml)", f"{shape}"
        (low, high), wide = data.range or plan.data.range, plan.data.range
        if not wide[0] <= low < high <= wide[1]:
            got = f"{wide[0]:g} to {wide[1]:g}"
            yield (
                "range of values",
                f"{low:g} to {high:g} within it (data.range in policy.toml)",
                got,
            )


def _classes(plan: Plan, data: DataPolicy) -> Iterator[Rule]:
    by_class = isinstance(plan.condition, ClassCondition)
    if not by_class and not plan.statistics.class_counts:
        return
    if isinstance(plan.condition, ClassCondition):
        asked = plan.condition.classes
    else:
        asked = Classes(
            plan.statistics.class_counts.num_classes if plan.statistics.class_counts else 0
        )
    if (own := data.known_classes) is None:
        yield "classes", "some that this site declared (data.classes in policy.toml)", asked.words()
        return
    known = own.names or tuple(map(str, range(own.num)))
    if any(asked.number(name) is None for name in known):
        yield "classes", f"among others {own.words()} (data.classes in policy.toml)", asked.words()
