"""Says at once what will matter to a new site later, where a person would else learn it after days of training."""

from collections.abc import Iterator
from dataclasses import dataclass

from ddm.system.console import human_seconds
from silo.audit.holdout import num_holdout_units
from silo.config import Policy
from silo.data.first_look import UnitCounts

_EXAMPLE_FLOPS = 1e15


@dataclass(frozen=True)
class Machine:
    """What a site's machine has to train with.

    Attributes:
        num_gpus: the number of gpus that torch sees.
        num_cores: the number of cores that this process may use.
        flops_per_s: operations a second of one thread.
    """

    num_gpus: int
    num_cores: int
    flops_per_s: float


Row = tuple[str, str]
"""What it is about, and what will happen."""


def outlook(counts: UnitCounts, policy: Policy, licence: str, machine: Machine) -> Iterator[Row]:
    """Yield what a site of this size, with this policy, will meet later.

    Args:
        counts: its images and, where the policy protects patients, its patients.
        policy: what it lets a plan require.
        licence: the licence of the federation's releases.
        machine: what it trains with.
    """
    yield "training", _training(counts, policy)
    yield "leak audit", _audit(counts, policy)
    privacy = policy.privacy
    yield (
        "privacy",
        f"protects every {privacy.unit}: epsilon {privacy.max_epsilon:g} at most for one plan, "
        f"{privacy.budget_epsilon:g} for all plans together",
    )
    # A plan has one unit for all silos, so that this decides in which federations the site can take part.
    if counts.patients is None:
        yield (
            "unit",
            'no patients on the card: it takes part in plans of statistics.unit = "image" alone',
        )
    yield "licence", _licence(policy, licence)
    yield "later plans", _later_plans(policy)
    yield "machine", _machine(machine)


def _training(counts: UnitCounts, policy: Policy) -> str:
    size = f"{counts.images} images"
    if counts.patients is not None:
        size += f" of {counts.patients} patients"
    if counts.images >= policy.min_images:
        return f"{size}; this site asks for at least {policy.min_images} (training.min_images)"
    return (
        f"{size} are TOO FEW: this site asks for at least {policy.min_images}, and training would end with exit code "
        "7. An expert memorises a small number of images. To allow it, lower training.min_images in policy.toml"
    )


def _audit(counts: UnitCounts, policy: Policy) -> str:
    audit = policy.audit
    unit = policy.privacy.unit
    num_units = counts.units(unit)
    if not audit.required:
        return "not required by this site's policy"
    num_holdout = num_holdout_units(num_units, policy)
    if num_holdout:
        return f"measures each expert on {num_holdout} {unit}s held out, before it leaves"
    return (
        f"CANNOT MEASURE here: it needs {audit.min_holdout_units} {unit}s held out, which are more than "
        f"{audit.max_holdout_share:.0%} of {num_units}. For each plan, nothing leaves until a named role signs a "
        "waiver (silo waive); role and reason are published"
    )


def _licence(policy: Policy, licence: str) -> str:
    if licence in policy.approval.licences:
        return f"{licence}, which all images must allow; plans with another one are refused"
    if policy.approval.licences:
        allowed = " or ".join(policy.approval.licences)
        return f"{licence} is NOT ALLOWED: approval.licences in policy.toml names {allowed}"
    return f"{licence}, which all images must allow"


def _later_plans(policy: Policy) -> str:
    if policy.approval.carry_over:
        return "may carry this site's expert over; it then neither trains nor spends epsilon again"
    return "each need training again: approval.carry_over in policy.toml is false"


def _machine(machine: Machine) -> str:
    duration = human_seconds(_EXAMPLE_FLOPS / machine.flops_per_s)
    rate = f"one thread takes about {duration} for each PFLOP of training, which `aggregator plan` prints"
    if machine.num_gpus:
        return f"GPUs that torch finds: {machine.num_gpus}; {rate}"
    return f"no GPU that torch finds, {machine.num_cores} cores; {rate}"
