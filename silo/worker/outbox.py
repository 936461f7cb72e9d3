"""Drafts, signs and sends a submission: everything that leaves a silo passes through here."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddm.errors import ApprovalError
from ddm.io.files import link_or_copy, move_into_place, staging_folder, write_atomic
from ddm.io.modes import group_folder, open_to_group
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.partition import SiloPartition
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import SubmittedStatistic
from ddm.protocol.submission import (
    Approval,
    AuditVerdict,
    LedgerHead,
    Spent,
    Submission,
    SubmittedExpert,
    SubmittedTraining,
    expert_path,
    submission_path,
)
from ddm.protocol.weight_privacy import DpSgdPrivacy, NoWeightPrivacy
from ddm.statistics.of_plan import statistics_of
from ddm.system.version import software_versions
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata
from silo.audit.report import check_waiver
from silo.config import Isolation, Site
from silo.plan.acceptance import AcceptedPlan
from silo.plan.workspace import TrainingRecord, Workspace
from silo.privacy.expert import stated_privacy
from silo.privacy.ledger import Ledger
from silo.privacy.spending import PlannedSpending
from silo.worker.training import find_parts


@dataclass(frozen=True)
class DraftTerms:
    """What a draft states besides experts, statistics and their audit.

    Attributes:
        silo_id: this silo.
        dataset_digest: the digest of the images that were scanned for the plan.
        sequence: the number of the submission.
        isolation: what separates the courier from the data.
        carry_over: whether later plans may take experts and statistics over.
        serve_as_base: whether later plans may start training from the experts.
        created_at: the time.
    """

    silo_id: str
    dataset_digest: str
    sequence: int
    isolation: Isolation
    carry_over: bool
    serve_as_base: bool
    created_at: datetime


def write_draft(
    accepted: AcceptedPlan,
    work: Workspace,
    ledger: Ledger,
    verdict: AuditVerdict,
    terms: DraftTerms,
) -> Submission:
    """Write down everything that would leave, except the approval and the signature over all of it.

    Raises:
        AuditError: the waiver is over.
    """
    plan = accepted.plan
    files = accepted.files()
    if verdict.waiver:
        check_waiver(verdict.waiver, plan_digest=accepted.digest, now=terms.created_at)
    parts = find_parts(plan, files, work, terms.silo_id)
    records = [work.record(part.expert_id) for part in parts]
    num_units = records[0].num_units
    spending = PlannedSpending(
        plan,
        accepted.digest,
        terms.dataset_digest,
        num_units,
    )
    privacy = stated_privacy(spending, ledger)
    # Where one expert learns all images and the unit is an image, its number is the silo's public number of units. Any
    # other number of images would be an exact count that no epsilon pays for.
    with_images = isinstance(plan.partition, SiloPartition) and plan.statistics.unit == "image"
    experts = [
        _submitted_expert(
            record, part.cluster, work, terms.silo_id, privacy, with_images=with_images
        )
        for record, part in zip(records, parts, strict=True)
    ]
    head_digest, num_entries, chain = ledger.head
    return Submission(
        root_digest=plan.root_digest,
        plan_id=plan.plan_id,
        plan_digest=accepted.digest,
        silo_id=terms.silo_id,
        sequence=terms.sequence,
        created_at=terms.created_at,
        num_units=num_units,
        isolation=terms.isolation,
        experts=tuple(experts),
        statistics=tuple(_submitted_statistics(plan, work)),
        spent=Spent(
            epsilon=plan.spends.epsilon, delta=plan.spends.delta, unit=plan.statistics.unit
        ),
        ledger=LedgerHead(head_digest=head_digest, num_entries=num_entries, chain=chain),
        audit=verdict,
        approval=None,
        carry_over=terms.carry_over,
        serve_as_base=terms.serve_as_base,
        software=software_versions(),
    )


def _submitted_expert(
    record: TrainingRecord,
    cluster: int | None,
    work: Workspace,
    silo_id: str,
    privacy: NoWeightPrivacy | DpSgdPrivacy,
    *,
    with_images: bool,
) -> SubmittedExpert:
    """Describe one expert, with a number of images only where it is the silo's public number of units."""
    num_images = record.num_units if with_images else None
    seconds = None
    if isinstance(privacy, NoWeightPrivacy):
        # How long training took depends on the images; a privately trained expert states nothing but its epsilon.
        seconds = record.training.seconds
    return SubmittedExpert(
        expert_id=record.expert_id,
        cluster=cluster,
        num_images=num_images,
        steps=record.steps,
        file=File.of(expert_path(silo_id, record.expert_id), work.expert_path(record.expert_id)),
        training=SubmittedTraining(seconds=seconds, flops=record.training.flops),
        privacy=privacy,
    )


