"""From a published router file to a router: which family, which tensors, built on the plan's sketch."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ddm.errors import DocumentError, TensorFileError
from ddm.protocol.manifest import PublishedRouter
from ddm.protocol.plan import LearnedRouter as LearnedSettings
from ddm.protocol.plan import Plan
from ddm.routers.base import Router
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.learned import LearnedRouter, learned_router_specs
from ddm.schedule import LinearPath
from ddm.sketch import Sketch
from ddm.tensors import TensorSpec, load_tensors

MAX_VALUE = 1e6
PRIOR_TOLERANCE = 1e-9


def load_router(published: PublishedRouter, folder: Path, *, plan: Plan, sketch: Sketch) -> Router:
    """Load a router.

    Args:
        published: what the verified manifest says of it: its family, its file, what it was trained on.
        folder: holds the file.
        plan: gives the number of groups, the rank and the network's size.
        sketch: the plan's.

    Raises:
        DocumentError: a temperature or a training prior that this version would not apply.
        DigestError: the file is not the one listed.
        TensorFileError: the file is not such a router, or the manifest and the plan disagree on the family.
    """
    _check_applied(published)
    file = published.file

    def load(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        return load_tensors(folder / file.path, specs, max_bytes=file.bytes, max_abs=MAX_VALUE, digest=file.digest)

    num_experts, num_groups = len(published.training_prior), plan.releases.counts.num_groups
    if published.kind == "counts":
        return CountsRouter.from_tensors(load(counts_router_specs(num_experts, num_groups)), sketch, LinearPath())
    if not isinstance(plan.router, LearnedSettings) or published.t_release is None:
        expected = "the router family of the plan, with its t_release"
        raise TensorFileError(file.path, expected=expected, got=published.kind)
    tensors = load(learned_router_specs(num_experts, num_groups, sketch.rank, plan.router))
    return LearnedRouter.from_tensors(tensors, sketch, plan.router, LinearPath(), published.t_release)


def _check_applied(published: PublishedRouter) -> None:
    """Refuse what would be ignored: a router that speaks in another scale, or leans to silos it saw more of."""
    if published.temperature != 1.0:
        got = f"{published.temperature:g}"
        raise DocumentError("manifest.json, router.temperature", expected="1, the only one applied", got=got)
    share = 1.0 / len(published.training_prior)
    if any(abs(prior - share) > PRIOR_TOLERANCE for prior in published.training_prior):
        expected = "equal shares, the only ones applied"
        raise DocumentError("manifest.json, router.training_prior", expected=expected, got="others")
