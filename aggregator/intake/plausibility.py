"""Holds received statistics to what honest noise can produce: opened strictly, then checked against `intake.bounds`.

The statistics decide which experts exist and shape the router for all silos; the bounds limit what one silo can do to
them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from aggregator.intake.bounds import (
    cell_noise_bound,
    sketch_norm_bound,
    total_noise_bound,
)
from ddm.diffusion.path import path_named
from ddm.errors import TensorFileError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.loading.plan import sketch_noise_level
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission
from ddm.routers.conditional import class_counts_specs
from ddm.routers.counts import counts_specs
from ddm.routers.sketch import Sketch, released_sketch_specs

# Shape legend: N units, R sketch dimensions.


def statistic_specs(kind: str, plan: Plan, num_units: int) -> dict[str, TensorSpec]:
    """Return the tensors that the file of a statistic of this kind must hold."""
    specs: Mapping[str, Callable[[], dict[str, TensorSpec]]] = {
        "counts": lambda: counts_specs(plan),
        "class_counts": lambda: class_counts_specs(plan),
        "sketch": lambda: released_sketch_specs(plan, num_units),
    }
    return specs[kind]()


def check_statistics(
    submission: Submission, files: Mapping[str, Path], plan: Plan, sketch: Sketch
) -> Tensor:
    """Open every statistic and refuse values that honest noise cannot explain.

    Args:
        submission: its statistics are exactly those of the plan.
        files: path of each file.
        plan: the plan.
        sketch: the plan's.

    Returns:
        The noised histogram over groups, shape (G,), int64.

    Raises:
        TensorFileError: tensors that differ from those of the plan, or values out of bounds.
    """
    num_units, found = submission.num_units, {}
    for statistic in submission.statistics:
        name, specs = statistic.file.path, statistic_specs(statistic.kind, plan, num_units)
        tensors = found[statistic.kind] = load_tensors(
            files[name], specs, max_bytes=plan.limits.statistic_bytes
        )
        if statistic.kind == "sketch":
            _check_sketches(tensors["sketch"], plan, sketch, name)
        else:
            _check_histogram(tensors["counts"], statistic.epsilon, num_units, name)
    return found["counts"]["counts"]


def _check_histogram(counts: Tensor, epsilon: float, num_units: int, name: str) -> None:
    """Check each count against [0, n_k] and their sum against n_k, within their noise, without overflow."""
    cells = [int(count) for count in counts.flatten().tolist()]
    reach = cell_noise_bound(epsilon, len(cells))
    if min(cells) < -reach or max(cells) > num_units + reach:
        got = f"counts from {min(cells)} to {max(cells)}"
        raise TensorFileError(
            name, expected=f"counts within [{-reach}, {num_units + reach}]", got=got
        )
    reach = total_noise_bound(epsilon, len(cells))
    if abs(sum(cells) - num_units) > reach:
        expected = f"counts with a sum within {reach} of the {num_units} units"
        raise TensorFileError(name, expected=expected, got=f"a sum of {sum(cells)}")


def _check_sketches(sketch_NR: Tensor, plan: Plan, sketch: Sketch, name: str) -> None:
    path, t_r = (
        path_named(plan.objective.ensemble_path),
        torch.tensor(sketch_noise_level(plan, sketch), dtype=torch.float64),
    )
    num_rows, rank = sketch_NR.shape
    most = sketch_norm_bound(
        float(path.alpha(t_r)), float(path.sigma(t_r)), sketch.scale, rank, num_rows
    )
    if (norm := float(sketch_NR.double().norm(dim=1).max())) > most:
        raise TensorFileError(
            name, expected=f"rows with a norm of at most {most:.4g}", got=f"a norm of {norm:.4g}"
        )
