"""Which of a release's weights a student starts from."""

from pathlib import Path
from typing import TYPE_CHECKING

from ddm.protocol.architecture import Architecture, Condition
from ddm.protocol.base import File

if TYPE_CHECKING:
    from ddm.loading.release import Release


def initial_weights(
    release: "Release", network: Architecture, condition: Condition
) -> tuple[Path, File] | None:
    """Return the weights that a student of this form can start from, as their folder and file; None without any.

    They are the public expert's, where the plan's experts started from one too, else those of the expert with the
    largest prior among those that predict velocities on the ensemble's path, as students do.
    """
    plan = release.plan
    # Weights fit only a network of the same form.
    if (network, condition) != (plan.expert.architecture, plan.condition):
        return None
    if plan.expert.base:
        return release.folder, plan.file(plan.expert.base)
    fitting = []
    for expert in release.manifest.experts:
        objective = plan.objective.of(expert.silo_id)
        on_ensemble_path = objective.path == plan.objective.ensemble_path
        if on_ensemble_path and objective.prediction == "velocity":
            fitting.append(expert)
    if not fitting:
        return None
    largest = max(fitting, key=lambda expert: expert.prior)
    # A carried expert is listed here, but its file is in the release of the plan that it was trained for.
    return release.folder.parent / plan.origin(largest.silo_id), largest.file
