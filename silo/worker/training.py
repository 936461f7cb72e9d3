"""Trains a silo's experts one after another: which experts there are, and which images each learns; resumable anywhere.

The noised histogram alone decides which experts exist (`ddm.partition.layout`), so their list reveals nothing more. The
noise can select a cluster of which the silo holds hardly any image. Its expert is trained all the same, since leaving
it out would reveal the true count; to keep it from memorising a handful of images, it also learns the silo's images
nearest to the cluster, up to the fewest images that plan and policy allow for an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ddm.errors import DataError, PolicyError
from ddm.images.rows import Images, select
from ddm.io.files import write_atomic
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.partition.layout import ExpertPart, part_of_images, silo_parts
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import sha256_hex
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan
from ddm.protocol.submission import ExpertTraining
from ddm.statistics.counts import Counts
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.planned import BaseExpert, PlannedExpert, public_base
from ddm.training.progress import Progress
from silo.config import Policy
from silo.data.captions import some_texts
from silo.data.cohort import Cohort
from silo.plan.workspace import TrainingRecord, Workspace
from silo.privacy.expert import PaidTraining
from silo.worker.jobs import discard_others, jobs_of

# Shape legend: N images, F fine centroids, G public groups, D feature values.


@dataclass(frozen=True)
class SiloTraining:
    """Everything from which a silo's experts of one plan are trained.

    Attributes:
        plan: the accepted plan.
        files: its public tensors.
        cohort: the private images, as experts learn them.
        fine_N: each image's fine centroid.
        work: this plan's folder.
        policy: this site's.
        silo_id: this silo.
        settings: how this site trains.
        bundle: the folder with the plan's files, for a plan whose experts start from a public one.
        own_experts: this silo's experts of an earlier plan, by name, for a plan that trains them on.
        holdout_N: which images no expert learns; None for none.
        paid: the debit of a plan that trains privately.
    """

    plan: Plan
    files: PlanFiles
    cohort: Cohort
    fine_N: Tensor
    work: Workspace
    policy: Policy
    silo_id: str
    settings: TrainingSettings = TrainingSettings()
    bundle: Path | None = None
    own_experts: Mapping[str, BaseExpert] = field(default_factory=dict)
    holdout_N: Tensor | None = None
    paid: PaidTraining | None = None

    def parts(self) -> tuple[ExpertPart, ...]:
        """This silo's experts, from the noised histogram where it decides."""
        return find_parts(self.plan, self.files, self.work, self.silo_id)

    def part_of_images(self, parts: Sequence[ExpertPart]) -> Tensor:
        """The number of the expert to which each image belongs, shape (N,)."""
        group_N = self.files.clusters.group_F[self.fine_N]
        return part_of_images(self.plan.partition, parts, group_N, self.plan.expert.training.seed)

    def images_of_parts(self, parts: Sequence[ExpertPart]) -> list[Tensor]:
        """The images that each expert learns, as `images_of_part` chooses them, none of them held out."""
        part_N = self.part_of_images(parts)
        open_N = torch.arange(len(self.fine_N))
        if self.holdout_N is not None:
            open_N = torch.nonzero(~self.holdout_N)[:, 0]
        min_images = min_images_of_expert(self.plan, self.policy)

        images = []
        for number, part in enumerate(parts):
            own_N = part_N[open_N] == number
            chosen = images_of_part(
                part, own_N, self.fine_N[open_N], self.files.clusters, min_images
            )
            images.append(open_N[chosen])
        return images

    def planned_expert(self, number: int, expert_id: str) -> PlannedExpert:
        """Describe an expert's training: the plan's, from this silo's own earlier expert or the public one."""
        # An expert that this silo trained for an earlier plan goes before the one that all silos start from.
        base = self.own_experts.get(expert_id)
        if base is None:
            base = public_base(self.plan, self.bundle)
        mechanism = None
        if self.paid is not None:
            mechanism = self.paid.mechanism
        return PlannedExpert(
            self.plan,
            self.silo_id,
            number,
            base,
            self.settings.engine,
            stops=False,
            paid=mechanism,
        )


