"""Verifies that a submission is what its silo signed, what the plan requires, and safe to open.

Order matters: the signature before any parser, digests before tensors, shapes before values. The noised histogram is
read before the experts, since it decides which experts there may be.

`authenticate` separates what the silo signed from what merely arrived in its name. Only the former may be refused: a
refusal uses up one of the silo's submissions, and rubbish sent in its name would use them all.
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from torch import Tensor

from aggregator.intake.limits import submission_entries
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
from ddm.privacy.accounting import noise_multiplier_for
from ddm.protocol.base import MAX_DOCUMENT_BYTES, sha256_hex
from ddm.protocol.partition import RandomPartition, SiloPartition
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.protocol.statistics import StatisticKind
from ddm.protocol.submission import (
    Submission,
    SubmittedExpert,
    expert_path,
    submission_path,
)
from ddm.protocol.weight_privacy import DpSgdPrivacy
from ddm.statistics.of_plan import statistics_of
from ddm.trust.keys import PublicKey
from ddm.trust.silo_role import read_silo_metadata

MAX_ROLE_BYTES = 1 << 20
# How long a silo's signature must still be valid.
MIN_VALIDITY = timedelta(days=4 * 365)
# Relative difference of noise multipliers, each of which is searched for by the machine that needs it.
_NOISE_TOLERANCE = 1e-2


_OTHER_FEDERATION = (
    "Submit from a site that joined this federation: make it with this federation's "
    "invitation, `silo init SITE --help`, then `silo run SITE`."
)


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
    entries = list_files(folder, max_entries=submission_entries(expected.plan))
    files = {name: entry.path for name, entry in entries.items()}
    role_name = f"metadata/{expected.plan.plan_id}.{expected.silo_id}.json"
    signed = _read_role(files, role_name, expected)
    for name, (size, digest) in signed.items():
        _present(files, name)  # a signed name may lead anywhere
        check_digest(folder, name, size, digest)

    # The role lists the document and the experts; the document lists the statistics, and is covered by the role.
    document = submission_path(expected.silo_id)
    if document not in signed:
        raise AbsentFileError(
            document, expected="a submission that the silo's role lists", got="a role without it"
        )
    data = read_bounded(files[document], MAX_DOCUMENT_BYTES, subject=document)
    # The signed document names the statistics' digests. One that does not parse is the silo's own, and refused later.
    with suppress(FormatError):
        known_names = {role_name, *signed}
        for statistic in Submission.parse(data, subject=document).statistics:
            file = statistic.file
            _present(files, file.path)
            check_digest(folder, file.path, file.bytes, file.digest)
            known_names.add(file.path)
        _check_no_other_file(files, known_names)
    experts = {name: listed for name, listed in signed.items() if name != document}
    return SignedSubmission(document=data, listed=experts, files=files)


def _read_role(
    files: Mapping[str, Path], role_name: str, expected: Expectation
) -> dict[str, tuple[int, str]]:
    """Verify the silo's role; return the size and digest of each file that it lists, by its path in the submission."""
    plan_id = expected.plan.plan_id
    role = read_bounded(_present(files, role_name), MAX_ROLE_BYTES, subject=role_name)
    # A release can be verified until the first of its signatures expires.
    version, signed = read_silo_metadata(
        role,
        root_digest=expected.plan.root_digest,
        plan_id=plan_id,
        silo_id=expected.silo_id,
        key=expected.key,
        now=expected.now + MIN_VALIDITY,
    )
    # An earlier submission, signed and genuine, could otherwise be sent again in the place of this one.
    if version != expected.sequence:
        raise ReplayError(
            role_name, expected=f"version {expected.sequence}, the submission's", got=f"{version}"
        )
    return {name.removeprefix(f"{plan_id}/"): listed for name, listed in signed.items()}


def _check_no_other_file(files: Mapping[str, Path], known_names: Set[str]) -> None:
    # A file that nobody signed would be published beside those that the silo did sign.
    unlisted = sorted(files.keys() - known_names)
    if unlisted:
        raise UnlistedFileError(
            ascii(unlisted[0])[1:81],
            expected="only files that the submission lists",
            got="an unlisted file",
        )


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


