"""Trains a silo's experts one after another: which experts there are, and which images each learns; resumable anywhere.

The noised histogram alone decides which experts exist (`ddm.partition.layout`), so their list reveals nothing more. The
noise can select a cluster of which the silo holds hardly any image. Its expert is trained all the same, since leaving
it out would reveal the true count; to keep it from memorising a handful of images, it also learns the silo's images
nearest to the cluster, up to the fewest images that plan and policy allow for an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ddm.errors import DataError, PolicyError
from ddm.images.rows import Images, select
from ddm.io.files import write_atomic
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.partition.layout import Part, part_of_images, silo_parts
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import sha256_hex
from ddm.protocol.partition import SiloClusterPartition
from ddm.protocol.plan import Plan
from ddm.protocol.submission import ExpertTraining
from ddm.statistics.counts import Counts
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.loop import Progress
from ddm.training.planned import BaseExpert, PlannedExpert, public_base
from silo.config import Policy
from silo.data.captions import some_texts
from silo.data.cohort import Cohort
from silo.plan.workspace import TrainingRecord, Workspace
from silo.privacy.expert import PaidTraining
from silo.worker.jobs import discard_others, jobs_of

# Shape legend: N images, F fine centroids, G public groups, D feature values.

_NO_EXPERTS: Mapping[str, BaseExpert] = MappingProxyType({})


def min_images_of_expert(plan: Plan, policy: Policy) -> int:
    """Return the fewest images from which an expert of this plan may be trained on this site."""
    return max(plan.partition.min_images, policy.training.min_images)


def num_classes(plan: Plan) -> int | None:
    """Return how many classes images may have, where the plan needs them: for its experts or for a statistic."""
    if isinstance(plan.condition, ClassCondition):
        return plan.condition.num_classes
    return plan.statistics.class_counts.num_classes if plan.statistics.class_counts else None


def counts_define_experts(plan: Plan) -> bool:
    """Whether the noised histogram must be drawn before training, because it decides which experts exist."""
    return isinstance(plan.partition, SiloClusterPartition)


def find_parts(plan: Plan, files: PlanFiles, work: Workspace, silo_id: str) -> tuple[Part, ...]:
    """Return this silo's experts, from the noised histogram where it decides."""
    noisy_G = torch.zeros(plan.statistics.counts.num_groups, dtype=torch.int64)
    if counts_define_experts(plan):
        counts = Counts(plan.statistics)
        specs = counts.tensor_specs(num_units=0)
        path = work.statistics / counts.file_name
        noisy_G = load_tensors(path, specs, max_bytes=plan.limits.statistic_bytes)["counts"]
    return silo_parts(plan.partition, silo_id, files.clusters, noisy_G)


def train_experts(
    plan: Plan,
    files: PlanFiles,
    cohort: Cohort,
    fine_N: Tensor,
    work: Workspace,
    policy: Policy,
    silo_id: str,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    bundle: Path | None = None,
    own: Mapping[str, BaseExpert] = _NO_EXPERTS,
    engine: TrainingSettings = TrainingSettings(),
    held_N: Tensor | None = None,
    paid: PaidTraining | None = None,
) -> None:
    """Train every expert of this silo and write it with its record, resuming exactly where an earlier process stopped.

    Args:
        plan: the accepted plan.
        files: its public tensors.
        cohort: the private images.
        fine_N: each image's fine centroid.
        work: this plan's folder.
        policy: this site's.
        silo_id: this silo.
        on_progress: called with the progress of an expert, its steps counted over all experts.
        should_stop: called before every step.
        bundle: the folder with the plan's files, for a plan whose experts start from a public one.
        own: this silo's experts of an earlier plan, by name, for a plan that trains them on.
        engine: how this site trains.
        held_N: which images no expert learns; None for none.
        paid: the debit of a plan that trains privately.

    Raises:
        LedgerError: another expert was trained for that debit.
        PolicyError: the experts together took longer than the plan's limit.
        DataError: the plan's experts are conditioned on classes or texts that this site's images lack.
        KeyboardInterrupt: `should_stop` returned true; the last checkpoint stays.
    """
    parts = find_parts(plan, files, work, silo_id)
    learned = images_of_parts(plan, files, parts, fine_N, policy, held_N)
    num_steps, seconds = plan.expert.training.num_steps, 0.0
    public, jobs = public_base(plan, bundle), jobs_of(engine, silo_id)
    if jobs:
        discard_others(jobs, work.folder.name)
    for number, part in enumerate(parts):
        folder = work.job(part.expert_id, jobs)
        if not work.record_path(part.expert_id).exists():
            before = seconds

            def watch(progress: Progress, number: int = number, before: float = before) -> None:
                _check_time(plan, before + progress.seconds)
                on_progress(
                    replace(
                        progress,
                        step=number * num_steps + progress.step,
                        num_steps=len(parts) * num_steps,
                    )
                )

            base, private = own.get(part.expert_id, public), paid.mechanism if paid else None
            expert = PlannedExpert(
                plan, silo_id, number, base, engine.engine, stops=False, paid=private
            )
            wanted = wanted_job(expert, cohort, learned[number], folder)
            _train_expert(
                wanted, cohort, part.expert_id, work, folder, engine, watch, should_stop, paid
            )
        discard_job(folder, keep_checkpoints=plan.expert.training.ema_snapshots > 0)
        seconds += work.record(part.expert_id).training.seconds
        # again: with several processes, one may write the record before `watch` stops them
        _check_time(plan, seconds)


