"""What is exported: a network with all that describes it, from a student or a verified release."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ddm.distillation.student import build_student, read_record
from ddm.encoders.autoencoder import Latent
from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.footprint import sampling_bytes
from ddm.loading.ensemble import build_ensemble
from ddm.loading.memory import expert_memory_bytes
from ddm.loading.release import Release
from ddm.protocol.architecture import Architecture, Condition, NoCondition, Shape
from ddm.protocol.data import DataSpec
from ddm.protocol.latent import LatentSpec
from ddm.protocol.learning import ExpertObjective
from ddm.routers.base import Router
from ddm.system.memory import memory_limit
from ddm.system.progress import ProgressCallback

_MEMORY_REMEDY = "Export on a machine with more memory."
_MAX_SHOWN = 400
# Of a trace, which calls the network on two samples.
_TRACED_SAMPLES = 2


@dataclass(frozen=True)
class ModelOrigin:
    """Where an exported network comes from, as its card states it.

    Attributes:
        name: what it is, for people.
        plan_id: the plan of the release.
        version: the version of the release.
        manifest_digest: the digest of the release's manifest, which lists every file.
        root_fingerprint: the fingerprint of the root of trust.
        weights_digest: the digest of the file whose weights it has.
        licence: the licence of the release; None where the source does not state it.
        is_verified: whether a signed release was verified; the record of a student is not signed.
    """

    name: str
    plan_id: str
    version: int
    manifest_digest: str
    root_fingerprint: str
    weights_digest: str
    licence: str | None
    is_verified: bool


@dataclass(frozen=True)
class ExportedModel:
    """A network to export; called as ``network(x_B, t_B)`` or ``network(x_B, t_B, condition)``.

    Attributes:
        network: returns the velocity, or a router's log-likelihoods.
        output: the name of what it returns.
        shape: the shape of one sample in its space.
        condition: the kind of condition that it takes.
        data: shape and range of one decoded sample.
        latent_spec: the document of its space.
        latent: decodes its space.
        origin: where it comes from.
    """

    network: nn.Module
    output: str
    shape: Shape
    condition: Condition
    data: DataSpec
    latent_spec: LatentSpec
    latent: Latent
    origin: ModelOrigin


@dataclass(frozen=True)
class ExportedExpert(ExportedModel):
    """A student, or one expert, whose network returns the velocity on the ensemble's path.

    Attributes:
        architecture: the document of its network.
        conversion: the objective that it was trained for, where its answers are converted; None where they are the
            velocity as they are.
    """

    architecture: Architecture
    conversion: ExpertObjective | None = None


class RouterNetwork(nn.Module):
    """A router as a network: ``log p(x_t | k, t)`` of every expert, up to a term common to all, shape (B, K)."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router
        # Networks within the router, so that a trace finds their weights.
        self.parts = nn.ModuleList(_networks_in(router))

    def forward(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return the log-likelihoods."""
        return self.router.log_likelihood(x_B, t_B)


def _networks_in(value: Any) -> list[nn.Module]:
    """Return the networks among the attributes of a router, and of the routers within it."""
    if isinstance(value, nn.Module):
        return [value]
    networks = []
    if isinstance(value, Router):
        for part in vars(value).values():
            networks += _networks_in(part)
    return networks


def open_student(weights: Path) -> ExportedExpert:
    """Load a student by the record beside its weights, within the memory that is available.

    Raises:
        MissingFileError, DocumentError, DigestError, ShapeError, TensorFileError: see
            `ddm.distillation.student.load_student`.
        MemoryLimitError: it does not fit; nothing was loaded.
    """
    record = read_record(weights)
    needed_bytes = record.sampling_bytes(num=_TRACED_SAMPLES, batch=_TRACED_SAMPLES, steps=1)
    memory_limit().check("memory", needed_bytes, _MEMORY_REMEDY)
    student = build_student(record, weights)
    origin = ModelOrigin(
        name=f"A student of {record.source.plan_id}",
        plan_id=record.source.plan_id,
        version=record.source.version,
        manifest_digest=record.source.manifest,
        root_fingerprint=record.source.root,
        weights_digest=record.file.digest,
        licence=None,
        is_verified=False,
    )
    return ExportedExpert(
        network=cast(nn.Module, student.experts[0]),
        output="velocity",
        shape=record.latent.shape(record.data.shape),
        condition=record.condition,
        data=record.data,
        latent_spec=record.latent,
        latent=student.latent,
        origin=origin,
        architecture=record.architecture,
    )


def open_expert(release: Release, expert_id: str, on_progress: ProgressCallback) -> ExportedExpert:
    """Load one expert of a verified release; of a release on a host it alone is fetched.

    Args:
        release: the release.
        expert_id: the expert's name.
        on_progress: see `ddm.loading.release.Release.fetch_experts`.

    Raises:
        TrustError, TransportError, DiskError: see `ddm.loading.release.Release.fetch_experts`.
        SetupError: the release has no expert of this name.
        MemoryLimitError: it does not fit into memory; nothing was loaded.
        DigestError, TensorFileError: see `ddm.loading.ensemble.build_ensemble`.
    """
    plan = release.plan
    experts = release.manifest.experts
    names = [expert.expert_id for expert in experts]
    if expert_id not in names:
        raise SetupError(
            "--expert",
            expected=f"one of {', '.join(names)[:_MAX_SHOWN]}",
            got=repr(expert_id[:_MAX_SHOWN]),
        )
    number = names.index(expert_id)
    published = experts[number]
    release.fetch_experts([number], on_progress)
    ensemble = _open_lazily(release)
    objective = plan.objective.of(published.silo_id)
    is_velocity = objective.prediction == "velocity"
    conversion: ExpertObjective | None = objective
    if is_velocity and objective.path == plan.objective.ensemble_path:
        conversion = None
    return ExportedExpert(
        network=cast(nn.Module, ensemble.experts[number]),
        output="velocity",
        shape=plan.expert_shape,
        condition=plan.condition,
        data=plan.data,
        latent_spec=plan.latent,
        latent=ensemble.latent,
        origin=_release_origin(release, f"Expert {expert_id}", published.file.digest),
        architecture=plan.expert.architecture,
        conversion=conversion,
    )


def open_router(release: Release) -> ExportedModel:
    """Load the router of a verified release; it takes no condition.

    Raises:
        MemoryLimitError, DigestError, TensorFileError: see `open_expert`.
    """
    plan = release.plan
    ensemble = _open_lazily(release)
    origin = _release_origin(release, "The router", release.manifest.router.file.digest)
    return ExportedModel(
        network=RouterNetwork(cast(Router, ensemble.router)).eval().requires_grad_(False),
        output="log_likelihood",
        shape=plan.expert_shape,
        condition=NoCondition(),
        data=plan.data,
        latent_spec=plan.latent,
        latent=ensemble.latent,
        origin=origin,
    )


def _open_lazily(release: Release) -> Ensemble:
    """Build the ensemble so that an expert is loaded when it is first named."""
    plan = release.plan
    manifest = release.manifest
    beside = sampling_bytes(plan, 1, num=_TRACED_SAMPLES, batch=_TRACED_SAMPLES, steps=1)
    expert_memory_bytes(plan, manifest, memory_limit(), beside=beside, remedy=_MEMORY_REMEDY)
    # Enough for one, so that of all experts only that one is read.
    one_expert_bytes = max(expert.file.bytes for expert in manifest.experts)
    return build_ensemble(plan, manifest, release.folder, memory_bytes=one_expert_bytes)


def _release_origin(release: Release, subject: str, weights_digest: str) -> ModelOrigin:
    manifest = release.manifest
    return ModelOrigin(
        name=f"{subject} of {manifest.plan_id}, version {manifest.version}",
        plan_id=manifest.plan_id,
        version=manifest.version,
        manifest_digest=release.manifest_digest,
        root_fingerprint=release.verified.root_fingerprint,
        weights_digest=weights_digest,
        licence=manifest.licence,
        is_verified=True,
    )
