"""Holds a release against a memory limit before anything in it is loaded, by its documents' numbers alone."""

from ddm.protocol.encoder import TimmEncoder
from ddm.protocol.footprint import opening_bytes
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.system.memory import MemoryLimit


def room_for_experts(
    plan: Plan, manifest: Manifest, limit: MemoryLimit, *, beside: int, remedy: str | None = None
) -> int | None:
    """Return the most bytes that the experts' weights may take; None where all of them fit at once.

    Args:
        plan: of the verified release.
        manifest: of the same release.
        limit: on everything together.
        beside: bytes of what is done with the experts.
        remedy: what to change where the limit is too low.

    Raises:
        MemoryLimitError: the largest expert alone does not fit beside the rest.
    """
    sizes = [expert.file.bytes for expert in manifest.experts]
    fixed = opening_bytes(plan, len(sizes)) + beside
    limit.check("memory", fixed + max(sizes), remedy)
    # only now, since its network is built to be counted, without memory
    if isinstance(plan.encoder, TimmEncoder):
        from ddm.encoders.timm import timm_bytes  # takes seconds

        fixed += timm_bytes(plan.encoder)
        limit.check("memory", fixed + max(sizes), remedy)
    return None if fixed + sum(sizes) <= limit.bytes else limit.bytes - fixed
