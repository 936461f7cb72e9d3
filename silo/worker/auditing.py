"""The worker's stage between training and statistics: audits every expert that would leave, and gates the draft."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ddm.io.files import write_atomic
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors
from ddm.protocol.base import now_utc
from ddm.protocol.partition import RandomPartition
from ddm.protocol.submission import AuditVerdict
from ddm.system.progress import ProgressCallback
from ddm.training.job import JobFolder
from ddm.training.jobs import TrainingTask
from ddm.training.planned import PlannedExpert, public_base
from silo.audit.document import ExpertAudit, read_report
from silo.audit.holdout import holdout_mask, num_holdout_units
from silo.audit.measuring import audit_expert
from silo.audit.parts import discard_measurements
from silo.audit.report import gate, inconclusive_report, interrupted_report, join_reports
from silo.audit.subject import AuditedExpert
from silo.config import Policy, Site
from silo.data.cohort import Cohort
from silo.data.latents import pixels_of, training_inputs
from silo.plan.acceptance import AcceptedPlan
from silo.plan.own_experts import own_experts
from silo.plan.workspace import Workspace
from silo.worker.jobs import jobs_of
from silo.worker.stages import read_assignment
from silo.worker.training import SiloTraining, make_training_task

# Shape legend: N images.


@dataclass(frozen=True)
class AuditInputs:
    """What the experts of a plan learn, and what the audit compares them with.

    Attributes:
        site: this one.
        accepted: the plan.
        cohort: the images; experts may learn their latents instead.
        holdout_N: which images are held out, shape (N,), bool.
        training: what the experts learn.
    """

    site: Site
    accepted: AcceptedPlan
    cohort: Cohort
    holdout_N: Tensor
    training: SiloTraining


def check_auditable(accepted: AcceptedPlan, policy: Policy, cohort: Cohort) -> None:
    """Refuse, before days of training, a plan whose experts could not pass the audit afterwards.

    Privately trained experts need not pass it.

    Raises:
        AuditError: too little held-out data to measure leakage, and no waiver for this plan.
    """
    plan = accepted.plan
    if plan.expert.privacy:
        return
    report = inconclusive_report(
        plan.plan_id, plan.audit, num_holdout_units(cohort.num_units, policy)
    )
    if report is not None:
        gate(report, policy.audit, plan_digest=accepted.digest, now=now_utc())


def gather_audit_inputs(
    site: Site,
    accepted: AcceptedPlan,
    work: Workspace,
    policy: Policy,
    cohort: Cohort,
    cohort_path: Path,
) -> AuditInputs:
    """Gather what experts learn and what they are compared with; who is held out is decided once, before training.

    Raises:
        DataError: the assignment, the latents or the vectors of captions are missing or do not fit.
    """
    plan = accepted.plan
    files = accepted.files()
    settings = site.settings()
    holdout_N = _held_out_once(work, cohort, policy)
    training = SiloTraining(
        plan=plan,
        files=files,
        cohort=training_inputs(cohort, plan, site.private),
        fine_N=read_assignment(cohort, files, cohort_path),
        work=work,
        policy=policy,
        silo_id=settings.silo_id,
        settings=settings.training,
        bundle=accepted.folder,
        own_experts=own_experts(site, plan, settings.silo_id),
        holdout_N=holdout_N,
    )
    return AuditInputs(
        site=site, accepted=accepted, cohort=cohort, holdout_N=holdout_N, training=training
    )


def _held_out_once(work: Workspace, cohort: Cohort, policy: Policy) -> Tensor:
    """Return which images are held out, as it was decided when the plan was first trained for.

    A policy that changes during the training must not move images from one side to the other: the audit would compare
    an expert with images that it learned.
    """
    if not work.held_path.exists():
        save_tensors(work.held_path, {"held": holdout_mask(cohort, policy)})
    num_images = len(cohort.images)
    specs = {"held": TensorSpec("BOOL", (num_images,))}
    return load_tensors(work.held_path, specs, max_bytes=num_images + 4096)["held"]


def audit_experts(
    inputs: AuditInputs, on_progress: ProgressCallback, should_stop: Callable[[], bool]
) -> None:
    """Audit all experts together, from the last part that was measured, and keep the report.

    Where experts were trained privately, an audit that breaks off stops nothing: that, too, would show.

    Args:
        inputs: experts and data.
        on_progress: called with evaluations done and in all, of one expert after the other; what it raises stops the
            work.
        should_stop: returns true to stop a training of the audit.

    Raises:
        KeyboardInterrupt: `should_stop` returned true, or `on_progress` raised it.
    """
    plan = inputs.accepted.plan
    report_path = inputs.training.work.audit_path
    # A report is written once: another salt would give the same report another digest.
    if report_path.exists() and read_report(report_path).plan_id == plan.plan_id:
        return
    num_holdout = len(torch.unique(inputs.cohort.unit_N[inputs.holdout_N]))
    try:
        # By the units that are really held out, which is decided by now; `check_auditable` could only foresee them.
        report = inconclusive_report(plan.plan_id, plan.audit, num_holdout)
        if report is None:
            audits = _audit_each_expert(inputs, on_progress, should_stop)
            report = join_reports(plan.plan_id, num_holdout, audits)
    except Exception as error:
        # Whether an audit fails may depend on the images, so that a private expert must leave in spite of it.
        if plan.expert.privacy is None:
            raise
        report = interrupted_report(plan.plan_id, num_holdout, error)
    write_atomic(report_path, report.encode())


def _audit_each_expert(
    inputs: AuditInputs, on_progress: ProgressCallback, should_stop: Callable[[], bool]
) -> tuple[ExpertAudit, ...]:
    audits: list[ExpertAudit] = []
    for subject in _subjects(inputs):
        audits.append(audit_expert(subject, on_progress, should_stop))
        discard_measurements(subject.folder / "parts")
    return tuple(audits)


def audit_verdict(accepted: AcceptedPlan, work: Workspace, policy: Policy) -> AuditVerdict:
    """Return the verdict under which the experts may leave now; of privately trained ones, whatever was measured.

    Raises:
        AuditError: the audit was inconclusive and the policy holds no waiver for this plan.
    """
    if accepted.plan.expert.privacy:
        return AuditVerdict(verdict="bounded")
    report = read_report(work.audit_path)
    return gate(report, policy.audit, plan_digest=accepted.digest, now=now_utc())


def _subjects(inputs: AuditInputs) -> list[AuditedExpert]:
    """Return the experts, each with the images that it learned and those held out that are like its own."""
    training = inputs.training
    plan = training.plan
    parts = training.parts()
    learned_images = training.images_of_parts(parts)
    part_N = training.part_of_images(parts)
    # Copies are found in pixels, also where experts learn latents.
    pixels = pixels_of(inputs.cohort, training.files.latent, plan)
    jobs = jobs_of(training.settings, training.silo_id)
    subjects = []
    for number, part in enumerate(parts):
        # An expert of one cluster is compared with images of that cluster: others would look strange to it, learned
        # or not.
        like_own_N = part_N == number
        if isinstance(plan.partition, RandomPartition):
            # Every part is a random share of all images, so that all those held out are like its own.
            like_own_N = torch.ones_like(inputs.holdout_N)
        subject = AuditedExpert(
            expert_id=part.expert_id,
            expert=training.planned_expert(number, part.expert_id),
            file=training.work.expert_path(part.expert_id),
            files=training.files,
            inputs=training.cohort,
            pixels=pixels,
            learned_N=learned_images[number],
            holdout_N=torch.nonzero(inputs.holdout_N & like_own_N)[:, 0],
            public=public_base(plan, training.bundle),
            secret=inputs.site.salt(),
            num_samples=training.policy.audit.num_samples,
            settings=training.settings,
            folder=training.work.audit_folder(part.expert_id),
            job_folder=partial(_audit_job, training.work, jobs, part.expert_id),
            make_task=partial(_audit_task, training.cohort),
        )
        subjects.append(subject)
    return subjects


def _audit_job(work: Workspace, jobs: Path | None, expert_id: str, name: str) -> JobFolder:
    return work.job(f"audit-{expert_id}-{name}", jobs)


def _audit_task(
    cohort: Cohort, expert: PlannedExpert, chosen: Tensor, folder: JobFolder
) -> TrainingTask:
    # The vectors of chosen captions are copied into the folder, so it must be there, closed to others.
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return make_training_task(expert, cohort, chosen, folder)