def min_images_of_expert(plan: Plan, policy: Policy) -> int:
    """Return the fewest images from which an expert of this plan may be trained on this site."""
    return max(plan.partition.min_images, policy.training.min_images)


def num_classes(plan: Plan) -> int | None:
    """Return how many classes images may have, where the plan needs them: for its experts or for a statistic."""
    if isinstance(plan.condition, ClassCondition):
        return plan.condition.num_classes
    if plan.statistics.class_counts:
        return plan.statistics.class_counts.num_classes
    return None


def counts_define_experts(plan: Plan) -> bool:
    """Whether the noised histogram must be drawn before training, because it decides which experts exist."""
    return isinstance(plan.partition, SiloClusterPartition)


def find_parts(
    plan: Plan, files: PlanFiles, work: Workspace, silo_id: str
) -> tuple[ExpertPart, ...]:
    """Return this silo's experts, from the noised histogram where it decides."""
    # Other partitions do not look at counts, so that these may be drawn after the training.
    noisy_G = torch.zeros(plan.statistics.counts.num_groups, dtype=torch.int64)
    if counts_define_experts(plan):
        counts = Counts(plan.statistics)
        specs = counts.tensor_specs(num_units=0)
        path = work.statistics / counts.file_name
        noisy_G = load_tensors(path, specs, max_bytes=plan.limits.statistic_bytes)["counts"]
    return silo_parts(plan.partition, silo_id, files.clusters, noisy_G)


@dataclass(frozen=True)
class _SiloProgress:
    """Reports the progress of one expert as that of all, and ends a training that exceeds the plan's limit.

    Attributes:
        plan: the plan.
        number: the expert's, from 0.
        num_experts: the number of experts of this silo.
        earlier_s: seconds that the experts before it took.
        on_progress: called with steps counted over all experts.
    """

    plan: Plan
    number: int
    num_experts: int
    earlier_s: float
    on_progress: Callable[[Progress], None]

    def report(self, progress: Progress) -> None:
        _check_time(self.plan, self.earlier_s + progress.seconds)
        steps_of_expert = self.plan.expert.training.num_steps
        step = self.number * steps_of_expert + progress.step
        self.on_progress(replace(progress, step=step, num_steps=self.num_experts * steps_of_expert))


