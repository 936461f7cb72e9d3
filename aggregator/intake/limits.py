"""Bounds the size of one submission, before any of it is received; without torch, for the ServerApp."""

from aggregator.config import Federation
from ddm.protocol.plan import Plan, max_experts_per_silo

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
    """Return the room for every submission still to come and the verified copy beside it.

    Each silo has this much of its own, so that none can fill the disk before the others have sent.
    """
    accepted = federation.accepted / plan.plan_id
    waiting = [silo_id for silo_id in plan.silos if not (accepted / silo_id).exists()]
    return 2 * len(waiting) * submission_bytes(plan)
