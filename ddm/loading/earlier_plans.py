"""Reads the plans from which a plan carries experts over, and checks that these mean the same there."""

from collections.abc import Callable, Mapping

from ddm.errors import DigestError, RoleError
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.growth import check_carried
from ddm.protocol.plan import Plan


def read_earlier_plans(plan: Plan, read: Callable[[File], bytes]) -> Mapping[str, Plan]:
    """Return the plans from which experts are carried over, by id.

    Args:
        plan: verified; it lists the documents with their digests.
        read: returns the bytes of a listed file.

    Raises:
        DigestError: a document is not the listed one.
        DocumentError: a document does not parse.
        FederationError: a document is of another federation.
        ReplayError: an expert would mean something else in this plan than in its own.
    """
    earlier_plans: dict[str, Plan] = {}
    for path, digest in plan.earlier_plans.items():
        # The file may have changed since it was verified, so that the digest is checked on these bytes.
        data = read(plan.file(path))
        if sha256_hex(data) != digest:
            raise DigestError(
                path,
                expected=f"sha256 {digest[:16]}...",
                got=f"sha256 {sha256_hex(data)[:16]}...",
            )
        earlier_plan = Plan.parse(data, subject=path)
        earlier_plans[earlier_plan.plan_id] = earlier_plan
    for carried in plan.carried:
        if carried.plan_id not in earlier_plans:
            raise DigestError(
                carried.plan_path,
                expected=f"the document of plan {carried.plan_id}",
                got=f"documents of {', '.join(sorted(earlier_plans))[:200]}",
            )
        # The aggregator checked this before it signed, and could have signed all the same: readers check it themselves.
        check_carried(carried, earlier_plans[carried.plan_id], plan)
    return earlier_plans


def check_origins(plan: Plan, origins: Mapping[str, str]) -> None:
    """Check that targets delegates to each silo the role of the plan for which the plan says that it signs.

    Args:
        plan: verified.
        origins: silo id to the plan in its role's name.

    Raises:
        RoleError: names the silo.
    """
    for silo_id, plan_id in origins.items():
        expected = plan.origin(silo_id)
        # A delegation to another plan's role would let an old signature count for this plan (replay).
        if plan_id != expected or silo_id not in plan.members:
            raise RoleError(
                "metadata/targets.json",
                expected=f"a silo of the plan with the role of {expected}",
                got=f"{silo_id} with the role of plan {plan_id}",
            )