def _present(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        raise AbsentFileError(
            ascii(name)[1:81], expected="a file that the silo signed", got="no such file"
        )
    return files[name]


def _check_binding(submission: Submission, expected: Expectation) -> None:
    # A document that names another federation than the role that lists it is the silo's own fault, and answered.
    submission.check_federation(expected.plan.root_digest, "submission", _OTHER_FEDERATION)
    # The silo id comes from the connection: a genuine document of another silo, plan or number is a replay.
    claims = (
        ("plan", expected.plan.plan_id, submission.plan_id),
        ("plan digest", expected.plan_digest, submission.plan_digest),
        ("silo", expected.silo_id, submission.silo_id),
        ("sequence", str(expected.sequence), str(submission.sequence)),
    )
    for subject, required, claimed in claims:
        if required != claimed:
            raise ReplayError(f"submission, {subject}", expected=required, got=claimed)
    # A draft has none, and is the same document otherwise: what nobody approved at the site may not be published.
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
        differing = sorted({name for name, _ in listed.items() ^ experts.items()})
        raise DigestError(
            f"experts of {document}",
            expected="exactly those that the silo's role lists",
            got=f"{len(differing)} unlisted or different, such as {ascii(differing[0])[:80]}",
        )


def _check_terms(submission: Submission, expected: Expectation) -> None:
    """Check the submission against the plan: its statistics and their cost, its number of units, its file sizes."""
    plan = expected.plan
    spent = submission.spent
    required_terms: dict[str, tuple[float, float]] = {}
    for kind, terms in plan.statistics.terms.items():
        required_terms[kind] = (terms.epsilon, terms.delta)
    # Exactly the plan's, since the manifest states them: less noise would break its promise, more spoils the router.
    required_terms["all together"] = (plan.spends.epsilon, plan.spends.delta)
    stated_terms: dict[str, tuple[float, float]] = {}
    for statistic in submission.statistics:
        stated_terms[statistic.kind] = (statistic.epsilon, statistic.delta)
    stated_terms["all together"] = (spent.epsilon, spent.delta)
    if stated_terms.keys() != required_terms.keys():
        raise PolicyError(
            "submission, statistics",
            expected=", ".join(required_terms),
            got=", ".join(stated_terms),
        )
    for subject, (epsilon, delta) in required_terms.items():
        if stated_terms[subject] != (epsilon, delta):
            raise PolicyError(
                f"submission, epsilon and delta of {subject}",
                expected=f"{epsilon:g}, {delta:g}",
                got="{:g}, {:g}".format(*stated_terms[subject]),
            )
    unit = plan.statistics.unit
    if spent.unit != unit:
        raise PolicyError("submission, privacy unit", expected=unit, got=spent.unit)
    _check_sizes(submission, plan)


def _check_sizes(submission: Submission, plan: Plan) -> None:
    # Checked before a file is opened: the plan's limits bound what intake reads.
    limits = plan.limits
    expert_bytes = max(expert.file.bytes for expert in submission.experts)
    statistic_bytes = max(statistic.file.bytes for statistic in submission.statistics)
    sizes = {
        "bytes of an expert": (expert_bytes, limits.expert_bytes),
        "bytes of a statistic": (statistic_bytes, limits.statistic_bytes),
    }
    for subject, (size, limit) in sizes.items():
        if size > limit:
            raise PolicyError(f"submission, {subject}", expected=f"at most {limit}", got=f"{size}")
    min_images = plan.partition.min_images
    if isinstance(plan.partition, RandomPartition):
        # Each of a silo's experts learns a random share of its images, so that each needs enough of them.
        min_images *= max_experts_per_silo(plan)
    if plan.statistics.unit == "image" and submission.num_units < min_images:
        raise PolicyError(
            "submission, images", expected=f"at least {min_images}", got=f"{submission.num_units}"
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
        # Exactly the tensors, types and shapes that the plan implies: anything else is refused before its values are
        # read.
        tensors = load_tensors(path, specs, max_bytes=plan.limits.statistic_bytes)
        statistic.check_received(tensors, submission.num_units, plan, expected.files.sketch)
        opened[submitted.kind] = tensors
    return opened["counts"]["counts"]


def _check_experts(submission: Submission, expected: Expectation, noisy_G: Tensor) -> None:
    """Check that the experts are those of the noised histogram, in its order, and state only what the plan allows.

    Additional experts, other names or exchanged clusters would put weights where the routers expect other images.
    """
    plan = expected.plan
    silo_id = expected.silo_id
    parts = silo_parts(plan.partition, silo_id, expected.files.clusters, noisy_G)
    required = [
        (part.expert_id, part.cluster, expert_path(silo_id, part.expert_id)) for part in parts
    ]
    stated = [(expert.expert_id, expert.cluster, expert.file.path) for expert in submission.experts]
    if stated != required:
        required_names = ", ".join(part.expert_id for part in parts)
        stated_names = ", ".join(expert.expert_id for expert in submission.experts)[:100]
        raise PolicyError(
            "submission, experts",
            expected=f"{required_names} in this order, as its noised counts imply",
            got=f"{len(stated)} experts, {stated_names}, whose names, clusters, paths or order differ",
        )
    for expert in submission.experts:
        _check_num_images(submission, expert, plan)
        num_steps = plan.expert.training.num_steps
        # Fewer steps would be another training than the one that all silos agreed to, under the same plan's name.
        if expert.steps != num_steps:
            raise PolicyError(
                "submission, training steps", expected=f"{num_steps}", got=f"{expert.steps}"
            )
        check_privacy(plan, expert, submission.num_units)


def _check_num_images(submission: Submission, expert: SubmittedExpert, plan: Plan) -> None:
    """Check that an expert states no exact number of images, unless it is the silo's public number of units."""
    required = None
    description = "no number, since it would be exact"
    if isinstance(plan.partition, SiloPartition) and plan.statistics.unit == "image":
        required = submission.num_units
        description = f"the silo's {submission.num_units} units"
    if expert.num_images != required:
        got = "no number" if expert.num_images is None else f"{expert.num_images}"
        raise PolicyError("submission, images of an expert", expected=description, got=got)


def check_privacy(plan: Plan, expert: SubmittedExpert, num_units: int) -> None:
    """Refuse an expert that states more, less or other privacy than the plan requires of a silo of this many units.

    Raises:
        PolicyError: names the first field that differs.
    """
    terms = plan.expert.privacy
    stated = expert.privacy
    subject = f"submission, privacy of {expert.expert_id}"
    if terms is None:
        if isinstance(stated, DpSgdPrivacy):
            raise PolicyError(
                subject, expected="no guarantee, as the plan asks for none", got=str(stated)
            )
        return
    if not isinstance(stated, DpSgdPrivacy):
        raise PolicyError(
            subject,
            expected=f"epsilon {terms.epsilon:g}, delta {terms.delta:g}",
            got="no guarantee",
        )
    unit = plan.statistics.unit
    rate = terms.rate(num_units)
    required = (terms.epsilon, terms.delta, unit, rate)
    if (stated.epsilon, stated.delta, stated.unit, stated.rate) != required:
        raise PolicyError(
            subject,
            expected=f"epsilon {terms.epsilon:g}, delta {terms.delta:g} per {unit}, rate {rate:.6g}",
            got=f"{stated}, rate {stated.rate:.6g}",
        )
    num_steps = plan.expert.training.num_steps
    # Both sides search for the multiplier, so that a small difference is not a sign of less noise.
    min_noise = noise_multiplier_for(terms.epsilon, terms.delta, stated.rate, num_steps)
    if stated.noise_multiplier < min_noise * (1 - _NOISE_TOLERANCE):
        raise PolicyError(
            f"{subject}, noise multiplier",
            expected=f"at least {min_noise:.4g}",
            got=f"{stated.noise_multiplier:.4g}",
        )
    if expert.training.seconds is not None:
        raise PolicyError(
            f"{subject}, seconds", expected="none, since they depend on the images", got="a number"
        )


def _check_weights(submission: Submission, files: Mapping[str, Path], plan: Plan) -> None:
    """Open each expert strictly, with bounded values, so that no silo can send arbitrary weights."""
    weights = expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    for expert in submission.experts:
        check_file(
            files[expert.file.path], weights, max_bytes=plan.limits.expert_bytes, max_abs=MAX_WEIGHT
        )
