"""Drafts, signs and sends a submission: everything that leaves a silo passes through here."""

import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from ddm.errors import ApprovalError
from ddm.io.files import link_or_copy, move_into_place, staging_folder, write_atomic
from ddm.io.modes import group_folder, open_to_group
from ddm.loading.plan import PlanFiles
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
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata
from silo.audit.report import check_waiver
from silo.config import Isolation, Site
from silo.plan.acceptance import AcceptedPlan
from silo.plan.workspace import TrainingRecord, Workspace
from silo.privacy.expert import stated_privacy
from silo.privacy.ledger import Ledger
from silo.worker.training import find_parts


def write_draft(
    accepted: AcceptedPlan,
    work: Workspace,
    files: PlanFiles,
    ledger: Ledger,
    verdict: AuditVerdict,
    *,
    silo_id: str,
    dataset_digest: str,
    sequence: int,
    isolation: Isolation,
    carry_over: bool,
    now: datetime,
) -> Submission:
    """Write down everything that would leave, except the approval and the signature over all of it.

    Raises:
        AuditError: the waiver is over.
    """
    plan = accepted.plan
    if verdict.waiver:
        check_waiver(verdict.waiver, plan_digest=accepted.digest, now=now)
    parts = find_parts(plan, files, work, silo_id)
    records = [work.record(part.expert_id) for part in parts]
    with_images = isinstance(plan.partition, SiloPartition) and plan.statistics.unit == "image"
    head_digest, num_entries, chain = ledger.head
    privacy = stated_privacy(plan, ledger, accepted.digest, dataset_digest, records[0].num_units)
    return Submission(
        plan_id=plan.plan_id,
        plan_digest=accepted.digest,
        silo_id=silo_id,
        sequence=sequence,
        created_at=now,
        num_units=records[0].num_units,
        isolation=isolation,
        experts=tuple(
            _submitted_expert(record, part.cluster, work, silo_id, privacy, with_images=with_images)
            for record, part in zip(records, parts, strict=True)
        ),
        statistics=tuple(_submitted_statistics(plan, work)),
        spent=Spent(
            epsilon=plan.spends.epsilon, delta=plan.spends.delta, unit=plan.statistics.unit
        ),
        ledger=LedgerHead(head_digest=head_digest, num_entries=num_entries, chain=chain),
        audit=verdict,
        approval=None,
        carry_over=carry_over,
        software={"archipelago": version("archipelago"), "torch": version("torch")},
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
    return SubmittedExpert(
        expert_id=record.expert_id,
        cluster=cluster,
        num_images=record.num_units if with_images else None,
        steps=record.steps,
        file=File.of(expert_path(silo_id, record.expert_id), work.expert_path(record.expert_id)),
        training=SubmittedTraining(
            seconds=record.training.seconds if isinstance(privacy, NoWeightPrivacy) else None,
            flops=record.training.flops,
        ),
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


def stage_review(draft_submission: Submission, work: Workspace, review: Path) -> str:
    """Lay out, byte for byte, everything that would leave, for a person to inspect; return the draft's digest."""
    shutil.rmtree(review, ignore_errors=True)
    review.mkdir(parents=True)
    for path, source in payload(draft_submission, work).items():
        link_or_copy(source, review / path)
    write_atomic(review / "draft.json", draft_submission.encode())
    return draft_submission.digest


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
    draft_submission: Submission,
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
    if waiver := draft_submission.audit.waiver:
        check_waiver(waiver, plan_digest=draft_submission.plan_digest, now=approval.at)
    submission = draft_submission.model_copy(update={"approval": approval})
    files = payload(submission, work)
    final = site.outbox / submission.plan_id / str(submission.sequence)
    if final.exists():
        return Submission.parse(
            (final / submission_path(submission.silo_id)).read_bytes(), subject="submission.json"
        )
    _check_unchanged(submission, files)
    encoded = submission.encode()
    plan_id, silo_id = submission.plan_id, submission.silo_id
    prefix = f"{plan_id}/"
    signed = {prefix + submission_path(silo_id): (len(encoded), sha256_hex(encoded))}
    signed |= {
        prefix + expert.file.path: (expert.file.bytes, expert.file.digest)
        for expert in submission.experts
    }
    role = sign_silo_metadata(plan_id, silo_id, signed, key, version=submission.sequence, now=now)

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
    listed = [expert.file for expert in submission.experts] + [
        statistic.file for statistic in submission.statistics
    ]
    for file in listed:
        if (found := sha256_file(files[file.path])) != file.digest:
            expected = f"the bytes that were reviewed, sha256 {file.digest}"
            raise ApprovalError(file.path, expected=expected, got=f"sha256 {found}")
