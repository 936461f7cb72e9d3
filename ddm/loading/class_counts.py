"""Computes who holds a class from what each silo signed, its noised class counts, so that no publisher states it.

The counts are published as the silos sent them; their digests stand in the silos' signed documents. Everything else
that the shares depend on is the plan's, or checked against the same documents (`ddm.loading.release`).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ddm.diffusion.path import path_named
from ddm.errors import DigestError, DocumentError, MathError, TensorFileError
from ddm.io.files import read_bounded
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.partition.layout import Layout, Part, known_parts
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.island import Island
from ddm.protocol.manifest import Manifest, PublishedSilo
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, class_counts_path
from ddm.routers.base import ConditionalRouter
from ddm.routers.calibration import Calibrated
from ddm.routers.conditional import ConditionalPrior
from ddm.routers.counts import CountsRouter
from ddm.routers.loading import silo_numbers
from ddm.sampling.guidance import ClassPrior, ClassPriors
from ddm.statistics.class_counts import ClassCounts


def class_priors(
    plan: Plan, manifest: Manifest, folder: Path, files: PlanFiles, router: Calibrated
) -> ClassPriors | None:
    """Return the experts' shares of each class and a router for it; None where the silos sent no class counts.

    Class counts are histograms over public groups, so the router of a class is a counts router whatever family the
    release's router is of. It takes over the temperature of a released counts router. A router that reads the class
    itself answers instead. The counts are read now; shares are computed when the first class is asked for.

    Args:
        plan: the plan.
        manifest: names the experts, and how many units each silo counts as.
        folder: holds `class_counts/` and `silos/`; see `ddm.loading.ensemble.build_ensemble`.
        files: the plan's.
        router: the release's.

    Raises:
        DigestError: a silo's document is not the one that the manifest lists, or its counts are not those it signed.
        DocumentError: a document does not parse, or lists no class counts; or the experts are not those of the plan's
            partition.
        TensorFileError: counts of another shape, or such as no noise explains; the latter when they are used.
    """
    shares = _shares(plan, manifest, folder, files)
    if shares is None:
        return None
    path = path_named(plan.objective.ensemble_path)
    reads = isinstance(router.router, ConditionalRouter)
    temperature = router.temperature if isinstance(router.router, CountsRouter) else 1.0

    def class_prior(label: int) -> ClassPrior:
        conditional = shares()
        prior = conditional.log_prior(label).exp().tolist()
        if reads:
            return ClassPrior(prior)
        own = conditional.router(label, files.sketch, path)
        return ClassPrior(prior, Calibrated(own, temperature, [1.0] * own.num_experts, path))

    return class_prior


def _shares(
    plan: Plan, manifest: Manifest, folder: Path, files: PlanFiles
) -> Callable[[], ConditionalPrior] | None:
    terms = plan.statistics.class_counts
    if terms is None:
        return None
    layout, by_id = (
        published_layout(plan, manifest, files.clusters),
        {silo.silo_id: silo for silo in manifest.silos},
    )
    order = list(dict.fromkeys(expert.silo_id for expert in manifest.experts))
    signed = [_signed(plan, by_id[silo_id], folder) for silo_id in order]
    noisy_KCG = torch.stack([_counts(plan, document, folder) for document in signed])
    num_units, counted = (
        [each.num_units for each in signed],
        [by_id[silo_id].units for silo_id in order],
    )

    @cache
    def shares() -> ConditionalPrior:
        try:
            return ConditionalPrior.from_counts(
                files.sketch, noisy_KCG, num_units, terms.epsilon, layout, counted_K=counted
            )
        except MathError as error:
            raise TensorFileError(
                f"class_counts, {error.subject}", expected=error.expected, got=error.got
            ) from error

    return shares


def published_layout(plan: Plan, manifest: Manifest, clusters: Clusters) -> Layout:
    """Return the layout of a manifest's experts, in its order.

    Raises:
        DocumentError: an expert that the plan's partition does not have.
    """
    parts: dict[str, Part] = {}
    for silo_id in dict.fromkeys(expert.silo_id for expert in manifest.experts):
        own = {expert.cluster for expert in manifest.experts if expert.silo_id == silo_id}
        kept = sorted(c for c in own if c is not None and c < plan.clustering.num_coarse)
        if kept or not isinstance(plan.partition, SiloClusterPartition):
            parts |= {
                part.expert_id: part
                for part in known_parts(plan.partition, silo_id, clusters, kept)
            }
    if unknown := [
        expert.expert_id for expert in manifest.experts if expert.expert_id not in parts
    ]:
        expected = f"experts of the partition {plan.partition.kind}"
        raise DocumentError(
            "manifest.json, experts", expected=expected, got=f"{len(unknown)} others, {unknown[0]}"
        )
    own_parts = tuple(parts[expert.expert_id] for expert in manifest.experts)
    return Layout(silo_numbers(manifest.experts), own_parts, plan.partition)


def _signed(plan: Plan, silo: PublishedSilo, folder: Path) -> Submission | Island:
    """Read a silo's document again, which must be the one that the manifest lists."""
    listed = silo.submission
    data = read_bounded(
        folder.parent / plan.origin(silo.silo_id) / listed.path,
        MAX_DOCUMENT_BYTES,
        subject=listed.path,
    )
    if (found := sha256_hex(data)) != listed.digest:
        expected = f"sha256 {listed.digest[:16]}..., as manifest.json lists"
        raise DigestError(listed.path, expected=expected, got=f"sha256 {found[:16]}...")
    kind: type[Submission | Island] = Submission if plan.statistics.private else Island
    return kind.parse(data, subject=listed.path)


def _counts(plan: Plan, signed: Submission | Island, folder: Path) -> Tensor:
    """Return a silo's noised counts by class and group, shape (C, G)."""
    name, file = class_counts_path(signed.silo_id), signed.class_counts
    if file is None:
        raise DocumentError(
            f"submission of {signed.silo_id}", expected="class_counts", got="no such statistic"
        )
    specs = ClassCounts(plan.statistics).tensor_specs(signed.num_units)
    tensors = load_tensors(folder / name, specs, max_bytes=file.bytes, digest=file.digest)
    return tensors["counts"]
