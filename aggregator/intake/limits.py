"""How much may one submission be? Asked before anything of it is here, so by programs that import no torch."""

from ddm.protocol.plan import Plan, most_experts
from ddm.protocol.submission import statistic_terms

MAX_OTHER_ENTRIES = 32
MAX_DOCUMENTS_BYTES = 16 << 20


def submission_bytes(plan: Plan) -> int:
    """Return the most bytes that a submission of `plan` may have: its experts, its statistics, its documents."""
    statistics = len(statistic_terms(plan.statistics)) * plan.limits.statistic_bytes
    return most_experts(plan) * plan.limits.expert_bytes + statistics + MAX_DOCUMENTS_BYTES


def submission_entries(plan: Plan) -> int:
    """Return the most files and folders that a submission of `plan` may have: each expert has a folder of its own."""
    return MAX_OTHER_ENTRIES + 2 * most_experts(plan)
