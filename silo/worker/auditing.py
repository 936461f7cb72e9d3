"""The worker's stage between training and statistics: audits every expert that would leave, and gates the draft."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ddm.images.rows import Images
from ddm.io.files import write_atomic
from ddm.io.tensors import TensorSpec, load_tensors, save_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.layout import part_of_images
from ddm.protocol.base import now_utc
from ddm.protocol.partition import RandomPartition
from ddm.protocol.submission import AuditVerdict
from ddm.training.job import JobFolder
from ddm.training.jobs import TrainingTask
from ddm.training.planned import BaseExpert, PlannedExpert, public_base
from silo.audit.document import ExpertAudit, read_report
from silo.audit.holdout import held_out, num_held_out
from silo.audit.measuring import audit_expert
from silo.audit.parts import discard_parts
from silo.audit.report import cannot_tell, could_not_measure, gate, whole_report
from silo.audit.subject import Subject
from silo.config import Policy, Site
from silo.data.cohort import Cohort
from silo.data.latents import pixels_of, training_inputs
from silo.plan.acceptance import AcceptedPlan
from silo.plan.own_experts import own_experts
from silo.plan.workspace import Workspace
from silo.worker.jobs import jobs_of
from silo.worker.stages import read_assignment
from silo.worker.training import find_parts, images_of_parts, wanted_job

# Shape legend: N images.


@dataclass(frozen=True)
class AuditInputs:
    """What the audit of a plan's experts starts from.

    Attributes:
        site: this one.
        accepted: the plan.
        work: its folder.
        policy: the site's.
        cohort: the images.
        inputs: the same as experts learn them.
        fine_N: each image's fine centroid.
        held_N: which images are held out.
        own: this silo's experts of an earlier plan, by name.
    """

    site: Site
    accepted: AcceptedPlan
    work: Workspace
    policy: Policy
    cohort: Cohort
    inputs: Cohort
    fine_N: Tensor
    held_N: Tensor
    own: Mapping[str, BaseExpert]


def check_auditable(accepted: AcceptedPlan, policy: Policy, cohort: Cohort) -> None:
    """Refuse, before days of training, a plan whose experts could not pass the audit afterwards.

    Privately trained experts need not pass it.

    Raises:
        AuditError: too little held-out data to measure leakage, and no waiver for this plan.
    """
    plan = accepted.plan
    if plan.expert.privacy:
        return
    if report := cannot_tell(plan.plan_id, plan.audit, num_held_out(cohort.num_units, policy)):
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
    plan, files = accepted.plan, accepted.files()
    if not work.held_path.exists():
        save_tensors(work.held_path, {"held": held_out(cohort, policy)})
    specs = {"held": TensorSpec("BOOL", (len(cohort.images),))}
    return AuditInputs(
        site=site,
        accepted=accepted,
        work=work,
        policy=policy,
        cohort=cohort,
        inputs=training_inputs(cohort, plan, site.private),
        fine_N=read_assignment(cohort, files, cohort_path),
        held_N=load_tensors(work.held_path, specs, max_bytes=len(cohort.images) + 4096)["held"],
        own=own_experts(site, plan, site.settings().silo_id),
    )


def audit_experts(
    audited: AuditInputs, tell: Callable[[int, int], None], should_stop: Callable[[], bool]
) -> None:
    """Audit all experts together, from the last part that was measured, and keep the report.

    Where experts were trained privately, an audit that breaks off stops nothing: that, too, would show.

    Args:
        audited: experts and data.
        tell: called with evaluations done and in all, of one expert after the other; what it raises stops the work.
        should_stop: its yes stops a training of the audit.

    Raises:
        KeyboardInterrupt: `should_stop` said yes, or `tell` raised it.
    """
    accepted, work = audited.accepted, audited.work
    if work.audit_path.exists() and read_report(work.audit_path).plan_id == accepted.plan.plan_id:
        return  # another salt would give the same report another digest
    num_held = len(torch.unique(audited.cohort.unit_N[audited.held_N]))
    try:
        report = cannot_tell(accepted.plan.plan_id, accepted.plan.audit, num_held) or whole_report(
            accepted.plan.plan_id, num_held, _measured(audited, tell, should_stop)
        )
    except Exception as error:
        if accepted.plan.expert.privacy is None:
            raise
        report = could_not_measure(accepted.plan.plan_id, num_held, error)
    write_atomic(work.audit_path, report.encode())


def _measured(
    audited: AuditInputs, tell: Callable[[int, int], None], should_stop: Callable[[], bool]
) -> tuple[ExpertAudit, ...]:
    experts: list[ExpertAudit] = []
    for subject in _subjects(audited):
        experts.append(audit_expert(subject, tell, should_stop))
        discard_parts(subject.folder / "parts")
    return tuple(experts)


def audit_verdict(accepted: AcceptedPlan, work: Workspace, policy: Policy) -> AuditVerdict:
    """Return the verdict under which the experts may leave now; of privately trained ones, whatever was measured.

    Raises:
        AuditError: the audit was inconclusive and the policy holds no waiver for this plan.
    """
    if accepted.plan.expert.privacy:
        return AuditVerdict(verdict="bounded")
    return gate(
        read_report(work.audit_path), policy.audit, plan_digest=accepted.digest, now=now_utc()
    )


def _subjects(audited: AuditInputs) -> list[Subject]:
    """Return the experts, each with the images that it learned and those held out that are like its own."""
    plan, files = audited.accepted.plan, audited.accepted.files()
    settings, silo_id = audited.site.settings(), audited.site.settings().silo_id
    parts = find_parts(plan, files, audited.work, silo_id)
    learned = images_of_parts(plan, files, parts, audited.fine_N, audited.policy, audited.held_N)
    part_N = part_of_images(
        plan.partition, parts, files.clusters.group_F[audited.fine_N], plan.expert.training.seed
    )
    everywhere = isinstance(plan.partition, RandomPartition)
    public = public_base(plan, audited.accepted.folder)
    subjects = []
    for number, part in enumerate(parts):
        own_N = torch.ones_like(audited.held_N) if everywhere else part_N == number
        base = audited.own.get(part.expert_id, public)
        subjects.append(
            Subject(
                expert_id=part.expert_id,
                expert=PlannedExpert(
                    plan, silo_id, number, base, settings.training.engine, stops=False
                ),
                file=audited.work.expert_path(part.expert_id),
                files=files,
                inputs=audited.inputs,
                pixels=_pixels(audited, files),
                learned_N=learned[number],
                held_N=torch.nonzero(audited.held_N & own_N)[:, 0],
                public=public,
                secret=audited.site.salt(),
                num_samples=audited.policy.audit.num_samples,
                settings=settings.training,
                folder=audited.work.audit_folder(part.expert_id),
                job=partial(
                    _job, audited.work, jobs_of(settings.training, silo_id), part.expert_id
                ),
                wanted=partial(_wanted, audited.inputs),
            )
        )
    return subjects


def _pixels(audited: AuditInputs, files: PlanFiles) -> Images:
    return pixels_of(audited.cohort, files.latent, audited.accepted.plan)


def _job(work: Workspace, jobs: Path | None, expert_id: str, name: str) -> JobFolder:
    return work.job(f"audit-{expert_id}-{name}", jobs)


def _wanted(
    inputs: Cohort, expert: PlannedExpert, chosen: Tensor, folder: JobFolder
) -> TrainingTask:
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # where texts are copied to
    return wanted_job(expert, inputs, chosen, folder)
