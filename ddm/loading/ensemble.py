"""Loads an ensemble from a published release: verifies it, checks every digest, builds the networks, loads weights."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath

import torch
from torch import Tensor, nn

from ddm.diffusion.path import Expert, Experts, Path, as_velocity, path_named
from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.fetching.hosted import FetchOptions, HostedRelease
from ddm.fetching.opening import place_of
from ddm.footprint import sampling_bytes
from ddm.loading.class_counts import class_priors
from ddm.loading.memory import expert_memory_bytes
from ddm.loading.plan import PlanFiles
from ddm.loading.release import Release, open_release, read_root
from ddm.models import load_expert
from ddm.models.arithmetic import Arithmetic
from ddm.protocol.learning import ExpertObjective
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.routers.loading import load_router
from ddm.sampling.expert_cache import LazyExperts
from ddm.system.memory import memory_limit

_LOADERS = 4


def open_ensemble(
    release: Release | HostedRelease | FilePath | str,
    *,
    root: FilePath | str | bytes | None = None,
    state: FilePath | str | None = None,
    silo_keys: Mapping[str, str] | None = None,
    accepted_keys: Mapping[str, str] | None = None,
    archived: bool = False,
    memory_bytes: int | None = None,
    device: torch.device | str = "cpu",
) -> Ensemble:
    """Verify a release, then build its experts and router and load their weights; every file is read once.

    Args:
        release: its folder; or its address, ``https://HOST/PATH`` or ``hf://OWNER/NAME[@REVISION]``, of which experts
            are fetched when they are first used (`ddm.fetching.opening.open_hosted` has the options); or a release that
            `open_release` has verified, for which the next five are ignored.
        root: the root of trust, obtained out of band: its file, or its bytes.
        state: see `open_release`, as are the next three.
        silo_keys: pinned fingerprints.
        accepted_keys: fingerprints that may take the place of those in `state`.
        archived: accept an expired timestamp.
        memory_bytes: see `load_ensemble`, as is the next one.
        device: where the experts compute.

    Raises:
        TrustError, FormatError: see `open_release`.
        TransportError: a host does not answer, or leads elsewhere.
        MemoryLimitError: see `load_ensemble`.
        SetupError: a folder without a root of trust.
        TensorFileError: a tensor file is not what the plan implies.
    """
    if isinstance(release, Release):
        return load_ensemble(release, memory_bytes=memory_bytes, device=device)
    if root is None:
        remedy = "Pass root: the file 1.root.json, obtained out of band."
        raise SetupError(
            str(release),
            expected="a root of trust to verify it with",
            got="root=None",
            remedy=remedy,
        )
    if not isinstance(root, bytes):
        root = read_root(FilePath(root))
    if state is not None:
        state = FilePath(state)
    if isinstance(release, str):
        options = FetchOptions(state=state, archived=archived)
        release = place_of(release, root, options)
    opened = open_release(
        release,
        root=root,
        state=state,
        silo_keys=silo_keys,
        accepted_keys=accepted_keys,
        archived=archived,
        experts_later=True,
    )
    return load_ensemble(opened, memory_bytes=memory_bytes, device=device)


def load_ensemble(
    release: Release, *, memory_bytes: int | None = None, device: torch.device | str = "cpu"
) -> Ensemble:
    """Build the experts and the router of a verified release and load their weights.

    Args:
        release: as `open_release` returns it.
        memory_bytes: the maximum for the whole ensemble, with one sample at a time; 75% of what is available where
            omitted. Sizes are computed before anything is loaded. Where not all experts fit beside the rest, they
            are loaded on first use, as in `build_ensemble`. More samples at once need more: `Ensemble.chunk_size`.
        device: where the experts compute.

    Raises:
        MemoryLimitError: the ensemble does not fit with one expert in memory; nothing was loaded.
        DigestError: a file changed after it was verified.
        DocumentError: the manifest describes a router that this version cannot apply.
        TensorFileError: a tensor file is not what the plan implies.
    """
    plan = release.plan
    manifest = release.manifest
    one_sample_bytes = sampling_bytes(plan, len(manifest.experts), num=1, batch=1, steps=1)
    expert_bytes = expert_memory_bytes(
        plan,
        manifest,
        memory_limit(memory_bytes),
        beside=one_sample_bytes,
        remedy="Raise memory_bytes, or open the release on a machine with more memory.",
    )
    fetch_expert = None
    if release.hosted is not None:
        if expert_bytes is None:
            # A limit that all of them fit in, so that each is fetched and loaded when it is first needed.
            expert_bytes = sum(expert.file.bytes for expert in manifest.experts)
        fetch_expert = partial(_fetch_expert, release)
    ensemble = build_ensemble(
        plan,
        manifest,
        release.folder,
        memory_bytes=expert_bytes,
        device=device,
        fetch_expert=fetch_expert,
    )
    return replace(ensemble, release=release.manifest_digest)


def _fetch_expert(release: Release, number: int) -> None:
    release.fetch_experts([number])


def build_ensemble(
    plan: Plan,
    manifest: Manifest,
    folder: FilePath,
    *,
    memory_bytes: int | None = None,
    device: torch.device | str = "cpu",
    arithmetic: Arithmetic = Arithmetic(),
    fetch_expert: Callable[[int], None] | None = None,
) -> Ensemble:
    """Build the experts and the router that a manifest lists, each file checked against its digest there.

    The caller must trust the plan and the manifest: `load_ensemble` has verified their signatures, the aggregator has
    just written them.

    Args:
        plan: the plan.
        manifest: lists the experts and describes the router.
        folder: holds `plan/`, `silos/`, `class_counts/` and the router. It has the plan's name; experts that were
            carried over are beside it, in a folder with the name of their plan.
        memory_bytes: the maximum for experts. They are then loaded on first use, and again after they were
            dropped, checked against their digests each time, so the errors about files below are raised while sampling.
            None loads all of them now.
        device: where the experts compute.
        arithmetic: of the experts' networks, and whether they are compiled.
        fetch_expert: puts the file of the expert with this number into its folder, before it is loaded; None where all
            files are there.

    Raises:
        DigestError: a file differs from the one that the documents list.
        DocumentError: the manifest describes a router that this version cannot apply.
        TensorFileError: a tensor file is not what the plan implies.
        SetupError: `memory_bytes` is less than the largest expert needs.
    """
    shape = plan.expert_shape
    condition = plan.condition
    path = path_named(plan.objective.ensemble_path)
    files = PlanFiles.load(plan, folder)
    # The router's classes are the experts in the manifest's order.
    router = load_router(
        manifest.router, folder, plan=plan, sketch=files.sketch, experts=manifest.experts
    )

    def load(number: int) -> Expert:
        if fetch_expert is not None:
            fetch_expert(number)
        published = manifest.experts[number]
        # A carried expert is published under the plan for which its silo signed it.
        signed_folder = folder.parent / plan.origin(published.silo_id)
        network = load_expert(
            plan.expert.architecture, shape, signed_folder, published.file, condition
        )
        expert = arithmetic.prepare(network.to(device))
        return on_path(expert, plan.objective.of(published.silo_id), path)

    return Ensemble(
        experts=_experts(load, [expert.file.bytes for expert in manifest.experts], memory_bytes),
        router=router,
        prior=[expert.prior for expert in manifest.experts],
        shape=shape,
        path=path,
        device=device,
        expert_ids=[expert.expert_id for expert in manifest.experts],
        condition=condition,
        class_prior=class_priors(plan, manifest, folder, files, router),
        latent=files.latent,
        value_range=plan.data.range,
    )


def _experts(
    load: Callable[[int], Expert], sizes: Sequence[int], memory_bytes: int | None
) -> Experts:
    # With a limit, experts are loaded on first use and dropped again.
    if memory_bytes is not None:
        return LazyExperts(load, sizes, memory_bytes)
    # Reading, hashing and checking release the interpreter lock, so several experts load in parallel.
    with ThreadPoolExecutor(max_workers=min(_LOADERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(load, range(len(sizes))))


def on_path(expert: Expert, learned: ExpertObjective, canonical: Path) -> Expert:
    """Return the expert as a velocity on the ensemble's path, whatever objective its silo trained it for."""
    own = path_named(learned.path)
    # Most experts are on the path already, and need no conversion at each step.
    if own == canonical and learned.prediction == "velocity":
        return expert
    return _OnPath(expert, learned, canonical)


class _OnPath(nn.Module):
    """See `on_path`; a module, so that its weights are found, moved and computed with as those of any network."""

    def __init__(self, expert: Expert, learned: ExpertObjective, canonical: Path) -> None:
        super().__init__()
        self.expert, self.learned, self.canonical = expert, learned, canonical

    def forward(self, x_B: Tensor, t_B: Tensor, *condition_B: Tensor) -> Tensor:
        velocity = as_velocity(
            self.expert, self.learned.prediction, path_named(self.learned.path), self.canonical
        )
        return velocity(x_B, t_B, *condition_B)
