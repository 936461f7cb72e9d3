"""Writes into a plan the experts of an earlier plan that its silos train on, each from its own."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from aggregator.config import Federation
from ddm.errors import MissingFileError, SetupError
from ddm.io.files import read_bounded
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.continuation import check_continuation, check_random_start, grid_of
from ddm.protocol.learning import Adaptation, Expert, OwnAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.submission import submission_path


@dataclass(frozen=True)
class ContinuedExperts:
    """The experts of an earlier plan that silos train on.

    Attributes:
        plan: the earlier plan.
        submissions: sha256 of the accepted submission of each silo that has one to it.
    """

    plan: Plan
    submissions: Mapping[str, str]


def read_continued(
    federation: Federation, adaptation: Adaptation, silos: Collection[str]
) -> ContinuedExperts | None:
    """Read the experts that the silos' own ones are trained on from; None where the recipe names no earlier plan.

    Args:
        federation: the operator's folder.
        adaptation: the recipe's.
        silos: those that train.

    Raises:
        MissingFileError: the earlier plan is not one of this federation.
        ReplayError: it has a base.
        SetupError: none of the silos has an accepted submission to it.
    """
    if not isinstance(adaptation, OwnAdaptation):
        return None
    plan = read_signed_plan(federation, adaptation.plan_id)
    # Here as well as in `check_continued`, which comes after minutes of fitting.
    check_random_start(plan)
    submissions = {}
    for silo_id in silos:
        # A silo that was accepted has its own expert; one that was refused or never sent any starts from random
        # weights.
        path = federation.accepted / plan.plan_id / silo_id / submission_path(silo_id)
        if path.is_file():
            submissions[silo_id] = sha256_hex(read_bounded(path, MAX_DOCUMENT_BYTES))
    if not submissions:
        raise SetupError(
            "recipe, expert.adaptation",
            expected=f"at least one training silo with an accepted submission to {plan.plan_id}",
            got=f"none of {', '.join(silos)}",
        )
    return ContinuedExperts(plan, submissions)


def complete_expert(
    expert: Expert, continued: ContinuedExperts | None, shape: tuple[int, ...]
) -> Expert:
    """Return the recipe of the experts, completed where they are trained on from those of an earlier plan.

    Args:
        expert: as the operator asks for it.
        continued: see `read_continued`.
        shape: a sample as experts see it.
    """
    if continued is None:
        return expert
    architecture = expert.architecture
    trained_grid = grid_of(continued.plan)
    if trained_grid is not None:
        # The positions of a larger image must span the range that the expert knows, so the plan names its grid.
        architecture = architecture.spanning(trained_grid, shape)
    adaptation = expert.adaptation.model_copy(update={"submissions": dict(continued.submissions)})
    return expert.model_copy(update={"architecture": architecture, "adaptation": adaptation})


def check_continued(plan: Plan, continued: ContinuedExperts | None) -> None:
    """Refuse a plan in which a silo would train on an expert whose weights mean something else there.

    Raises:
        ReplayError: names what differs.
    """
    if continued is None:
        return
    for silo_id in continued.submissions:
        check_continuation(continued.plan, plan, silo_id)


def read_signed_plan(federation: Federation, plan_id: str) -> Plan:
    """Read a plan that this federation signed before.

    Raises:
        MissingFileError: there is none of this id.
    """
    path = federation.plan_targets(plan_id) / "plan.json"
    if not path.is_file():
        raise MissingFileError(
            f"plan {plan_id}",
            expected="a plan that this federation signed",
            got="no such plan",
            remedy="The folders in plans/ name them; `aggregator status FED` shows the present one.",
        )
    return Plan.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=f"plan {plan_id}")
