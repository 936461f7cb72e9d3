"""Verifies that a submission is what its silo signed, what the plan requires, and safe to open.

Order matters: the signature before any parser, digests before tensors, shapes before values. The noised histogram is
read before the experts, since it decides which experts there may be.

`authenticate` tells what the silo signed from what merely arrived in its name. Only the former may be refused: a
refusal uses up one of the silo's submissions, and rubbish sent in its name would use them all.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from torch import Tensor

from aggregator.intake.limits import submission_entries
from aggregator.intake.private_experts import check_privacy
from ddm.errors import (
    AbsentFileError,
    DigestError,
    FormatError,
    PolicyError,
    ReplayError,
    UnlistedFileError,
)
from ddm.io.files import read_bounded
from ddm.io.tensors import check_file, load_tensors
from ddm.io.untrusted import check_digest, list_files
from ddm.loading.plan import PlanFiles
from ddm.models import MAX_WEIGHT, expected_tensors
from ddm.partition.layout import silo_parts
from ddm.protocol.base import MAX_DOCUMENT_BYTES, File, sha256_hex
from ddm.protocol.partition import RandomPartition, SiloPartition
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.protocol.statistics import StatisticKind
from ddm.protocol.submission import (
    Submission,
    expert_path,
    submission_path,
)
from ddm.statistics.of_plan import statistics_of
from ddm.trust.keys import PublicKey
from ddm.trust.silo_role import read_silo_metadata

MAX_ROLE_BYTES = 1 << 20
LEAST_LIFE = timedelta(days=4 * 365)


@dataclass(frozen=True)
class Expectation:
    """What one silo's submission must match.

    Attributes:
        plan: the current plan.
        plan_digest: sha256 of its signed bytes.
        silo_id: the silo, known from its Flower node, never from a field.
        key: the silo's enrolled signing key.
        sequence: the number under which the files were pulled.
        files: the plan's public tensors.
        now: the time of intake.
    """

    plan: Plan
    plan_digest: str
    silo_id: str
    key: PublicKey
    sequence: int
    files: PlanFiles
    now: datetime


@dataclass(frozen=True)
class SignedSubmission:
    """What arrived, byte for byte as the silo signed it under this number; nothing is known yet about what it says.

    Attributes:
        document: submission.json, as signed.
        listed: every other file that the silo's role lists, by its path, with bytes and digest.
        files: all files that arrived.
    """

    document: bytes
    listed: Mapping[str, tuple[int, str]]
    files: Mapping[str, Path]

    @property
    def digest(self) -> str:
        """The submission's digest, by which receipts name it."""
        return sha256_hex(self.document)


@dataclass(frozen=True)
class VerifiedSubmission:
    """A verified submission: the document, its digest, and the files that came with it."""

    submission: Submission
    digest: str
    files: Mapping[str, Path]


def authenticate(folder: Path, expected: Expectation) -> SignedSubmission:
    """Check that what arrived is what the silo's key signed for this plan under this number, all of it and no more.

    Args:
        folder: exactly the files that arrived; nobody else can write to it.
        expected: the plan, silo and sequence.

    Raises:
        TrustError: a signature, digest, role or path is wrong, a file is missing or was added.
        FormatError: a file is too large, the role is malformed, or was signed for another plan or number.
    """
    files = {
        name: entry.path
        for name, entry in list_files(folder, max_entries=submission_entries(expected.plan)).items()
    }
    plan_id, silo_id = expected.plan.plan_id, expected.silo_id
    role_name = f"metadata/{plan_id}.{silo_id}.json"
    role = read_bounded(_present(files, role_name), MAX_ROLE_BYTES, subject=role_name)
    # A release can be verified until the first of its signatures expires.
    until = expected.now + LEAST_LIFE
    version, signed = read_silo_metadata(
        role, plan_id=plan_id, silo_id=silo_id, key=expected.key, now=until
    )
    if version != expected.sequence:
        raise ReplayError(
            role_name, expected=f"version {expected.sequence}, the submission's", got=f"{version}"
        )
    signed = {name.removeprefix(f"{plan_id}/"): value for name, value in signed.items()}
    for name, listed in signed.items():
        _check_bytes(folder, files, name, listed)
    document = submission_path(silo_id)
    if document not in signed:
        raise AbsentFileError(
            document, expected="a submission that the silo's role lists", got="a role without it"
        )
    data = read_bounded(files[document], MAX_DOCUMENT_BYTES, subject=document)
    known = {role_name, *signed}
    # The signed document names the statistics' digests. One that does not parse is the silo's own, and refused later.
    with suppress(FormatError):
        for file in _statistics(data, document):
            _check_bytes(folder, files, file.path, (file.bytes, file.digest))
            known.add(file.path)
        if odd := sorted(files.keys() - known):
            subject = ascii(odd[0])[1:81]
            raise UnlistedFileError(
                subject, expected="only files that the submission lists", got="an unlisted file"
            )
    experts = {name: value for name, value in signed.items() if name != document}
    return SignedSubmission(document=data, listed=experts, files=files)


