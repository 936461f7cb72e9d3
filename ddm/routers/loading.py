"""From a published router file to a router: which family, which tensors, built on the plan's sketch."""

from pathlib import Path
from typing import Literal

from ddm.errors import TensorFileError
from ddm.protocol.plan import LearnedRouter as LearnedSettings
from ddm.protocol.plan import Plan
from ddm.routers.base import Router
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.learned import LearnedRouter, learned_router_specs
from ddm.schedule import LinearPath
from ddm.sketch import Sketch
from ddm.tensors import load_tensors

MAX_VALUE = 1e6


def load_router(
    kind: Literal["counts", "learned"],
    path: Path,
    *,
    plan: Plan,
    sketch: Sketch,
    num_experts: int,
    t_release: float | None,
    max_bytes: int,
) -> Router:
    """Load a router whose digest has been verified.

    Args:
        kind: the family that the manifest names.
        path: the safetensors file.
        plan: gives the number of groups, the rank and the network's size.
        sketch: the plan's.
        num_experts: K.
        t_release: noise level of the sketches that a learned router was trained on.
        max_bytes: the size that the manifest lists.

    Raises:
        TensorFileError: the file is not such a router, or the manifest and the plan disagree on the family.
    """
    num_groups = plan.releases.counts.num_groups
    if kind == "counts":
        specs = counts_router_specs(num_experts, num_groups)
        tensors = load_tensors(path, specs, max_bytes=max_bytes, max_abs=MAX_VALUE)
        return CountsRouter.from_tensors(tensors, sketch, LinearPath())
    if not isinstance(plan.router, LearnedSettings) or t_release is None:
        raise TensorFileError(path.name, expected="the router family of the plan, with its t_release", got=kind)
    learned = learned_router_specs(num_experts, num_groups, sketch.rank, plan.router)
    tensors = load_tensors(path, learned, max_bytes=max_bytes, max_abs=MAX_VALUE)
    return LearnedRouter.from_tensors(tensors, sketch, plan.router, LinearPath(), t_release)
