"""Loads a published router: selects its family, checks its tensors, builds it on the plan's sketch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.errors import DocumentError, MathError, TensorFileError
from ddm.io.tensors import TensorSpec, load_tensors
from ddm.protocol.manifest import PublishedExpert, PublishedRouter
from ddm.protocol.plan import Plan
from ddm.protocol.routers import LearnedRouter as LearnedSettings
from ddm.protocol.routers import SamplesRouter as SamplesSettings
from ddm.routers.base import Router
from ddm.routers.calibration import Calibrated
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.learned import LearnedRouter, learned_router_specs
from ddm.routers.samples import SamplesRouter, samples_router_specs
from ddm.routers.sketch import Sketch

MAX_VALUE = 1e6

Load = Callable[[Mapping[str, TensorSpec]], dict[str, Tensor]]


def load_router(
    published: PublishedRouter,
    folder: Path,
    *,
    plan: Plan,
    sketch: Sketch,
    experts: Sequence[PublishedExpert],
) -> Calibrated:
    """Load a router, with the manifest's temperature and training prior applied.

    Args:
        published: its family, file and calibration, from the verified manifest.
        folder: holds the file.
        plan: gives the number of groups, the released dimensions and the network's size.
        sketch: the plan's.
        experts: the manifest's, in the router's class order.

    Raises:
        DocumentError: a temperature or a training prior out of range, or a training prior of other experts.
        DigestError: the file differs from the one listed.
        TensorFileError: the file is not such a router, its values are not shares, or the manifest and the
            plan disagree on the family.
    """
    file, num_experts = published.file, len(experts)
    if len(published.training_prior) != num_experts:
        got = str(len(published.training_prior))
        raise DocumentError(
            "manifest.json, router.training_prior", expected=f"{num_experts} shares", got=got
        )

    def load(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        return load_tensors(
            folder / file.path, specs, max_bytes=file.bytes, max_abs=MAX_VALUE, digest=file.digest
        )

    try:
        router = _load(published, load, plan, sketch, experts)
    except MathError as error:
        raise TensorFileError(
            f"{file.path}, {error.subject}", expected=error.expected, got=error.got
        ) from error
    try:
        path = path_named(plan.objective.ensemble_path)
        return Calibrated(router, published.temperature, published.training_prior, path)
    except MathError as error:
        raise DocumentError(
            f"manifest.json, {error.subject}", expected=error.expected, got=error.got
        ) from error


def _load(
    published: PublishedRouter,
    load: Load,
    plan: Plan,
    sketch: Sketch,
    experts: Sequence[PublishedExpert],
) -> Router:
    """Return the router built from the file's tensors."""
    num_experts, num_groups, path = (
        len(experts),
        plan.statistics.counts.num_groups,
        path_named(plan.objective.ensemble_path),
    )
    settings, released = plan.router, plan.statistics
    if published.kind == "counts":
        return CountsRouter.from_tensors(
            load(counts_router_specs(num_experts, num_groups)), sketch, path
        )
    if published.kind != settings.kind:
        expected = f"a router of the kind counts or {settings.kind}, as the plan says"
        raise TensorFileError(published.file.path, expected=expected, got=published.kind)
    if isinstance(settings, LearnedSettings) and (
        published.t_release is not None or not released.private
    ):
        silo_E = silo_numbers(experts)
        tensors = load(learned_router_specs(silo_E, sketch, settings, path))
        return LearnedRouter.from_tensors(tensors, sketch, settings, path, silo_E)
    if isinstance(settings, SamplesSettings):
        shape, told = plan.expert_shape, plan.condition
        tensors = load(samples_router_specs(num_experts, shape, settings, told))
        knows = knows_shares(plan, settings)
        return SamplesRouter.from_tensors(
            tensors, num_experts, shape, settings, path, told, knows_shares=knows
        )
    expected = "a router with the t_release of the sketches it was made from"
    raise TensorFileError(published.file.path, expected=expected, got="no t_release")


def knows_shares(plan: Plan, settings: SamplesSettings) -> bool:
    """Whether a plan's samples router learns from labels who holds a condition; what experts are told says nothing."""
    return settings.labels != "experts" or not plan.statistics.private


def silo_numbers(experts: Sequence[PublishedExpert]) -> tuple[int, ...]:
    """Return the number of each expert's silo, silos numbered as they first appear."""
    order = list(dict.fromkeys(expert.silo_id for expert in experts))
    return tuple(order.index(expert.silo_id) for expert in experts)
