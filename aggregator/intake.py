"""Intake: whether a submission is what its silo signed, what the plan asked for, and safe to open.

Order matters: the signature before any parser, digests before tensors, shapes before values. How far honest noise may
carry a value: `aggregator.bounds`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from aggregator.bounds import cell_noise_bound, sketch_norm_bound, total_noise_bound
from ddm.errors import AbsentFileError, DigestError, PolicyError, ReplayError, TensorFileError, UnlistedFileError
from ddm.files import list_files, read_bounded
from ddm.models import expected_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, sha256_file, sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedCounts, SubmittedSketch
from ddm.routers.counts import counts_specs
from ddm.schedule import path_named
from ddm.sketch import sketch_release_specs
from ddm.tensors import load_tensors
from ddm.trust.keys import PublicKey
from ddm.trust.silo_role import verify_silo_metadata

MAX_FILES = 64
MAX_ROLE_BYTES = 1 << 20
MAX_DOCUMENTS_BYTES = 16 << 20
MAX_WEIGHT = 1e4
T_RELEASE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Expectation:
    """What one silo's submission must match.

    Attributes:
        plan: the current plan.
        plan_digest: sha256 of its signed bytes.
        silo_id: the silo, known from its Flower node, never from a field.
        key: the silo's enrolled signing key.
        sequence: the number under which the files were pulled.
        t_release: the noise level that the plan's epsilon implies.
        scale: C of the plan's sketch, in data units.
        now: the time of intake.
    """

    plan: Plan
    plan_digest: str
    silo_id: str
    key: PublicKey
    sequence: int
    t_release: float
    scale: float
    now: datetime


@dataclass(frozen=True)
class Intake:
    """A submission that passed: the document, its digest, and the files that came with it."""

    submission: Submission
    digest: str
    files: Mapping[str, Path]


def submission_bytes(plan: Plan) -> int:
    """Return the most bytes that a submission of `plan` may have: an expert, two releases, its documents."""
    return plan.limits.expert_bytes + 2 * plan.limits.release_bytes + MAX_DOCUMENTS_BYTES


def verify_submission(folder: Path, expected: Expectation) -> Intake:
    """Verify everything about one pulled submission.

    Args:
        folder: exactly the files that the silo sent; nobody else can write to it.
        expected: what they must match.

    Raises:
        TrustError: a signature, digest, role or path is wrong.
        FormatError: a document or tensor file is malformed, or belongs to another plan, silo or sequence.
        PolicyError: the submission spent or sent more than the plan allows.
    """
    files = list_files(folder, most=MAX_FILES)
    plan_id, silo_id = expected.plan.plan_id, expected.silo_id
    role_name = f"metadata/{plan_id}.{silo_id}.json"
    role = read_bounded(_present(files, role_name), MAX_ROLE_BYTES, subject=role_name)
    signed = verify_silo_metadata(role, plan_id=plan_id, silo_id=silo_id, key=expected.key, now=expected.now)
    signed = {name.removeprefix(f"{plan_id}/"): value for name, value in signed.items()}
    for name, (size, digest) in signed.items():
        _check_bytes(_present(files, name), name, size, digest)
    document = f"silos/{silo_id}/submission.json"
    if document not in signed:
        raise AbsentFileError(document, expected="a signed submission", got="none in the silo's role")
    data = read_bounded(files[document], MAX_DOCUMENT_BYTES, subject=document)
    submission = Submission.parse(data, subject=document)
    _check_binding(submission, expected)
    _check_listing(submission, signed, files, role_name, document)
    _check_terms(submission, expected)
    _check_tensors(submission, files, expected)
    return Intake(submission=submission, digest=sha256_hex(data), files=files)


def _present(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        raise AbsentFileError(name, expected="a file that the silo signed", got="nothing")
    return files[name]


def _check_bytes(path: Path, name: str, size: int, digest: str) -> None:
    if path.stat().st_size != size or sha256_file(path) != digest:
        raise DigestError(name, expected=f"{size} bytes with the signed digest", got="other bytes")


def _check_binding(submission: Submission, expected: Expectation) -> None:
    claims = (
        ("plan", expected.plan.plan_id, submission.plan_id),
        ("plan digest", expected.plan_digest, submission.plan_digest),
        ("silo", expected.silo_id, submission.silo_id),
        ("sequence", str(expected.sequence), str(submission.sequence)),
    )
    for subject, wanted, got in claims:
        if wanted != got:
            raise ReplayError(f"submission, {subject}", expected=wanted, got=got)
    if submission.approval is None:
        raise PolicyError("submission", expected="an approval", got="none")


def _check_listing(
    submission: Submission,
    signed: Mapping[str, tuple[int, str]],
    files: Mapping[str, Path],
    role_name: str,
    document: str,
) -> None:
    """The role lists the document and its experts; the rest of the folder is the releases; nothing else is there."""
    experts = {expert.file.path: (expert.file.bytes, expert.file.digest) for expert in submission.experts}
    if {name: value for name, value in signed.items() if name != document} != experts:
        raise DigestError(document, expected="exactly the experts that the silo's role lists", got="others")
    for release in submission.releases:
        file: File = release.file
        _check_bytes(_present(files, file.path), file.path, file.bytes, file.digest)
    known = {role_name, *signed, *(release.file.path for release in submission.releases)}
    for name in files:
        if name not in known:
            raise UnlistedFileError(name, expected="only files that the submission lists", got="another")


def _check_terms(submission: Submission, expected: Expectation) -> None:
    """The submission keeps to the plan: what was spent, how many images, which releases, how large."""
    plan = expected.plan
    counts, sketch = _releases(submission)
    asked = plan.releases
    expert = submission.experts[0]
    numbers = (
        ("epsilon of counts", counts.epsilon, asked.counts.epsilon),
        ("epsilon of sketch", sketch.epsilon, asked.sketch.epsilon),
        ("epsilon spent", submission.spent.epsilon, asked.total.epsilon),
        ("delta spent", submission.spent.delta, asked.total.delta),
        ("bytes of an expert", max(e.file.bytes for e in submission.experts), plan.limits.expert_bytes),
        ("bytes of a release", max(r.file.bytes for r in submission.releases), plan.limits.release_bytes),
        ("experts", len(submission.experts), 1),
        ("training steps", expert.steps, plan.expert.training.num_steps),
    )
    for subject, got, most in numbers:
        if got > most:
            raise PolicyError(f"submission, {subject}", expected=f"at most {most:g}", got=f"{got:g}")
    if expert.num_images < plan.partition.min_images or expert.num_images != submission.num_units:
        wanted = f"the silo's units, at least {plan.partition.min_images}"
        raise PolicyError("submission, images", expected=wanted, got=f"{expert.num_images}")
    if expert.expert_id != expected.silo_id:
        raise ReplayError("submission, expert", expected=expected.silo_id, got=expert.expert_id)
    if abs(sketch.t_release - expected.t_release) > T_RELEASE_TOLERANCE:
        raise PolicyError("submission, t_release", expected=f"{expected.t_release:.6f}", got=f"{sketch.t_release:.6f}")


def _releases(submission: Submission) -> tuple[SubmittedCounts, SubmittedSketch]:
    by_kind = {release.kind: release for release in submission.releases}
    counts, sketch = by_kind.get("counts"), by_kind.get("sketch")
    if not isinstance(counts, SubmittedCounts) or not isinstance(sketch, SubmittedSketch):
        raise AbsentFileError("submission, releases", expected="counts and sketch", got=", ".join(sorted(by_kind)))
    return counts, sketch


def _check_tensors(submission: Submission, files: Mapping[str, Path], expected: Expectation) -> None:
    """Open each tensor file strictly; its values are bounded, so that one silo cannot send anything at all."""
    plan, num_units = expected.plan, submission.num_units
    weights = expected_tensors(plan.expert.architecture, plan.data.shape)
    for expert in submission.experts:
        load_tensors(files[expert.file.path], weights, max_bytes=plan.limits.expert_bytes, max_abs=MAX_WEIGHT)
    counts, sketch = _releases(submission)
    most = plan.limits.release_bytes
    histogram = load_tensors(files[counts.file.path], counts_specs(plan), max_bytes=most)
    _check_counts(histogram["counts"], plan, num_units, counts.file.path)
    shapes = sketch_release_specs(plan, num_units)
    sketches = load_tensors(files[sketch.file.path], shapes, max_bytes=most)
    _check_sketches(sketches["sketch"], expected, sketch.file.path)


def _check_counts(counts_G: Tensor, plan: Plan, num_units: int, name: str) -> None:
    """Each count lies within its noise of [0, n_k], and their sum within its noise of n_k; no sum overflows here."""
    asked, cells = plan.releases.counts, [int(count) for count in counts_G.tolist()]
    reach = cell_noise_bound(asked.epsilon, asked.num_groups)
    if min(cells) < -reach or max(cells) > num_units + reach:
        raise TensorFileError(name, expected=f"counts within [{-reach}, {num_units + reach}]", got="others")
    reach = total_noise_bound(asked.epsilon, asked.num_groups)
    if abs(sum(cells) - num_units) > reach:
        raise TensorFileError(name, expected=f"a sum within {reach} of the {num_units} units", got="another")


def _check_sketches(sketch_NR: Tensor, expected: Expectation, name: str) -> None:
    path, t_r = path_named(expected.plan.objective.path), torch.tensor(expected.t_release, dtype=torch.float64)
    alpha, sigma = float(path.alpha(t_r)), float(path.sigma(t_r))
    num_rows, rank = sketch_NR.shape
    most = sketch_norm_bound(alpha, sigma, expected.scale, rank, num_rows)
    if float(sketch_NR.double().norm(dim=1).max()) > most:
        raise TensorFileError(name, expected=f"rows of norm up to {most:.4g}", got="a longer one")
