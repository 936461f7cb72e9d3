"""How much a plan makes this site write, computed from its numbers before the first step of training."""

import math
from pathlib import Path

from ddm.audit.attacks import names
from ddm.audit.copies import NEIGHBOURS
from ddm.audit.effort import MOST_IMAGES, effort_of
from ddm.evaluation.copies import SIDE, VOLUME_SIDE
from ddm.io.space import check_writable, require_free_space
from ddm.io.tensors import stored_bytes
from ddm.models import expected_tensors
from ddm.protocol.latent import Autoencoder
from ddm.protocol.learning import FullAdaptation, OwnAdaptation
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.statistics.of_plan import statistics_of
from ddm.training.checkpoints import KEPT
from silo.audit.holdout import num_held_out
from silo.audit.measuring import BLURRED
from silo.audit.worst import MOST_PAIRS
from silo.config import Policy, Site
from silo.data.cohort import Cohort
from silo.plan.workspace import Workspace
from silo.worker.jobs import jobs_of

# A checkpoint holds the weights, their average and two moments of the optimizer.
_COPIES = 4
_ROW_BYTES = 64  # of an image in the cohort's table
_SMALL_BYTES = 1 << 20  # documents, logs, the ledger
# of an image whose nearest ones the audit keeps, in two spaces
_NEAR_BYTES = 2 * (4 * NEIGHBOURS + 8)


def check_folders(site: Site) -> None:
    """Check that the worker can write to its own folders.

    Raises:
        DiskError: names the first that it cannot.
    """
    plans, checkpoints = site.private / "plans", site.private / "checkpoints"
    check_writable(
        [site.private, *(each for each in (plans, checkpoints) if each.exists()), site.outbox]
    )


def plan_bytes(plan: Plan, num_images: int, num_units: int) -> int:
    """Return what one plan writes into `private/` at most, without the vectors of captions, whose length varies.

    Two checkpoints of every expert stay, and a third is written beside them; where only an adaptation is trained, its
    checkpoints are small and not counted.
    """
    expert, copies = _expert_bytes(plan), _copies(plan)
    experts = max_experts_per_silo(plan) * expert * (1 + KEPT * copies) + copies * expert
    # Each statistic is kept as it was drawn and as it leaves.
    statistics = 0
    for statistic in statistics_of(plan.statistics).values():
        statistics += 2 * stored_bytes(statistic.tensor_specs(num_units))
    latents = (
        4 * math.prod(plan.expert_shape) * num_images if isinstance(plan.latent, Autoencoder) else 0
    )
    return experts + statistics + latents + _ROW_BYTES * num_images + _SMALL_BYTES


def audit_bytes(plan: Plan, num_units: int, policy: Policy) -> int:
    """Return what the leak audit writes besides at most, of one expert at a time; 0 where it cannot tell anyway.

    Two experts that it trains itself, the checkpoints of one of them, and the thumbnails, features and nearest images
    of samples and of units held out.
    """
    held = num_held_out(num_units, policy)
    if held < plan.audit.min_holdout_units or not held:
        return 0
    expert, training = _expert_bytes(plan), plan.expert.training
    num = effort_of(
        training, held, policy.audit.num_samples, reference=plan.expert.base is None
    ).num_samples
    channels, *sides = plan.data.shape
    thumbnail = channels * math.prod(
        min(side, VOLUME_SIDE if len(sides) == 3 else SIDE) for side in sides
    )
    samples = 4 * num * (thumbnail + plan.encoder.dim)
    asked = num + MOST_IMAGES * held + BLURRED
    scores = 3 * 2 * held * MOST_IMAGES * (4 * len(names()) + 8)
    shown = max_experts_per_silo(plan) * 2 * 4 * MOST_PAIRS * thumbnail
    trained = expert * (2 + (KEPT + 1) * _copies(plan))
    return trained + samples + _NEAR_BYTES * asked + scores + shown + _SMALL_BYTES


def job_bytes(plan: Plan, num_images: int) -> int:
    """Return what jobs on other machines hold at most, without the vectors of captions.

    A copy of what experts learn, and another of what the audit's own expert learns; weights and checkpoints, and the
    public expert that training starts from.
    """
    expert, copies = _expert_bytes(plan), _copies(plan)
    images = 2 * (4 * math.prod(plan.expert_shape) + 8) * num_images
    return (
        images
        + max_experts_per_silo(plan) * expert * (2 + KEPT * copies)
        + copies * expert
        + _SMALL_BYTES
    )


def _expert_bytes(plan: Plan) -> int:
    return stored_bytes(
        expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    )


def _copies(plan: Plan) -> int:
    """Return how many times the size of an expert a checkpoint is; those of adaptations are small."""
    return _COPIES if isinstance(plan.expert.adaptation, FullAdaptation | OwnAdaptation) else 0


def check_disk_space(site: Site, plan: Plan, cohort: Cohort, work: Workspace) -> None:
    """Check that the disk holds what the plan will still write.

    Raises:
        DiskError: says how much is needed, how much is free, and where.
    """
    latents = sum(path.stat().st_blocks * 512 for path in site.private.glob("latents-*"))
    whole = plan_bytes(plan, len(cohort.images), cohort.num_units)
    whole += audit_bytes(plan, cohort.num_units, site.policy())
    needed = max(whole - _written(work.folder) - latents, _SMALL_BYTES)
    folders = {site.private: needed, site.outbox: _SMALL_BYTES}
    # what leaves is copied instead of linked
    if site.outbox.stat().st_dev != site.private.stat().st_dev:
        folders[site.outbox] += plan.limits.expert_bytes * max_experts_per_silo(plan)
    settings = site.settings()
    if settings.training.launcher != "local":
        jobs = jobs_of(settings.training, settings.silo_id) or site.private
        there = next(each for each in (jobs, *jobs.parents) if each.exists())
        left = max(
            job_bytes(plan, len(cohort.images)) - _written(jobs / plan.plan_id), _SMALL_BYTES
        )
        folders[there] = folders.get(there, 0) + left
    require_free_space(folders, f"plan {plan.plan_id}")


def _written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