def train_experts(
    training: SiloTraining,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train every expert of this silo and write it with its record, resuming exactly where an earlier process stopped.

    Args:
        training: plan, images and settings.
        on_progress: called with the progress of an expert, its steps counted over all experts.
        should_stop: called before every step.

    Raises:
        LedgerError: another expert was trained for that debit.
        PolicyError: the experts together took longer than the plan's limit.
        DataError: the plan's experts are conditioned on classes or texts that this site's images lack.
        KeyboardInterrupt: `should_stop` returned true; the last checkpoint stays.
    """
    plan = training.plan
    work = training.work
    parts = training.parts()
    images_of_experts = training.images_of_parts(parts)
    jobs = jobs_of(training.settings, training.silo_id)
    if jobs:
        discard_others(jobs, work.folder.name)

    seconds = 0.0
    for number, part in enumerate(parts):
        job_folder = work.job(part.expert_id, jobs)
        # The record is written last: an expert that has one needs no more training.
        if not work.record_path(part.expert_id).exists():
            expert = training.planned_expert(number, part.expert_id)
            task = make_training_task(
                expert, training.cohort, images_of_experts[number], job_folder
            )
            progress = _SiloProgress(plan, number, len(parts), seconds, on_progress)
            _train_expert(training, task, part.expert_id, job_folder, progress.report, should_stop)
        # Snapshots of averaged weights stay: averages of other widths are made of them after the training.
        discard_job(job_folder, keep_checkpoints=plan.expert.training.ema_snapshots > 0)
        seconds += work.record(part.expert_id).training.seconds
        # Checked again: of several processes, one may write the record before the report of another stops them.
        _check_time(plan, seconds)


def images_of_part(
    part: ExpertPart, own_N: Tensor, fine_N: Tensor, clusters: Clusters, min_images: int
) -> Tensor:
    """Return the images that an expert learns, ascending: its own and, where they are too few, the nearest others.

    Args:
        part: the expert's.
        own_N: whether each image is the expert's own.
        fine_N: each image's fine centroid.
        clusters: the plan's.
        min_images: how many images there must be; at most N.
    """
    centroids_FD = clusters.centroids_FD.double()
    in_part_F = torch.isin(clusters.group_F, torch.tensor(part.groups))
    centre_D = centroids_FD[in_part_F].mean(0)
    distance_F = (centroids_FD - centre_D).norm(dim=1)
    # A distance below 0 puts the expert's own images before all others.
    distance_N = distance_F[fine_N].masked_fill(own_N, -1.0)
    num_images = max(int(own_N.sum()), min_images)
    nearest = distance_N.argsort(stable=True)[:num_images]
    return torch.sort(nearest).values


def _check_time(plan: Plan, seconds: float) -> None:
    # The plan's limit was compared with the policy's when the plan was accepted; here it is kept.
    if seconds > plan.limits.train_s:
        limit = f"at most {plan.limits.train_s} s for all experts of a silo"
        raise PolicyError(
            "training time",
            expected=limit,
            got=f"{seconds:.0f} s",
            remedy=(
                "Ask the aggregator for a plan with a larger limits.train_s, or train on a faster machine; "
                "or give this plan up: `silo withdraw SITE`."
            ),
        )


def conditions_of(plan: Plan, cohort: Cohort, chosen: Tensor, folder: Path) -> Tensor | None:
    """Return the condition of each chosen image, texts from a file in `folder`; None for an unconditional expert.

    Raises:
        DataError: the site's images have no such condition.
    """
    if isinstance(plan.condition, NoCondition):
        return None
    by_class = isinstance(plan.condition, ClassCondition)
    condition_N = cohort.label_N if by_class else cohort.text_NLD
    if condition_N is None:
        kind = plan.condition.kind
        raise DataError("images", expected=f"a {kind} for each", got=f"images without a {kind}")
    # The chosen numbers are ascending and distinct: as many as there are images means all of them, and no copy is made.
    if len(chosen) == len(condition_N):
        return condition_N
    if by_class:
        return condition_N[chosen]
    return some_texts(condition_N, chosen, folder)


def make_training_task(
    expert: PlannedExpert, cohort: Cohort, chosen: Tensor, folder: JobFolder
) -> TrainingTask:
    """Describe what a job trains on: the chosen images, int64, ascending, with their conditions."""
    # The job's process may run on another machine: it gets the chosen images and nothing of the others.
    inputs: dict[str, Images] = {"images": select(cohort.images, chosen)}
    conditions = conditions_of(expert.plan, cohort, chosen, folder.path)
    if conditions is not None:
        inputs["labels"] = conditions
    if expert.plan.expert.privacy:
        inputs["units"] = torch.unique(cohort.unit_N[chosen], return_inverse=True)[1]
    # Names exactly these images: a job that continued with others would train another expert.
    data_digest = sha256_hex(cohort.digest.encode() + chosen.numpy().tobytes())
    return TrainingTask(expert, inputs, data_digest)


def _train_expert(
    training: SiloTraining,
    task: TrainingTask,
    expert_id: str,
    job_folder: JobFolder,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train one expert, and write it and its record into the plan's folder, where only the worker writes."""
    path = training.work.expert_path(expert_id)
    if training.paid and not path.exists():
        # One debit pays for one expert: a second draw of its noise would cost as much again.
        training.paid.check_undrawn()
    result = train_job(
        task,
        job_folder,
        training.settings,
        path,
        on_progress=on_progress,
        should_stop=should_stop,
        metrics=training.work.metrics_path(expert_id),
    )
    if training.paid:
        # Bound to these weights: another training for the same debit is refused from now on.
        training.paid.record(path)
    record = TrainingRecord(
        plan_id=training.plan.plan_id,
        expert_id=expert_id,
        num_units=training.cohort.num_units,
        num_images=len(task.inputs["images"]),
        steps=result.steps,
        training=ExpertTraining(loss=result.loss, seconds=result.seconds, flops=result.flops),
    )
    write_atomic(training.work.record_path(expert_id), record.encode())
