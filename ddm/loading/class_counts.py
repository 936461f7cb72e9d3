"""Computes who holds a class from what each silo signed, its noised class counts, so that no publisher states it.

The counts are published as the silos sent them; their digests are in the silos' signed documents. Everything else that
the shares depend on is the plan's, or checked against the same documents (`ddm.loading.consistency`).
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
from ddm.partition.layout import ExpertPart, Layout, known_parts
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
from ddm.routers.family import silo_numbers
from ddm.sampling.guidance import ClassPrior, ClassPriors
from ddm.statistics.class_counts import ClassCounts


def class_priors(
    plan: Plan, manifest: Manifest, folder: Path, files: PlanFiles, router: Calibrated
) -> ClassPriors | None:
    """Return the experts' shares of each class and a router for it; None where the silos sent no class counts.

    Class counts are histograms over public groups, so the router of a class is a counts router whatever family the
    release's router is of. It takes over the temperature of a published counts router. A router that reads the class
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
    compute_shares = _class_shares(plan, manifest, folder, files)
    if compute_shares is None:
        return None
    path = path_named(plan.objective.ensemble_path)
    router_reads_class = isinstance(router.router, ConditionalRouter)
    # A temperature was fitted for one family; it means nothing to a router of another one.
    temperature = 1.0
    if isinstance(router.router, CountsRouter):
        temperature = router.temperature

    def class_prior(label: int) -> ClassPrior:
        shares = compute_shares()
        prior = shares.log_prior(label).exp().tolist()
        if router_reads_class:
            return ClassPrior(prior)
        class_router = shares.router(label, files.sketch, path)
        # The class prior is applied when samples are drawn, so that the router itself has none.
        uniform = [1.0] * class_router.num_experts
        return ClassPrior(prior, Calibrated(class_router, temperature, uniform, path))

    return class_prior


def _class_shares(
    plan: Plan, manifest: Manifest, folder: Path, files: PlanFiles
) -> Callable[[], ConditionalPrior] | None:
    """Read the class counts now; return a function that computes the shares from them, once."""
    terms = plan.statistics.class_counts
    if terms is None:
        return None
    layout = published_layout(plan, manifest, files.clusters)
    published_by_id = {silo.silo_id: silo for silo in manifest.silos}
    documents = [
        _read_document(plan, published_by_id[silo_id], folder)
        for silo_id in _silos_in_order(manifest)
    ]
    noisy_KCG = torch.stack([_read_counts(plan, document, folder) for document in documents])
    # A histogram counts the units that a silo stated, and its prior may count fewer.
    stated_units = [document.num_units for document in documents]
    counted_units = [published_by_id[document.silo_id].units for document in documents]

    @cache
    def compute_shares() -> ConditionalPrior:
        try:
            return ConditionalPrior.from_counts(
                files.sketch,
                noisy_KCG,
                stated_units,
                terms.epsilon,
                layout,
                counted_K=counted_units,
            )
        except MathError as error:
            raise TensorFileError(
                f"class_counts, {error.subject}", expected=error.expected, got=error.got
            ) from error

    return compute_shares


def _silos_in_order(manifest: Manifest) -> list[str]:
    """Return the silos in the order in which their experts first appear, which is the router's order of silos."""
    return list(dict.fromkeys(expert.silo_id for expert in manifest.experts))


def published_layout(plan: Plan, manifest: Manifest, clusters: Clusters) -> Layout:
    """Return the layout of a manifest's experts, in its order.

    Raises:
        DocumentError: an expert that the plan's partition does not have.
    """
    parts: dict[str, ExpertPart] = {}
    for silo_id in _silos_in_order(manifest):
        silo_clusters = {expert.cluster for expert in manifest.experts if expert.silo_id == silo_id}
        # An unknown cluster is left out here, and its expert refused below.
        valid_clusters = sorted(
            cluster
            for cluster in silo_clusters
            if cluster is not None and cluster < plan.clustering.num_coarse
        )
        if valid_clusters or not isinstance(plan.partition, SiloClusterPartition):
            for part in known_parts(plan.partition, silo_id, clusters, valid_clusters):
                parts[part.expert_id] = part
    unknown = [expert.expert_id for expert in manifest.experts if expert.expert_id not in parts]
    if unknown:
        raise DocumentError(
            "manifest.json, experts",
            expected=f"experts of the partition {plan.partition.kind}",
            got=f"{len(unknown)} others, {unknown[0]}",
        )
    expert_parts = tuple(parts[expert.expert_id] for expert in manifest.experts)
    return Layout(silo_numbers(manifest.experts), expert_parts, plan.partition)


def _read_document(plan: Plan, silo: PublishedSilo, folder: Path) -> Submission | Island:
    """Read a silo's document again, which must be the one that the manifest lists."""
    listed = silo.submission
    # A carried silo's document is beside this plan's folder, in that of the plan for which it signed.
    path = folder.parent / plan.origin(silo.silo_id) / listed.path
    data = read_bounded(path, MAX_DOCUMENT_BYTES, subject=listed.path)
    digest = sha256_hex(data)
    if digest != listed.digest:
        raise DigestError(
            listed.path,
            expected=f"sha256 {listed.digest[:16]}..., as manifest.json lists",
            got=f"sha256 {digest[:16]}...",
        )
    if plan.statistics.private:
        return Submission.parse(data, subject=listed.path)
    return Island.parse(data, subject=listed.path)


def _read_counts(plan: Plan, document: Submission | Island, folder: Path) -> Tensor:
    """Return a silo's noised counts by class and group, shape (C, G)."""
    file = document.class_counts
    if file is None:
        raise DocumentError(
            f"submission of {document.silo_id}", expected="class_counts", got="no such statistic"
        )
    path = folder / class_counts_path(document.silo_id)
    specs = ClassCounts(plan.statistics).tensor_specs(document.num_units)
    tensors = load_tensors(path, specs, max_bytes=file.bytes, digest=file.digest)
    return tensors["counts"]
