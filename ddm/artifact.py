"""From a published folder to a loaded ensemble: verify, check every digest, build, load. In that order."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ddm.ensemble import Ensemble
from ddm.models import build_expert, expected_tensors
from ddm.plan_files import PlanFiles
from ddm.protocol.base import File
from ddm.release import Release, open_release
from ddm.routers.loading import load_router
from ddm.schedule import LinearPath
from ddm.tensors import load_tensors

MAX_WEIGHT = 1e4


def open_ensemble(
    folder: Path,
    *,
    root: Path | bytes,
    state: Path | None = None,
    silo_keys: Mapping[str, str] | None = None,
    archived: bool = False,
) -> Ensemble:
    """Verify a release, then build its experts and router and load their weights.

    Raises:
        TrustError, FormatError: see `open_release`.
        TensorFileError: a tensor file is not what the plan implies.
    """
    return load_ensemble(open_release(folder, root=root, state=state, silo_keys=silo_keys, archived=archived))


def load_ensemble(release: Release) -> Ensemble:
    """Build the experts and the router of a verified release and load their weights.

    Raises:
        DigestError: a file changed after it was verified.
        DocumentError: the manifest describes a router that this version would not apply.
        TensorFileError: a tensor file is not what the plan implies.
    """
    plan, manifest = release.plan, release.manifest
    sketch = PlanFiles.load(plan, release.folder).sketch
    return Ensemble(
        experts=[_load_expert(release, expert.file) for expert in manifest.experts],
        router=load_router(manifest.router, release.folder, plan=plan, sketch=sketch),
        prior=[expert.prior for expert in manifest.experts],
        shape=plan.data.shape,
        path=LinearPath(),
        expert_ids=[expert.expert_id for expert in manifest.experts],
    )


def _load_expert(release: Release, file: File) -> nn.Module:
    architecture, shape = release.plan.expert.architecture, release.plan.data.shape
    specs, path = expected_tensors(architecture, shape), release.folder / file.path
    weights = load_tensors(path, specs, max_bytes=file.bytes, max_abs=MAX_WEIGHT, digest=file.digest)
    expert = build_expert(architecture, shape)
    expert.load_state_dict(weights, strict=True)
    return expert.eval().requires_grad_(False)
