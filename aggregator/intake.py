"""Intake: whether a submission is what its silo signed, what the plan asked for, and safe to open.

Order matters: the signature before any parser, digests before tensors, shapes before values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddm.errors import AbsentFileError, DigestError, PolicyError, ReplayError, TensorFileError, UnlistedFileError
from ddm.files import list_files, read_bounded
from ddm.models import expected_tensors
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, sha256_file, sha256_hex
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission, SubmittedCounts, SubmittedSketch
from ddm.routers.counts import counts_specs
from ddm.sketch import sketch_release_specs
from ddm.tensors import load_tensors
from ddm.trust.keys import PublicKey
from ddm.trust.silo_role import verify_silo_metadata

MAX_FILES = 64
MAX_ROLE_BYTES = 1 << 20
MAX_WEIGHT = 1e4
MAX_SKETCH = 1e3
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
        now: the time of intake.
    """

    plan: Plan
    plan_digest: str
    silo_id: str
    key: PublicKey
    sequence: int
    t_release: float
    now: datetime


@dataclass(frozen=True)
class Intake:
    """A submission that passed: the document, its digest, and the files that came with it."""

    submission: Submission
    digest: str
    files: Mapping[str, Path]


def verify_submission(folder: Path, expected: Expectation) -> Intake:
    """Verify everything about one pulled submission.

    Args:
        folder: exactly the files that the silo sent.
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
    _check_tensors(submission, files, expected.plan)
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


def _check_tensors(submission: Submission, files: Mapping[str, Path], plan: Plan) -> None:
    """Open each tensor file strictly; its values are bounded, so that one silo cannot send infinities."""
    weights = expected_tensors(plan.expert.architecture, plan.data.shape)
    for expert in submission.experts:
        load_tensors(files[expert.file.path], weights, max_bytes=plan.limits.expert_bytes, max_abs=MAX_WEIGHT)
    counts, sketch = _releases(submission)
    most = plan.limits.release_bytes
    num_units, num_groups = submission.num_units, plan.releases.counts.num_groups
    histogram = load_tensors(files[counts.file.path], counts_specs(plan), max_bytes=most)
    bound = 1000 * (num_units + num_groups)
    if any(int(value.abs().max()) > bound for value in histogram.values()):
        raise TensorFileError(counts.file.path, expected="counts of the order of the silo's units", got="far larger")
    shapes = sketch_release_specs(plan, num_units)
    load_tensors(files[sketch.file.path], shapes, max_bytes=most, max_abs=MAX_SKETCH)
