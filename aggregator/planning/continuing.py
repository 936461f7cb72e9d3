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


def expert_of(
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
    old, plan_id = earlier_plan(federation, expert.adaptation.plan_id), expert.adaptation.plan_id
    found = {}
    for silo_id in silos:
        path = federation.accepted / plan_id / silo_id / submission_path(silo_id)
        if path.is_file():
            found[silo_id] = sha256_hex(read_bounded(path, MAX_DOCUMENT_BYTES))
    if not found:
        expected = f"a silo that trains with an accepted submission to {plan_id}"
        raise SetupError(
            "recipe, expert.adaptation", expected=expected, got=f"none of {', '.join(silos)}"
        )
    architecture, grid = expert.architecture, grid_of(old)
    if architecture.kind != "unet" and architecture.position_grid is None and grid is not None:
        same = architecture.patch_grid(shape) == grid
        architecture = architecture.model_copy(update={"position_grid": None if same else grid})
    adaptation = expert.adaptation.model_copy(update={"submissions": found})
    return expert.model_copy(update={"architecture": architecture, "adaptation": adaptation})


def check_continued(federation: Federation, plan: Plan) -> None:
    """Refuse a plan in which a silo would train on an expert whose weights mean something else there.

    Raises:
        ReplayError: names what differs.
    """
    adaptation = plan.expert.adaptation
    if isinstance(adaptation, OwnAdaptation):
        old = earlier_plan(federation, adaptation.plan_id)
        for silo_id in adaptation.submissions:
            check_continuation(old, plan, silo_id)


def earlier_plan(federation: Federation, plan_id: str) -> Plan:
    """Read a plan that this federation signed before.

    Raises:
        MissingFileError: there is none of this id.
    """
    path = federation.plan_targets(plan_id) / "plan.json"
    if not path.is_file():
        expected, remedy = (
            "a plan that this federation signed",
            "plans/ names them; aggregator status shows the present one.",
        )
        raise MissingFileError(
            f"plan {plan_id}", expected=expected, got="no such plan", remedy=remedy
        )
    return Plan.parse(read_bounded(path, MAX_DOCUMENT_BYTES), subject=f"plan {plan_id}")
