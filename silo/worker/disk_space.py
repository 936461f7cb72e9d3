"""How much a plan makes this site write, computed from its numbers before the first step of training."""

import math
from pathlib import Path

from ddm.audit.attacks import names
from ddm.audit.copies import NEIGHBOURS
from ddm.audit.effort import MAX_IMAGES_PER_UNIT, NUM_ATTACKED_EXPERTS, effort_of
from ddm.evaluation.copies import num_pixel_values
from ddm.io.space import check_writable, require_free_space
from ddm.planning.estimates import checkpoint_bytes, expert_bytes, plan_bytes
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.training.checkpoints import KEPT
from silo.audit.holdout import num_holdout_units
from silo.audit.measuring import MAX_BLURRED
from silo.audit.worst import MAX_PAIRS
from silo.config import Policy, Site
from silo.data.cohort import Cohort
from silo.plan.workspace import Workspace
from silo.worker.jobs import jobs_of

# Documents, logs, the ledger.
_SMALL_BYTES = 1 << 20
# Of an image whose nearest ones the audit keeps, in two spaces: distances and numbers.
_NEIGHBOURS_BYTES = 2 * (4 * NEIGHBOURS + 8)
_FLOAT_BYTES = 4


def check_folders(site: Site) -> None:
    """Check that the worker can write to its own folders.

    Raises:
        DiskError: names the first that it cannot.
    """
    folders = [site.private]
    for name in ("plans", "checkpoints"):
        if (site.private / name).exists():
            folders.append(site.private / name)
    folders.append(site.outbox)
    check_writable(folders)


def audit_bytes(plan: Plan, num_units: int, policy: Policy) -> int:
    """Return what the leak audit writes besides at most, of one expert at a time; 0 where it is inconclusive anyway.

    The experts that it trains itself, the checkpoints of one of them, and the thumbnails, features and nearest images
    of samples and of units held out.
    """
    num_holdout = num_holdout_units(num_units, policy)
    if num_holdout < plan.audit.min_holdout_units or not num_holdout:
        return 0
    effort = effort_of(
        plan.expert.training,
        num_holdout,
        policy.audit.num_samples,
        trains_reference=plan.expert.base is None,
    )
    num_samples = effort.num_samples
    thumbnail_values = num_pixel_values(plan.data.shape)
    trained = (NUM_ATTACKED_EXPERTS - 1) * expert_bytes(plan) + (KEPT + 1) * checkpoint_bytes(plan)
    samples = _FLOAT_BYTES * num_samples * (thumbnail_values + plan.encoder.dim)
    neighbours = _NEIGHBOURS_BYTES * (num_samples + MAX_IMAGES_PER_UNIT * num_holdout + MAX_BLURRED)
    # Scores of members and of units held out.
    scores = (
        NUM_ATTACKED_EXPERTS
        * 2
        * num_holdout
        * MAX_IMAGES_PER_UNIT
        * (_FLOAT_BYTES * len(names()) + 8)
    )
    worst_pairs = max_experts_per_silo(plan) * 2 * _FLOAT_BYTES * MAX_PAIRS * thumbnail_values
    return trained + samples + neighbours + scores + worst_pairs + _SMALL_BYTES


def job_bytes(plan: Plan, num_images: int) -> int:
    """Return what jobs on other machines hold at most, without the vectors of captions.

    A copy of what experts learn, and another of what the audit's own expert learns; weights and checkpoints, and the
    public expert that training starts from.
    """
    checkpoint = checkpoint_bytes(plan)
    images = 2 * (_FLOAT_BYTES * math.prod(plan.expert_shape) + 8) * num_images
    experts = max_experts_per_silo(plan) * (2 * expert_bytes(plan) + KEPT * checkpoint) + checkpoint
    return images + experts + _SMALL_BYTES


def check_disk_space(site: Site, plan: Plan, cohort: Cohort, work: Workspace) -> None:
    """Check that the disk holds what the plan will still write.

    Raises:
        DiskError: says how much is needed, how much is free, and where.
    """
    settings = site.settings()
    # Blocks of 512 bytes on every file system (stat(2)): what takes up the disk by now.
    latents = sum(path.stat().st_blocks * 512 for path in site.private.glob("latents-*"))
    in_all = plan_bytes(plan, len(cohort.images), cohort.num_units)
    in_all += audit_bytes(plan, cohort.num_units, site.policy())
    still_to_write = max(in_all - _written_bytes(work.folder) - latents, _SMALL_BYTES)
    needed = {site.private: still_to_write, site.outbox: _SMALL_BYTES}
    if site.outbox.stat().st_dev != site.private.stat().st_dev:
        # On another file system, what leaves is copied instead of linked.
        needed[site.outbox] += plan.limits.expert_bytes * max_experts_per_silo(plan)
    if settings.training.launcher != "local":
        jobs = jobs_of(settings.training, settings.silo_id) or site.private
        # The folder of a plan's jobs may not be there yet; the disk is that of its nearest parent.
        jobs_disk = next(folder for folder in (jobs, *jobs.parents) if folder.exists())
        in_jobs = job_bytes(plan, len(cohort.images)) - _written_bytes(jobs / plan.plan_id)
        needed[jobs_disk] = needed.get(jobs_disk, 0) + max(in_jobs, _SMALL_BYTES)
    require_free_space(needed, f"plan {plan.plan_id}")


def _written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