def _submitted_statistics(plan: Plan, work: Workspace) -> Iterator[SubmittedStatistic]:
    """Describe each statistic: its cost, which is the plan's, and its file."""
    for statistic in statistics_of(plan.statistics).values():
        terms = plan.statistics.terms[statistic.kind]
        file = File.of(statistic.file_name, work.statistics / statistic.file_name)
        yield SubmittedStatistic(
            kind=statistic.kind, epsilon=terms.epsilon, delta=terms.delta, file=file
        )


def stage_review(draft: Submission, work: Workspace, review: Path) -> str:
    """Lay out, byte for byte, everything that would leave, for a person to inspect; return the draft's digest."""
    # Of an earlier draft, whose files a person must not take for those of this one.
    shutil.rmtree(review, ignore_errors=True)
    review.mkdir(parents=True)
    for path, source in payload(draft, work).items():
        # A link takes no space for weights that may be gigabytes; a change of the original is noticed when it is
        # sent.
        link_or_copy(source, review / path)
    write_atomic(review / "draft.json", draft.encode())
    return draft.digest


def payload(submission: Submission, work: Workspace) -> Mapping[str, Path]:
    """Return the tensor files that leave with a submission: relative path to the place on this site."""
    experts = {
        expert.file.path: work.expert_path(expert.expert_id) for expert in submission.experts
    }
    statistics = {
        statistic.file.path: work.statistics / statistic.file.path
        for statistic in submission.statistics
    }
    return {**experts, **statistics}


def send_submission(
    draft: Submission,
    work: Workspace,
    site: Site,
    key: SigningKey,
    approval: Approval,
    *,
    now: datetime,
) -> Submission:
    """Sign an approved draft and move it into the outbox in one rename; one that is there already stays unchanged.

    The silo's signature lists the submission and its experts; the submission lists its statistics by digest.

    Raises:
        ApprovalError: a file changed since it was reviewed.
        AuditError: the waiver is over.
    """
    waiver = draft.audit.waiver
    if waiver is not None:
        check_waiver(waiver, plan_digest=draft.plan_digest, now=approval.at)
    submission = draft.model_copy(update={"approval": approval})
    plan_id = submission.plan_id
    silo_id = submission.silo_id
    files = payload(submission, work)
    final = site.outbox / plan_id / str(submission.sequence)
    if final.exists():
        # Sent before a crash: the signature over these bytes must stay the only one.
        sent = (final / submission_path(silo_id)).read_bytes()
        return Submission.parse(sent, subject="submission.json")
    _check_unchanged(submission, files)

    encoded = submission.encode()
    signed = {f"{plan_id}/{submission_path(silo_id)}": (len(encoded), sha256_hex(encoded))}
    for expert in submission.experts:
        signed[f"{plan_id}/{expert.file.path}"] = (expert.file.bytes, expert.file.digest)
    # A later submission has the higher version, so that an earlier one cannot take its place.
    role = sign_silo_metadata(
        plan_id,
        silo_id,
        signed,
        key,
        root_digest=submission.root_digest,
        version=submission.sequence,
        now=now,
    )

    # The courier, another user, sees the whole submission or nothing of it.
    group_folder(final.parent, site.outbox)
    with staging_folder(final) as part:
        for path, source in files.items():
            link_or_copy(source, part / path)
        write_atomic(part / submission_path(silo_id), encoded)
        write_atomic(part / "metadata" / f"{plan_id}.{silo_id}.json", role)
        open_to_group(part, site.outbox)
        move_into_place(part, final)
    return submission


def _check_unchanged(submission: Submission, files: Mapping[str, Path]) -> None:
    """Refuse files that changed after a person inspected them."""
    listed = [expert.file for expert in submission.experts]
    listed += [statistic.file for statistic in submission.statistics]
    for file in listed:
        # Read again after the approval, which may have come days after the draft was laid out.
        digest = sha256_file(files[file.path])
        if digest != file.digest:
            expected = f"the bytes that were reviewed, sha256 {file.digest}"
            raise ApprovalError(
                file.path,
                expected=expected,
                got=f"sha256 {digest}",
                remedy="Restore private/ from backup, or give the plan up: `silo withdraw SITE`.",
            )