def verify_submission(signed: SignedSubmission, expected: Expectation) -> VerifiedSubmission:
    """Verify everything about a submission that the silo is known to have signed.

    Args:
        signed: what `authenticate` returned.
        expected: the plan, silo and sequence that it must match.

    Raises:
        DigestError: document and role disagree.
        FormatError: a document or tensor file is malformed, or belongs to another plan, silo or sequence.
        PolicyError: the submission spent or contains more than the plan allows.
    """
    document = submission_path(expected.silo_id)
    submission = Submission.parse(signed.document, subject=document)
    _check_binding(submission, expected)
    _check_experts_listed(submission, signed.listed, document)
    _check_terms(submission, expected)
    noisy_G = _check_statistics(submission, signed.files, expected)
    _check_experts(submission, expected, noisy_G)
    _check_weights(submission, signed.files, expected.plan)
    return VerifiedSubmission(submission=submission, digest=signed.digest, files=signed.files)


def _statistics(data: bytes, document: str) -> list[File]:
    return [statistic.file for statistic in Submission.parse(data, subject=document).statistics]


def _present(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        raise AbsentFileError(
            ascii(name)[1:81], expected="a file that the silo signed", got="no such file"
        )
    return files[name]


def _check_bytes(
    folder: Path, files: Mapping[str, Path], name: str, signed: tuple[int, str]
) -> None:
    _present(files, name)  # a signed name may lead anywhere
    check_digest(folder, name, *signed)


def _check_binding(submission: Submission, expected: Expectation) -> None:
    claims = (
        ("plan", expected.plan.plan_id, submission.plan_id),
        ("plan digest", expected.plan_digest, submission.plan_digest),
        ("silo", expected.silo_id, submission.silo_id),
        ("sequence", str(expected.sequence), str(submission.sequence)),
    )
    for subject, required, claimed in claims:
        if required != claimed:
            raise ReplayError(f"submission, {subject}", expected=required, got=claimed)
    if submission.approval is None:
        raise PolicyError("submission", expected="an approval", got="no approval")


def _check_experts_listed(
    submission: Submission, listed: Mapping[str, tuple[int, str]], document: str
) -> None:
    """Check that the role lists exactly the experts that the document names."""
    experts = {
        expert.file.path: (expert.file.bytes, expert.file.digest) for expert in submission.experts
    }
    if listed != experts:
        odd = sorted({name for name, _ in listed.items() ^ experts.items()})
        got = f"{len(odd)} unlisted or different, such as {ascii(odd[0])[:80]}"
        raise DigestError(
            f"experts of {document}", expected="exactly those that the silo's role lists", got=got
        )


def _check_terms(submission: Submission, expected: Expectation) -> None:
    """Check the submission against the plan: its statistics and their cost, its number of units, its file sizes."""
    plan, required, spent = expected.plan, expected.plan.statistics, submission.spent
    terms: dict[str, tuple[float, float]] = {
        kind: (part.epsilon, part.delta) for kind, part in required.terms.items()
    }
    terms["all together"] = (plan.spends.epsilon, plan.spends.delta)
    reported: dict[str, tuple[float, float]] = {
        each.kind: (each.epsilon, each.delta) for each in submission.statistics
    }
    reported["all together"] = (spent.epsilon, spent.delta)
    if reported.keys() != terms.keys():
        raise PolicyError(
            "submission, statistics", expected=", ".join(terms), got=", ".join(reported)
        )
    for kind, (epsilon, delta) in terms.items():
        if reported[kind] != (epsilon, delta):
            got = "{:g}, {:g}".format(*reported[kind])
            raise PolicyError(
                f"submission, epsilon and delta of {kind}",
                expected=f"{epsilon:g}, {delta:g}",
                got=got,
            )
    if spent.unit != required.unit:
        raise PolicyError("submission, privacy unit", expected=required.unit, got=spent.unit)
    _check_sizes(submission, plan)


def _check_sizes(submission: Submission, plan: Plan) -> None:
    numbers = [
        (
            "bytes of an expert",
            max(expert.file.bytes for expert in submission.experts),
            plan.limits.expert_bytes,
        ),
        (
            "bytes of a statistic",
            max(statistic.file.bytes for statistic in submission.statistics),
            plan.limits.statistic_bytes,
        ),
    ]
    for subject, size, most in numbers:
        if size > most:
            raise PolicyError(f"submission, {subject}", expected=f"at most {most}", got=f"{size}")
    fewest = plan.partition.min_images * (
        max_experts_per_silo(plan) if isinstance(plan.partition, RandomPartition) else 1
    )
    if plan.statistics.unit == "image" and submission.num_units < fewest:
        raise PolicyError(
            "submission, images", expected=f"at least {fewest}", got=f"{submission.num_units}"
        )


def _check_statistics(
    submission: Submission, files: Mapping[str, Path], expected: Expectation
) -> Tensor:
    """Open every statistic strictly, and refuse values that honest noise cannot explain.

    The statistics decide which experts exist and shape the router for all silos; the bounds limit what one silo can do
    to them.

    Returns:
        The noised histogram over groups, shape (G,), int64.
    """
    plan = expected.plan
    statistics = statistics_of(plan.statistics)
    opened: dict[StatisticKind, Mapping[str, Tensor]] = {}
    for submitted in submission.statistics:
        statistic = statistics[submitted.kind]
        specs = statistic.tensor_specs(submission.num_units)
        path = files[submitted.file.path]
        tensors = load_tensors(path, specs, max_bytes=plan.limits.statistic_bytes)
        statistic.check_received(tensors, submission.num_units, plan, expected.files.sketch)
        opened[submitted.kind] = tensors
    return opened["counts"]["counts"]


def _check_experts(submission: Submission, expected: Expectation, noisy_G: Tensor) -> None:
    """Check that the experts are those of the noised histogram, in its order, and state only what the plan allows.

    Additional experts, other names or exchanged clusters would put weights where the routers expect other images.
    """
    plan, silo_id = expected.plan, expected.silo_id
    parts = silo_parts(plan.partition, silo_id, expected.files.clusters, noisy_G)
    required = [
        (part.expert_id, part.cluster, expert_path(silo_id, part.expert_id)) for part in parts
    ]
    if [
        (expert.expert_id, expert.cluster, expert.file.path) for expert in submission.experts
    ] != required:
        names = ", ".join(part.expert_id for part in parts)
        got = ", ".join(expert.expert_id for expert in submission.experts)[:100]
        got = f"{len(submission.experts)} experts, {got}, whose names, clusters, paths or order differ"
        raise PolicyError(
            "submission, experts",
            expected=f"{names} in this order, as its noised counts imply",
            got=got,
        )
    by_image = isinstance(plan.partition, SiloPartition) and plan.statistics.unit == "image"
    for expert in submission.experts:
        if expert.num_images != (submission.num_units if by_image else None):
            number = (
                f"the silo's {submission.num_units} units"
                if by_image
                else "no number, since it would be exact"
            )
            got = "no number" if expert.num_images is None else f"{expert.num_images}"
            raise PolicyError("submission, images of an expert", expected=number, got=got)
        if expert.steps != plan.expert.training.num_steps:
            steps = f"{plan.expert.training.num_steps}"
            raise PolicyError("submission, training steps", expected=steps, got=f"{expert.steps}")
        check_privacy(plan, expert, submission.num_units)


def _check_weights(submission: Submission, files: Mapping[str, Path], plan: Plan) -> None:
    """Open each expert strictly, with bounded values, so that no silo can send arbitrary weights."""
    weights = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    for expert in submission.experts:
        check_file(
            files[expert.file.path], weights, max_bytes=plan.limits.expert_bytes, max_abs=MAX_WEIGHT
        )
