"""Trains a silo's experts one after another: which experts there are, and which images each learns; resumable anywhere.

The noised histogram alone decides which experts exist (`ddm.partition.layout`), so their list reveals nothing more. The
noise can select a cluster of which the silo holds hardly any image. Its expert is trained all the same, since leaving
it out would reveal the true count; to keep it from memorising a handful of images, it also learns the silo's images
nearest to the cluster, up to the fewest images that plan and policy allow for an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from ddm.errors import DataError, PolicyError
from ddm.io.files import write_atomic
from ddm.io.images import Images, select
from ddm.io.tensors import load_tensors
from ddm.loading.plan import PlanFiles
from ddm.models import load_expert
from ddm.models.adaptation import adapt
from ddm.partition.clustering import Clusters
from ddm.partition.layout import Part, part_of_images, silo_parts
from ddm.protocol.plan import ClassCondition, NoCondition, Plan, SiloClusterPartition
from ddm.protocol.submission import MAX_LOSS, ExpertTraining
from ddm.routers.counts import counts_specs
from ddm.training.config import Engine
from ddm.training.distributed import num_processes
from ddm.training.launcher import do_together
from ddm.training.loop import Progress
from ddm.training.planned import PlannedExpert
from silo.config import Policy
from silo.data.captions import some_texts
from silo.data.cohort import Cohort
from silo.plan.own_experts import OwnExpert
from silo.plan.workspace import TrainingRecord, Workspace
from silo.privacy.statistics import STATISTIC_NAMES

# Shape legend: N images, F fine centroids, G public groups, D feature values.

_NO_EXPERTS: Mapping[str, OwnExpert] = MappingProxyType({})


def fewest_images(plan: Plan, policy: Policy) -> int:
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
        path = work.statistics / STATISTIC_NAMES["counts"]
        noisy_G = load_tensors(path, counts_specs(plan), max_bytes=plan.limits.statistic_bytes)["counts"]
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
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
    bundle: Path | None = None,
    own: Mapping[str, OwnExpert] = _NO_EXPERTS,
    engine: Engine = Engine(),
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
        on_progress: called with the steps taken and the steps in all, over all experts.
        should_stop: called before every step.
        bundle: the folder with the plan's files, for a plan whose experts start from a public one.
        own: this silo's experts of an earlier plan, by name, for a plan that trains them on.
        engine: how this machine trains.

    Raises:
        PolicyError: the experts together took longer than the plan's limit.
        DataError: the plan's experts are conditioned on classes or texts that this site's images lack.
        KeyboardInterrupt: `should_stop` returned true; the last checkpoint stays.
    """
    parts = find_parts(plan, files, work, silo_id)
    part_N = part_of_images(plan.partition, parts, files.clusters.group_F[fine_N], plan.expert.training.seed)
    num_steps, seconds = plan.expert.training.num_steps, 0.0
    for number, part in enumerate(parts):
        if not work.record_path(part.expert_id).exists():
            before = seconds

            def watch(progress: Progress, number: int = number, before: float = before) -> None:
                _check_time(plan, before + progress.seconds)
                on_progress(number * num_steps + progress.step, len(parts) * num_steps)

            fewest = fewest_images(plan, policy)
            chosen = images_of_part(part, part_N == number, fine_N, files.clusters, fewest)
            expert = SiloExpert(plan, silo_id, number, bundle, engine, own.get(part.expert_id))
            _train_expert(expert, cohort, chosen, part.expert_id, work, watch, should_stop)
        seconds += work.record(part.expert_id).training.seconds
        _check_time(plan, seconds)  # again: with several processes, one may write the record before `watch` stops them


def images_of_part(part: Part, own_N: Tensor, fine_N: Tensor, clusters: Clusters, fewest: int) -> Tensor:
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


@dataclass(frozen=True)
class SiloExpert(PlannedExpert):
    """One expert that this silo trains, and the conditions of its images.

    Attributes:
        own: the silo's expert of an earlier plan that is trained on; None where there is none.
    """

    own: OwnExpert | None = None
    stops: ClassVar[bool] = False  # the plan's weights may overflow for one image, and a stop would show it

    def start(self) -> nn.Module:
        """Build the model to train, from random weights, the silo's own expert or the plan's public one.

        Raises:
            MissingFileError, DigestError, TensorFileError: the expert is not the one that the documents list.
            SetupError: the adaptation names weights that the expert lacks.
        """
        if self.own is None:
            return super().start()
        expert, shape, condition = self.plan.expert, self.plan.expert_shape, self.plan.condition
        known = load_expert(expert.architecture, shape, self.own.folder, self.own.file, condition)
        return adapt(known, expert.adaptation, seed=self.seed)

    def labels(self, cohort: Cohort, chosen: Tensor, folder: Path) -> Tensor | None:
        """Return the condition of each chosen image, texts from a file in `folder`; None for an unconditional expert.

        Raises:
            DataError: the site's images have no such condition.
        """
        if isinstance(self.plan.condition, NoCondition):
            return None
        by_class = isinstance(self.plan.condition, ClassCondition)
        condition_N = cohort.label_N if by_class else cohort.text_NLD
        if condition_N is None:
            kind = self.plan.condition.kind
            raise DataError("images", expected=f"a {kind} for each", got=f"images without a {kind}")
        if len(chosen) == len(condition_N):  # ascending: so all of them
            return condition_N
        return condition_N[chosen] if by_class else some_texts(condition_N, chosen, folder)


@dataclass(frozen=True)
class ExpertJob:
    """The training of one expert, in one process or in several together; its tensors are passed to the call.

    Attributes:
        expert: how it is trained.
        expert_id: its name.
        work: this plan's folder.
        num_units: the privacy units of the cohort.
    """

    expert: SiloExpert
    expert_id: str
    work: Workspace
    num_units: int

    def __call__(
        self, tensors: Mapping[str, Images], on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
    ) -> None:
        """Train on `images` and, for a conditional expert, `labels`; write the expert and its record."""
        path, checkpoints = self.work.expert_path(self.expert_id), self.work.checkpoints(self.expert_id)
        trained = self.expert.train(tensors, path, checkpoints, on_progress, should_stop)
        if trained is None:  # another process has it
            return
        record = TrainingRecord(
            plan_id=self.expert.plan.plan_id,
            expert_id=self.expert_id,
            num_units=self.num_units,
            num_images=len(tensors["images"]),
            steps=trained.steps,
            training=ExpertTraining(loss=min(trained.loss, MAX_LOSS), seconds=trained.seconds, flops=trained.flops),
        )
        write_atomic(self.work.record_path(self.expert_id), record.encode())


def _train_expert(
    expert: SiloExpert,
    cohort: Cohort,
    chosen: Tensor,
    expert_id: str,
    work: Workspace,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    folder = work.checkpoints(expert_id)
    job, labels = ExpertJob(expert, expert_id, work, cohort.num_units), expert.labels(cohort, chosen, folder)
    tensors: dict[str, Images] = {"images": select(cohort.images, chosen)} | (
        {} if labels is None else {"labels": labels}
    )
    num = num_processes(expert.engine)
    if num == 1:
        job(tensors, on_progress, should_stop)
        return
    do_together(job, tensors, num, folder=folder, on_progress=on_progress, should_stop=should_stop)