def images_of_parts(
    plan: Plan,
    files: PlanFiles,
    parts: Sequence[Part],
    fine_N: Tensor,
    policy: Policy,
    held_N: Tensor | None = None,
) -> list[Tensor]:
    """Return the images that each expert learns, as `images_of_part` does, none of them held out."""
    part_N = part_of_images(
        plan.partition, parts, files.clusters.group_F[fine_N], plan.expert.training.seed
    )
    held_N = torch.zeros(len(fine_N), dtype=torch.bool) if held_N is None else held_N
    fewest, open_N = min_images_of_expert(plan, policy), torch.nonzero(~held_N)[:, 0]
    return [
        open_N[
            images_of_part(part, part_N[open_N] == number, fine_N[open_N], files.clusters, fewest)
        ]
        for number, part in enumerate(parts)
    ]


def images_of_part(
    part: Part, own_N: Tensor, fine_N: Tensor, clusters: Clusters, fewest: int
) -> Tensor:
    """Return the images that an expert learns, ascending: its own and, where they are too few, the nearest others.

    Args:
        part: the expert's.
        own_N: whether each image is the expert's own.
        fine_N: each image's fine centroid.
        clusters: the plan's.
        fewest: how many images there must be; at most N.
    """
    centroids_FD = clusters.centroids_FD.double()
    centre_D = centroids_FD[torch.isin(clusters.group_F, torch.tensor(part.groups))].mean(0)
    distance_N = (centroids_FD - centre_D).norm(dim=1)[fine_N].masked_fill(own_N, -1.0)
    nearest = distance_N.argsort(stable=True)[: max(int(own_N.sum()), fewest)]
    return torch.sort(nearest).values


def _check_time(plan: Plan, seconds: float) -> None:
    if seconds > plan.limits.train_s:
        limit = f"at most {plan.limits.train_s} s for all experts of a silo"
        raise PolicyError("training time", expected=limit, got=f"{seconds:.0f} s")


def labels_of(plan: Plan, cohort: Cohort, chosen: Tensor, folder: Path) -> Tensor | None:
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
    if len(chosen) == len(condition_N):  # ascending: so all of them
        return condition_N
    return condition_N[chosen] if by_class else some_texts(condition_N, chosen, folder)


def wanted_job(
    expert: PlannedExpert, cohort: Cohort, chosen: Tensor, folder: JobFolder
) -> TrainingTask:
    """Say what a job trains on: the chosen images, int64, ascending, with their conditions."""
    inputs: dict[str, Images] = {"images": select(cohort.images, chosen)}
    labels = labels_of(expert.plan, cohort, chosen, folder.path)
    if labels is not None:
        inputs["labels"] = labels
    if expert.plan.expert.privacy:
        inputs["units"] = torch.unique(cohort.unit_N[chosen], return_inverse=True)[1]
    return TrainingTask(
        expert, inputs, sha256_hex(cohort.digest.encode() + chosen.numpy().tobytes())
    )


def _train_expert(
    wanted: TrainingTask,
    cohort: Cohort,
    expert_id: str,
    work: Workspace,
    folder: JobFolder,
    settings: TrainingSettings,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    paid: PaidTraining | None,
) -> None:
    """Train one expert, and write it and its record into the plan's folder, where only the worker writes."""
    path = work.expert_path(expert_id)
    if paid and not path.exists():
        paid.check_undrawn()
    result = train_job(
        wanted, folder, settings, path, on_progress=on_progress, should_stop=should_stop
    )
    if paid:
        paid.record(path)
    record = TrainingRecord(
        plan_id=wanted.expert.plan.plan_id,
        expert_id=expert_id,
        num_units=cohort.num_units,
        num_images=len(wanted.inputs["images"]),
        steps=result.steps,
        training=ExpertTraining(loss=result.loss, seconds=result.seconds, flops=result.flops),
    )
    write_atomic(work.record_path(expert_id), record.encode())
