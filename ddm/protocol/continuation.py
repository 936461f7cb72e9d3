"""Whether a silo's expert of an earlier plan may be trained on in a later one; rules only, no file, no network."""

from typing import Any

from ddm.errors import ReplayError
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan


def grid_of(plan: Plan) -> tuple[int, int] | None:
    """Return the grid of patches whose places an expert of this plan knows; None for a network without patches."""
    return plan.expert.architecture.position_span(plan.expert_shape)


def check_random_start(old: Plan) -> None:
    """Refuse to train on the experts of a plan that has a base.

    The new plan would not state that base: neither its licence, nor the silos whose images it learned, whose consent
    and privacy depend on it.

    Args:
        old: the plan for which silos trained the experts.

    Raises:
        ReplayError: it has a base.
    """
    if old.base is not None:
        raise ReplayError(
            f"experts of plan {old.plan_id}, to be trained on",
            expected="experts whose training did not start from a base",
            got=f"a plan with a base: {old.base.words}",
            remedy="Start from one expert of its release instead, so that the plan states what that expert learned: "
            "`aggregator plan FED --recipe FILE --public FILE --from-release RELEASE`.",
        )


def check_continuation(old: Plan, new: Plan, silo_id: str) -> None:
    """Refuse to train a silo's expert on where its weights would mean something else than what they learned.

    Image size, training recipe and public parts may differ. Architecture, objective, condition and the list of a silo's
    experts may not; positions must span the range that the expert knows. Neither may have a base.

    Args:
        old: the plan for which the silo trained the expert.
        new: the plan in which it trains it on.
        silo_id: the silo.

    Raises:
        FederationError: the old plan is one of another federation.
        ReplayError: names what differs; or the old plan has a base.
    """
    old.check_federation(
        new.root_digest, f"plan {new.plan_id}, experts of {silo_id} from plan {old.plan_id}"
    )
    check_random_start(old)
    old_fields = _compared_fields(old, silo_id)
    new_fields = _compared_fields(new, silo_id)
    if isinstance(new.partition, SiloClusterPartition):
        # Experts are named by clusters, and the new plan fits its own: equal names would not mean equal images.
        new_fields["partition"] = "silo_cluster, whose clusters are those of one plan"
    for name, value in old_fields.items():
        if new_fields[name] != value:
            raise ReplayError(
                f"plan {new.plan_id}, experts of {silo_id} from plan {old.plan_id}: {name}",
                expected=f"{value}, as they were trained",
                got=f"{new_fields[name]}",
                remedy="Keep what the earlier plan states; only sizes of images, the training recipe and the public "
                "parts may change where experts are trained on.",
            )


def _compared_fields(plan: Plan, silo_id: str) -> dict[str, Any]:
    """Return what must be the same in both plans."""
    # What is left out here says how an expert is trained, and not what its weights mean.
    condition = plan.condition.model_dump(mode="json", exclude={"drop"})
    partition = plan.partition.model_dump(mode="json", exclude={"min_images"})
    # Grids are compared as they take effect: one that is named may equal one that follows from the size of the images.
    architecture = plan.expert.architecture.model_dump(mode="json", exclude={"position_grid"})
    objective = plan.objective.of(silo_id)
    return {
        "expert.architecture": architecture,
        "expert.architecture.position_grid": grid_of(plan),
        # The sides may change; the number of channels is the width of the network's first layer.
        "channels of a sample": plan.expert_shape[0],
        "objective": f"{objective.path}, {objective.prediction}",
        "condition": condition,
        "partition": partition,
    }
