"""Computes from a release's documents alone how much memory its experts may take, before anything is loaded."""

from ddm.footprint import opening_bytes
from ddm.protocol.encoder import TimmEncoderSpec
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.system.memory import MemoryLimit


def expert_memory_bytes(
    plan: Plan, manifest: Manifest, limit: MemoryLimit, *, beside: int, remedy: str | None = None
) -> int | None:
    """Return the maximum number of bytes of the experts' weights in memory; None where all of them fit at once.

    Args:
        plan: the plan of the verified release.
        manifest: the manifest of the same release.
        limit: on everything together.
        beside: bytes of what is done with the experts.
        remedy: what to change where the limit is too low.

    Raises:
        MemoryLimitError: the largest expert alone does not fit beside the rest.
    """
    sizes = [expert.file.bytes for expert in manifest.experts]
    fixed = opening_bytes(plan, len(sizes)) + beside
    # Sampling needs at least one expert in memory at a time.
    limit.check("memory", fixed + max(sizes), remedy)
    if isinstance(plan.encoder, TimmEncoderSpec):
        # Counting its bytes builds its network, without memory for the weights, which takes seconds.
        from ddm.encoders.timm import timm_bytes

        fixed += timm_bytes(plan.encoder)
        limit.check("memory", fixed + max(sizes), remedy)
    if fixed + sum(sizes) <= limit.bytes:
        return None
    return limit.bytes - fixed
