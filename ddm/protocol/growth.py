"""Whether an expert of an earlier plan means the same in a later one; rules only, no file, no network.

The plan gives a meaning to an expert and to its silo's statistics: the space of the images, the path on which the
expert predicts, the groups that the histogram counts, the projection of the sketches, the privacy of their noise. A
plan that carries them over must agree with their own plan in all of this. How an expert was trained (steps, rates,
times, adaptation), the router, and the audit may differ.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddm.errors import ReplayError
from ddm.protocol.bases import Base
from ddm.protocol.carried import CarriedSilo
from ddm.protocol.latent import Autoencoder
from ddm.protocol.manifest import PublishedSilo, Standing
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission

_EQUAL_FIELDS = (
    "data",
    "latent",
    "encoder",
    "clustering",
    "sketch",
    "partition",
    "condition",
    "statistics",
)


def differences(old: Plan, new: Plan, silo_id: str) -> list[tuple[str, str, str]]:
    """Return what differs between two plans so that a silo's expert of the one means something else in the other.

    Args:
        old: the plan for which the silo trained.
        new: the plan that would carry its expert.
        silo_id: the silo.

    Returns:
        The field, its value in the old plan and in the new one; empty where the expert may be carried.
    """
    return list(_differing_fields("", _meaning(old, silo_id), _meaning(new, silo_id)))


def check_carried(carried: CarriedSilo, old: Plan, new: Plan) -> None:
    """Refuse a plan in which a carried expert would mean something else than where its silo trained it.

    Args:
        carried: what the new plan says about the silo.
        old: the document with the digest that it names.
        new: the plan that carries.

    Raises:
        FederationError: the earlier plan is one of another federation.
        ReplayError: names the field that differs (the licence is one), or the silo was not a silo of the earlier plan.
    """
    subject = f"plan {new.plan_id}, {carried.silo_id} carried from {carried.plan_id}"
    # A consent to later plans is one to those of the same federation.
    old.check_federation(new.root_digest, subject)
    # A silo that was itself carried into the old plan trained for another one, which the new plan must name.
    if old.plan_id != carried.plan_id or carried.silo_id not in old.silos:
        raise ReplayError(
            subject,
            expected=f"plan {carried.plan_id}, for which {carried.silo_id} trained",
            got=f"plan {old.plan_id} with {', '.join(old.silos)[:200]}",
        )
    # The silo sent its expert for releases under the earlier licence.
    if old.licence != new.licence:
        raise ReplayError(
            f"{subject}: licence",
            expected=f"{old.licence}, as in the plan for which it was trained",
            got=new.licence,
            remedy="Set licence in federation.toml to the earlier one, or let the silo train again: "
            f"--replace {carried.silo_id}.",
        )
    changes = differences(old, new, carried.silo_id)
    if not changes:
        return
    field, old_value, new_value = changes[0]
    got = new_value[:120]
    if len(changes) > 1:
        other_fields = ", ".join(name for name, _, _ in changes[1:])
        got += f" (and {len(changes) - 1} more: {other_fields[:200]})"
    raise ReplayError(
        f"{subject}: {field}",
        expected=f"{old_value[:120]}, as in the plan for which it was trained",
        got=got,
        remedy="An expert is carried only into a plan in which it means the same. Give the recipe the earlier value, "
        f"or let the silo train again: --replace {carried.silo_id}.",
    )


def check_consent(carried: CarriedSilo, submission: Submission) -> None:
    """Refuse a submission that is not the carried one, or whose silo did not consent to being carried.

    Raises:
        ReplayError: it is of another silo or another plan, or its silo did not consent.
    """
    subject = f"submission of {carried.silo_id}, carried"
    named = (submission.silo_id, submission.plan_id, submission.plan_digest)
    if named != (carried.silo_id, carried.plan_id, carried.plan_digest):
        raise ReplayError(
            subject,
            expected=f"{carried.silo_id} for plan {carried.plan_id} "
            f"of digest {carried.plan_digest[:16]}...",
            got=f"{submission.silo_id} for plan {submission.plan_id} "
            f"of digest {submission.plan_digest[:16]}...",
        )
    if not submission.carry_over:
        raise ReplayError(
            subject,
            expected="carry_over, the silo's signed consent to later plans",
            got="a submission without it, which is for its own plan only",
            remedy=f"Let the silo train again: --replace {carried.silo_id}. For the next time it may consent: "
            "carry_over = true under [approval] in its policy.toml.",
        )


def standing_of(plan: Plan, earlier: Mapping[str, Plan], silo_id: str) -> Standing:
    """Return what a silo is in a plan that carries others: `carried`, `again` or `late`; `new` where none is carried.

    Args:
        plan: the plan.
        earlier: the plans from which it carries, by id.
        silo_id: one of its silos.
    """
    if not plan.carried:
        return "new"
    if any(carried.silo_id == silo_id for carried in plan.carried):
        return "carried"
    if any(silo_id in old_plan.members for old_plan in earlier.values()):
        return "again"
    return "late"


@dataclass(frozen=True)
class StatedBase:
    """The base that some experts of a release started from, as its card and `ddm info` state it.

    Attributes:
        experts: which experts, in words.
        base: their base.
    """

    experts: str
    base: Base


def stated_bases(
    plan: Plan, earlier: Mapping[str, Plan], published_silos: Collection[str]
) -> list[StatedBase]:
    """Return the base of the experts that were trained for a plan, and those of the experts that it carries over.

    Args:
        plan: the plan.
        earlier: the plans from which it carries, by id.
        published_silos: the silos whose experts are in the release.

    Returns:
        One entry for each plan that has a base; experts that none of them names did not start from one.
    """
    bases = []
    if plan.base is not None:
        bases.append(StatedBase("the experts trained for this plan", plan.base))
    for plan_id, earlier_plan in sorted(earlier.items()):
        silos = [
            carried.silo_id
            for carried in plan.carried
            if carried.plan_id == plan_id and carried.silo_id in published_silos
        ]
        if silos and earlier_plan.base is not None:
            experts = f"the experts carried over from plan {plan_id} ({', '.join(silos)})"
            bases.append(StatedBase(experts, earlier_plan.base))
    return bases


def describe_standing(silo: PublishedSilo, plan: Plan) -> str:
    """Say what a published silo is in a plan that carries experts over; empty in a plan that carries none."""
    match silo.standing:
        case "new":
            return ""
        case "carried":
            origin = plan.origin(silo.silo_id)
            return f"was carried over from plan {origin}, without training again"
        case "again":
            return "trained for this plan, and was a silo of an earlier one"
        case "late":
            return "joined with this plan"


def _meaning(plan: Plan, silo_id: str) -> dict[str, Any]:
    """Return what gives the numbers of a silo's expert and statistics their meaning."""
    # The objective and the agreed size are those of this silo alone: what other silos do leaves its expert as it is.
    fields = plan.model_dump(mode="json")
    silo_objective = plan.objective.of(silo_id)
    expert = fields["expert"]
    return {name: fields[name] for name in _EQUAL_FIELDS} | {
        "expert": {"architecture": expert["architecture"], "dtype": expert["dtype"]},
        "objective": {
            "path": plan.objective.ensemble_path,
            silo_id: f"{silo_objective.path}, {silo_objective.prediction}",
        },
        "transform": fields.get("transform"),
        "files": _digests(plan),
        "agreed": {silo_id: fields["agreed"].get(silo_id)},
    }


def _digests(plan: Plan) -> dict[str, str]:
    """Return the digests of the public files that give experts and statistics their meaning."""
    # Two plans use the same paths for different tensors, so that only the digests tell whether they are the same.
    paths = [plan.encoder.path, plan.clustering.path, plan.sketch.path]
    if isinstance(plan.latent, Autoencoder):
        paths.append(plan.latent.path)
    return {path: plan.file(path).digest for path in paths}


def _differing_fields(name: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the innermost fields in which two values differ, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            field = f"{name}.{key}" if name else key
            yield from _differing_fields(field, old.get(key), new.get(key))
    elif old != new:
        yield name, _describe(old), _describe(new)


def _describe(value: Any) -> str:
    return "nothing" if value is None else str(value)
