"""Estimates what a plan will take at this site, before its training begins."""

from dataclasses import replace

from ddm.errors import ArchipelagoError
from ddm.planning.estimates import estimate_on_devices, estimate_work
from ddm.system.speed import matrix_product_rate
from silo.audit.holdout import num_holdout_units
from silo.config import Site
from silo.plan.acceptance import load_accepted
from silo.worker.status import PlanEstimate, TrainingTime

_THIS_MACHINE = "this machine, one thread"


def estimate_plan(site: Site, plan_id: str, plan_digest: str) -> PlanEstimate | None:
    """Return what a verified plan takes here and on named devices; None where the site's copy cannot be read."""
    # A status shows what can be read, also where something is damaged: it is what a person types first.
    try:
        plan = load_accepted(site, plan_id, plan_digest).plan
        settings = site.settings()
        work = estimate_work(plan, settings.silo_id, settings.batch_parts)
        num_units = plan.agreed[settings.silo_id].units(plan.statistics.unit)
        # Agreed is the most that the site may bring: where even that is too few, no audit runs.
        if num_holdout_units(num_units, site.policy()) < plan.audit.min_holdout_units:
            work = replace(work, audit_flops=0.0)
    except (ArchipelagoError, OSError):
        return None
    rate = matrix_product_rate()
    times = {_THIS_MACHINE: TrainingTime(work.training_flops / rate, work.audit_flops / rate)}
    for estimate in estimate_on_devices(work):
        times[estimate.device.name] = TrainingTime(estimate.train_s, estimate.audit_s)
    return PlanEstimate(
        memory_bytes=work.memory_bytes,
        disk_bytes=work.disk_bytes,
        times=times,
    )
