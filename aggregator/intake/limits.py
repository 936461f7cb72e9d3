"""Bounds the size of one submission, before any of it is received; without torch, for the ServerApp."""

from aggregator.config import Federation
from ddm.protocol.plan import Plan, max_experts_per_silo

# Documents, metadata, statistics and their folders.
MAX_OTHER_ENTRIES = 32
MAX_DOCUMENTS_BYTES = 16 << 20


def submission_bytes(plan: Plan) -> int:
    """Return the most bytes of a submission for `plan`: its experts, its statistics, its documents."""
    statistics = len(plan.statistics.terms) * plan.limits.statistic_bytes
    return max_experts_per_silo(plan) * plan.limits.expert_bytes + statistics + MAX_DOCUMENTS_BYTES


def submission_entries(plan: Plan) -> int:
    """Return the most files and folders of a submission for `plan`: each expert has a folder of its own."""
    return MAX_OTHER_ENTRIES + 2 * max_experts_per_silo(plan)


def bytes_to_come(federation: Federation, plan: Plan) -> int:
    """Return the disk space for every submission still to come and the verified copy beside it.

    Each silo has this much of its own, so that none can fill the disk before the others have sent.
    """
    accepted = federation.accepted / plan.plan_id
    # One whose submission was accepted sends no further one.
    num_silos = sum(not (accepted / silo_id).exists() for silo_id in plan.silos)
    return 2 * num_silos * submission_bytes(plan)
