"""From a published folder to a loaded ensemble: verify, check every digest, build, load. In that order."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddm.ensemble import Ensemble
from ddm.models import load_expert
from ddm.plan_files import PlanFiles
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.release import Release, open_release
from ddm.routers.loading import load_router
from ddm.schedule import LinearPath

_LOADERS = 4


def open_ensemble(
    folder: Path,
    *,
    root: Path | bytes,
    state: Path | None = None,
    silo_keys: Mapping[str, str] | None = None,
    archived: bool = False,
) -> Ensemble:
    """Verify a release, then build its experts and router and load their weights; every file is read once.

    Raises:
        TrustError, FormatError: see `open_release`.
        TensorFileError: a tensor file is not what the plan implies.
    """
    release = open_release(folder, root=root, state=state, silo_keys=silo_keys, archived=archived, experts_later=True)
    return load_ensemble(release)


def load_ensemble(release: Release) -> Ensemble:
    """Build the experts and the router of a verified release and load their weights.

    Raises:
        DigestError: a file changed after it was verified.
        DocumentError: the manifest describes a router that this version would not apply.
        TensorFileError: a tensor file is not what the plan implies.
    """
    return build_ensemble(release.plan, release.manifest, release.folder)


def build_ensemble(plan: Plan, manifest: Manifest, folder: Path) -> Ensemble:
    """Build the experts and the router that a manifest lists, each file checked against its digest there.

    Whether plan and manifest are to be believed is the caller's business: `load_ensemble` knows it from signatures, the
    aggregator because it has just written them.

    Args:
        plan: the plan.
        manifest: lists the experts and describes the router.
        folder: holds `plan/`, `silos/` and the router.

    Raises:
        DigestError: a file is not the one that the documents list.
        DocumentError: the manifest describes a router that this version would not apply.
        TensorFileError: a tensor file is not what the plan implies.
    """
    architecture, shape = plan.expert.architecture, plan.data.shape
    sketch = PlanFiles.load(plan, folder).sketch
    # Reading, hashing and checking leave the interpreter to others, so several experts load side by side.
    with ThreadPoolExecutor(max_workers=min(_LOADERS, os.cpu_count() or 1)) as pool:
        experts = list(pool.map(lambda expert: load_expert(architecture, shape, folder, expert.file), manifest.experts))
    return Ensemble(
        experts=experts,
        router=load_router(manifest.router, folder, plan=plan, sketch=sketch, experts=manifest.experts),
        prior=[expert.prior for expert in manifest.experts],
        shape=shape,
        path=LinearPath(),
        expert_ids=[expert.expert_id for expert in manifest.experts],
    )
