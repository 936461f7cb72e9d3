"""How many experts may a silo have? Told by the plan alone, so that whoever only counts needs no tensors."""

from ddm.protocol.plan import Plan, RandomPartition, SiloClusterPartition


def most_experts(plan: Plan) -> int:
    """Return the most experts that one silo may have."""
    partition = plan.partition
    if isinstance(partition, SiloClusterPartition):
        return plan.clustering.num_coarse
    return partition.num_parts if isinstance(partition, RandomPartition) else 1
