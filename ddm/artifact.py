"""From a published folder to a loaded ensemble: verify, check every digest, build, load. In that order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ddm.ensemble import Ensemble
from ddm.errors import DigestError, MissingFileError, ReplayError, RootError
from ddm.files import read_bounded
from ddm.models import build_expert, expected_tensors
from ddm.plan_files import PlanFiles
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission
from ddm.routers.base import Router
from ddm.routers.loading import load_router
from ddm.schedule import LinearPath
from ddm.tensors import load_tensors
from ddm.trust.verify import VerifiedRelease, verify_release

MAX_ROOT_BYTES = 1 << 20
MAX_WEIGHT = 1e4


@dataclass(frozen=True)
class Release:
    """A verified release and its documents; no tensor has been read yet.

    Attributes:
        verified: what the signatures say.
        plan: the plan.
        manifest: the manifest.
        submissions: each silo's document, by silo id.
        folder: holds `plan.json` and the rest.
    """

    verified: VerifiedRelease
    plan: Plan
    manifest: Manifest
    submissions: Mapping[str, Submission]
    folder: Path


def read_root(path: Path) -> bytes:
    """Read the pinned root of trust.

    Raises:
        MissingFileError: nothing at `path`.
        RootError: a folder, a link or something far too large.
    """
    if not path.is_file():
        raise MissingFileError(
            str(path),
            expected="the federation's 1.root.json, received out of band",
            got="a folder" if path.is_dir() else "nothing there",
            remedy="Ask the federation's operator for 1.root.json and compare its fingerprint by another way.",
        )
    data = path.read_bytes() if path.stat().st_size <= MAX_ROOT_BYTES else b""
    if not data:
        raise RootError(str(path), expected=f"a root of 1 to {MAX_ROOT_BYTES} bytes", got="another size")
    return data


def open_release(
    folder: Path,
    *,
    root: Path | bytes,
    state: Path | None,
    silo_keys: Mapping[str, str] | None = None,
    archived: bool = False,
) -> Release:
    """Verify a release and read its documents.

    Args:
        folder: the published folder.
        root: the pinned 1.root.json.
        state: where versions seen before are kept, so that a rollback shows; None keeps none.
        silo_keys: fingerprints to pin, by silo id.
        archived: accept an expired timestamp.

    Raises:
        TrustError: a signature, digest, version, role or path is wrong.
        DocumentError: a document does not parse.
        ReplayError: documents that are signed but do not belong together.
    """
    if not folder.is_dir():
        raise MissingFileError(str(folder), expected="a release folder", got="nothing there")
    pinned = root if isinstance(root, bytes) else read_root(root)
    verified = verify_release(folder, pinned, state=state, silo_keys=silo_keys or {}, archived=archived)
    plan = Plan.parse(_read(verified, "plan.json"), subject="plan.json")
    manifest = Manifest.parse(_read(verified, "manifest.json"), subject="manifest.json")
    submissions = {
        silo.silo_id: Submission.parse(_read(verified, silo.submission.path), subject=silo.submission.path)
        for silo in manifest.silos
    }
    _check_together(verified, plan, manifest, submissions)
    return Release(
        verified=verified,
        plan=plan,
        manifest=manifest,
        submissions=submissions,
        folder=folder / "targets" / verified.plan_id,
    )


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
    """Build the experts and the router of a verified release and load their weights."""
    plan, manifest = release.plan, release.manifest
    return Ensemble(
        experts=[_load_expert(release, expert.file) for expert in manifest.experts],
        router=_load_router(release),
        prior=[expert.prior for expert in manifest.experts],
        shape=plan.data.shape,
        path=LinearPath(),
        expert_ids=[expert.expert_id for expert in manifest.experts],
    )


def _read(verified: VerifiedRelease, name: str) -> bytes:
    if name not in verified.files:
        raise DigestError(name, expected="a signed file of this name", got="none")
    return read_bounded(verified.files[name].path, MAX_DOCUMENT_BYTES, subject=name)


def _check_together(
    verified: VerifiedRelease, plan: Plan, manifest: Manifest, submissions: Mapping[str, Submission]
) -> None:
    """Each document is signed; they must also name each other, and every file that they list must be signed so."""
    plan_digest = verified.files["plan.json"].digest
    for subject, plan_id in (("plan.json", plan.plan_id), ("manifest.json", manifest.plan_id)):
        if plan_id != verified.plan_id:
            raise ReplayError(subject, expected=f"plan {verified.plan_id}", got=plan_id)
    if manifest.plan_digest != plan_digest:
        raise ReplayError("manifest.json", expected=f"plan digest {plan_digest}", got=manifest.plan_digest)
    for silo_id, submission in submissions.items():
        got = (submission.silo_id, submission.plan_id, submission.plan_digest)
        if got != (silo_id, plan.plan_id, plan_digest):
            raise ReplayError(f"submission of {silo_id}", expected="this silo and plan", got="another")
        own = {(expert.expert_id, expert.file) for expert in submission.experts}
        published = {(e.expert_id, e.file) for e in manifest.experts if e.silo_id == silo_id}
        if own != published:
            raise ReplayError(f"submission of {silo_id}", expected="the experts of the manifest", got="others")
    _check_files(verified, plan, manifest)


def _check_files(verified: VerifiedRelease, plan: Plan, manifest: Manifest) -> None:
    listed = [*plan.files, *manifest.files, manifest.router.file]
    listed += [silo.submission for silo in manifest.silos] + [expert.file for expert in manifest.experts]
    for file in listed:
        signed = verified.files.get(file.path)
        if signed is None or (signed.bytes, signed.digest) != (file.bytes, file.digest):
            raise DigestError(file.path, expected="the digest that the manifest or plan lists", got="another")
    extra = set(verified.files) - {file.path for file in listed} - {"manifest.json", "model.sig"}
    if extra:
        raise DigestError(min(extra), expected="a file that the manifest lists", got="one that it does not")


def _load_expert(release: Release, file: File) -> nn.Module:
    plan = release.plan
    weights = _tensors(release, file, plan)
    expert = build_expert(plan.expert.architecture, plan.data.shape)
    expert.load_state_dict(weights, strict=True)
    return expert.eval().requires_grad_(False)


def _tensors(release: Release, file: File, plan: Plan) -> dict[str, Tensor]:
    specs = expected_tensors(plan.expert.architecture, plan.data.shape)
    return load_tensors(release.folder / file.path, specs, max_bytes=file.bytes, max_abs=MAX_WEIGHT)


def _load_router(release: Release) -> Router:
    files = PlanFiles.load(release.plan, release.folder)
    router = release.manifest.router
    return load_router(
        router.kind,
        release.folder / router.file.path,
        plan=release.plan,
        sketch=files.sketch,
        num_experts=len(release.manifest.experts),
        t_release=router.t_release,
        max_bytes=router.file.bytes,
    )
