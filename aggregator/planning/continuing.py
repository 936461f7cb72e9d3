"""Writes into a plan the experts of an earlier plan that its silos train on, each from its own."""

from aggregator.config import Federation
from aggregator.planning.recipe import Recipe
from ddm.errors import MissingFileError, SetupError
from ddm.io.files import read_bounded
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.continuation import check_continuation, grid_of
from ddm.protocol.learning import Expert, OwnAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.submission import submission_path


def complete_expert(
    federation: Federation, recipe: Recipe, shape: tuple[int, ...], silos: tuple[str, ...]
) -> Expert:
    """Return the recipe of the experts, completed where they are trained on from those of an earlier plan.

    Args:
        federation: the operator's folder.
        recipe: what the operator asks for.
        shape: a sample as experts see it.
        silos: those that train.

    Raises:
        MissingFileError: the earlier plan is not one of this federation.
        SetupError: none of the silos has an accepted submission to it.
    """
    expert = recipe.expert
    if not isinstance(expert.adaptation, OwnAdaptation):
        return expert
    earlier = earlier_plan(federation, expert.adaptation.plan_id)
    submissions = _accepted_submissions(federation, earlier.plan_id, silos)
    if not submissions:
        raise SetupError(
            "recipe, expert.adaptation",
            expected=f"a silo that trains with an accepted submission to {earlier.plan_id}",
            got=f"none of {', '.join(silos)}",
        )

    architecture = expert.architecture
    trained_grid = grid_of(earlier)
    if trained_grid is not None:
        # The positions of a larger image must span the range that the expert knows, so the plan names its grid.
        architecture = architecture.spanning(trained_grid, shape)
    adaptation = expert.adaptation.model_copy(update={"submissions": submissions})
    return expert.model_copy(update={"architecture": architecture, "adaptation": adaptation})


def _accepted_submissions(
    federation: Federation, plan_id: str, silos: tuple[str, ...]
) -> dict[str, str]:
    """Return the sha256 of the accepted submission of each silo that has one to this plan."""
    digests = {}
    for silo_id in silos:
        # A silo that was accepted has its own expert; one that was refused or never sent any starts from random
        # weights.
        path = federation.accepted / plan_id / silo_id / submission_path(silo_id)
        if path.is_file():
            digests[silo_id] = sha256_hex(read_bounded(path, MAX_DOCUMENT_BYTES))
    return digests


def check_continued(federation: Federation, plan: Plan) -> None:
    """Refuse a plan in which a silo would train on an expert whose weights mean something else there.

    Raises:
        ReplayError: names what differs.
    """
    adaptation = plan.expert.adaptation
    if isinstance(adaptation, OwnAdaptation):
        earlier = earlier_plan(federation, adaptation.plan_id)
        for silo_id in adaptation.submissions:
            check_continuation(earlier, plan, silo_id)


def earlier_plan(federation: Federation, plan_id: str) -> Plan:
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
            remedy="plans/ names them; aggregator status shows the present one.",
        )
    return Plan.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=f"plan {plan_id}")
