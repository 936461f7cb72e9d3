"""How much a plan makes this site write, computed from its numbers before the first step of training."""

import math
from collections.abc import Mapping
from pathlib import Path

from ddm.io.space import check_writable, require_room
from ddm.io.tensors import TensorSpec, stored_bytes
from ddm.models import expected_tensors
from ddm.privacy.plan_cost import Kind, mechanisms
from ddm.protocol.latent import Autoencoder
from ddm.protocol.learning import FullAdaptation, OwnAdaptation
from ddm.protocol.plan import Plan, most_experts
from ddm.routers.conditional import class_counts_specs
from ddm.routers.counts import counts_specs
from ddm.routers.moments import moments_specs
from ddm.routers.sketch import released_sketch_specs
from ddm.training.checkpoints import KEPT
from silo.config import Site
from silo.data.cohort import Cohort
from silo.plan.workspace import Workspace

# A checkpoint holds the weights, their average and two moments of the optimizer.
_COPIES = 4
_ROW_BYTES = 64  # of an image in the cohort's table
_SMALL_BYTES = 1 << 20  # documents, logs, the ledger


def check_folders(site: Site) -> None:
    """Check that the worker can write to its own folders.

    Raises:
        DiskError: names the first that it cannot.
    """
    plans, checkpoints = site.private / "plans", site.private / "checkpoints"
    check_writable([site.private, *(each for each in (plans, checkpoints) if each.exists()), site.outbox])


def statistic_bytes(plan: Plan, num_units: int) -> Mapping[Kind, int]:
    """Return the size of each statistic's file."""
    specs: dict[Kind, dict[str, TensorSpec]] = {
        "counts": counts_specs(plan),
        "class_counts": class_counts_specs(plan),
        "moments": moments_specs(plan),
        "sketch": released_sketch_specs(plan, num_units),
    }
    return {kind: stored_bytes(specs[kind]) for kind in mechanisms(plan)}


def plan_bytes(plan: Plan, num_images: int, num_units: int) -> int:
    """Return what one plan writes into `private/` at most, without the vectors of captions, whose length varies.

    Two checkpoints of every expert stay, and a third is written beside them; where only an adaptation is trained, its
    checkpoints are small and not counted.
    """
    expert = stored_bytes(expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition))
    copies = _COPIES if isinstance(plan.expert.adaptation, FullAdaptation | OwnAdaptation) else 0
    experts = most_experts(plan) * expert * (1 + KEPT * copies) + copies * expert
    # Each statistic is kept as it was drawn and as it leaves.
    statistics = 2 * sum(statistic_bytes(plan, num_units).values())
    latents = 4 * math.prod(plan.expert_shape) * num_images if isinstance(plan.latent, Autoencoder) else 0
    return experts + statistics + latents + _ROW_BYTES * num_images + _SMALL_BYTES


def check_room(site: Site, plan: Plan, cohort: Cohort, work: Workspace) -> None:
    """Check that the disk holds what the plan will still write.

    Raises:
        DiskError: says how much is needed, how much is free, and where.
    """
    latents = sum(path.stat().st_blocks * 512 for path in site.private.glob("latents-*"))
    needed = max(plan_bytes(plan, len(cohort.images), cohort.num_units) - _written(work.folder) - latents, _SMALL_BYTES)
    folders = {site.private: needed, site.outbox: _SMALL_BYTES}
    if site.outbox.stat().st_dev != site.private.stat().st_dev:  # what leaves is copied instead of linked
        folders[site.outbox] += plan.limits.expert_bytes * most_experts(plan)
    require_room(folders, f"plan {plan.plan_id}")


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
