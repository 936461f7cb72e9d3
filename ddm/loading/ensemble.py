"""From a published folder to a loaded ensemble: verify, check every digest, build, load. In that order."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath

import torch
from torch import Tensor

from ddm.diffusion.path import Expert, Experts, Path, as_velocity, path_named
from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.loading.plan import PlanFiles
from ddm.loading.release import Release, open_release
from ddm.models import load_expert
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import ExpertObjective, Plan
from ddm.routers.calibration import Calibrated
from ddm.routers.counts import CountsRouter
from ddm.routers.loading import load_router
from ddm.routers.sketch import Sketch
from ddm.sampling.expert_cache import LazyExperts
from ddm.sampling.guidance import Given, GivenClass

_LOADERS = 4


def open_ensemble(
    release: Release | FilePath | str,
    *,
    root: FilePath | str | bytes | None = None,
    state: FilePath | None = None,
    silo_keys: Mapping[str, str] | None = None,
    archived: bool = False,
    memory_bytes: int | None = None,
    device: torch.device | str = "cpu",
) -> Ensemble:
    """Verify a release, then build its experts and router and load their weights; every file is read once.

    Args:
        release: its folder; or a release that `open_release` has verified, which needs none of the next four.
        root: the root of trust, obtained out of band: its file, or its bytes.
        state: see `open_release`, as are the next two.
        silo_keys: pinned fingerprints.
        archived: accept an expired timestamp.
        memory_bytes: see `build_ensemble`, as is the next one.
        device: where the experts shall compute.

    Raises:
        TrustError, FormatError: see `open_release`.
        SetupError: a folder without a root of trust.
        TensorFileError: a tensor file is not what the plan implies.
    """
    if isinstance(release, Release):
        return load_ensemble(release, memory_bytes=memory_bytes, device=device)
    if root is None:
        remedy = "Pass root: the file 1.root.json, obtained out of band."
        raise SetupError(str(release), expected="the root of trust that verifies it", got="no root", remedy=remedy)
    opened = open_release(
        FilePath(release),
        root=FilePath(root) if isinstance(root, str) else root,
        state=state,
        silo_keys=silo_keys,
        archived=archived,
        experts_later=True,
    )
    return load_ensemble(opened, memory_bytes=memory_bytes, device=device)


def load_ensemble(release: Release, *, memory_bytes: int | None = None, device: torch.device | str = "cpu") -> Ensemble:
    """Build the experts and the router of a verified release and load their weights.

    Args:
        release: as `open_release` returns it.
        memory_bytes: see `build_ensemble`.
        device: where the experts shall compute.

    Raises:
        DigestError: a file changed after it was verified.
        DocumentError: the manifest describes a router that this version would not apply.
        TensorFileError: a tensor file is not what the plan implies.
    """
    return build_ensemble(release.plan, release.manifest, release.folder, memory_bytes=memory_bytes, device=device)


def build_ensemble(
    plan: Plan,
    manifest: Manifest,
    folder: FilePath,
    *,
    memory_bytes: int | None = None,
    device: torch.device | str = "cpu",
) -> Ensemble:
    """Build the experts and the router that a manifest lists, each file checked against its digest there.

    Whether plan and manifest are to be believed is the caller's business: `load_ensemble` knows it from signatures, the
    aggregator because it has just written them.

    Args:
        plan: the plan.
        manifest: lists the experts and describes the router.
        folder: holds `plan/`, `silos/` and the router.
        memory_bytes: most bytes that experts may take of memory. They are loaded when they are asked for, and again
            when they had to leave, each time checked against their digests; so what is said of files below is then
            said while sampling. None loads all of them now.
        device: where the experts shall compute.

    Raises:
        DigestError: a file is not the one that the documents list.
        DocumentError: the manifest describes a router that this version would not apply.
        TensorFileError: a tensor file is not what the plan implies.
        SetupError: less memory than one expert takes.
    """
    shape, condition, path = plan.expert_shape, plan.condition, path_named(plan.objective.path)
    files = PlanFiles.load(plan, folder)
    sketch = files.sketch
    router = load_router(manifest.router, folder, plan=plan, sketch=sketch, experts=manifest.experts)

    def load(k: int) -> Expert:
        published = manifest.experts[k]
        expert = load_expert(plan.expert.architecture, shape, folder, published.file, condition).to(device)
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
        given_class=_given_class(router, sketch, path),
        latent=files.latent,
    )


def _experts(load: Callable[[int], Expert], sizes: Sequence[int], memory_bytes: int | None) -> Experts:
    if memory_bytes is not None:
        return LazyExperts(load, sizes, memory_bytes)
    # Reading, hashing and checking leave the interpreter to others, so several experts load side by side.
    with ThreadPoolExecutor(max_workers=min(_LOADERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(load, range(len(sizes))))


def on_path(expert: Expert, learned: ExpertObjective, canonical: Path) -> Expert:
    """Let an expert answer velocities on the ensemble's path, whatever its silo taught it."""
    own = path_named(learned.path)
    if own == canonical and learned.prediction == "velocity":
        return expert

    def answer(x_B: Tensor, t_B: Tensor, *told_B: Tensor) -> Tensor:
        return as_velocity(lambda x, t: expert(x, t, *told_B), learned.prediction, own, canonical)(x_B, t_B)

    return answer


def _given_class(router: Calibrated, sketch: Sketch, path: Path) -> GivenClass | None:
    """Who holds a class, where the silos released that.

    Given a class, where its images lie is known by public group alone; so whatever the release's router is, this one
    is a counts router, and needs the same temperature if it is one itself.
    """
    conditional = router.conditional
    if conditional is None:
        return None
    temperature = router.temperature if isinstance(router.router, CountsRouter) else 1.0

    def given(label: int) -> Given:
        prior = conditional.log_prior(label).exp().tolist()
        own = conditional.router(label, sketch, path)
        return Given(prior, Calibrated(own, temperature, [1.0] * own.num_experts))

    return given
