"""A silo of the table: its images, those held out, and an expert trained and audited as a site does.

The audit is the one that a worker runs, `silo.audit.measuring.audit_expert`, with the plan's recipe and the same
jobs; only Flower and the federation's documents are left out.
"""

import json
import shutil
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.audit.attacks import AttackedExpert
from ddm.audit.running import draw_samples
from ddm.diffusion.path import path_named
from ddm.encoders.pca import PcaEncoder
from ddm.evaluation.classifier import Classifier
from ddm.evaluation.intervals import Estimate
from ddm.evaluation.metrics import FeatureSet, measure
from ddm.io.files import write_atomic
from ddm.loading.plan import PlanFiles
from ddm.models import load_expert
from ddm.partition.clustering import fit_clustering
from ddm.protocol.base import File, sha256_file, sha256_hex
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.routers.sketch import Sketch
from ddm.statistics.cost import paid_mechanisms
from ddm.system.console import progress
from ddm.training.config import Engine, TrainingSettings
from ddm.training.job import JobFolder, TrainingResult, discard_job
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.planned import BaseExpert, PlannedExpert
from examples.paper.leaks.choices import (
    BASE,
    CHOICES,
    HELD_OUT,
    MAX_IMAGES,
    TrainingChoice,
    plan_of,
)
from examples.paper.leaks.outsider import Success, attack_as_outsider
from examples.paper.tables.data import Part, World
from examples.paper.tables.judging import open_classifier
from silo.audit.document import ExpertAudit
from silo.audit.measuring import audit_expert
from silo.audit.subject import AuditedExpert
from silo.data.cohort import Cohort
from silo.worker.training import make_training_task

# Shape legend: N images of the silo, the last of them held out.

NEIGHBOURS = 5
_GROUPS = 16
_DIMS = 32
_RANK = 8
_CLASSIFIER_STEPS = 1500  # as in the tables with the preset cpu
_MOST_SAMPLES = 2000
_TRAININGS = 100  # of one seed at most: the expert, and an outsider's shadows
_KEEP_S = 1.0  # between two notes of the time
_RESULT = ".result.json"  # beside an expert, once it is trained


@dataclass(frozen=True)
class Data:
    """A data set's parts.

    Attributes:
        learned: what silos learn; the first images are those of the smaller silos.
        held_out: units held out, of the same classes.
        public: public images that the base learns.
        test: images of the silo's classes, which nothing was trained on.
    """

    learned: Tensor
    held_out: Tensor
    public: Tensor
    test: Tensor

    @classmethod
    def of(
        cls, world: World, private_classes: tuple[int, ...], base_classes: tuple[int, ...]
    ) -> "Data":
        """Divide a data set: the silo has images of some classes, and the base learns public images of others."""

        def of_classes(part: Part, classes: tuple[int, ...]) -> Tensor:
            return part.images[torch.isin(part.label_N, torch.tensor(classes))]

        return cls(
            of_classes(world.train, private_classes),
            of_classes(world.validation, private_classes)[:HELD_OUT],
            of_classes(world.public, base_classes),
            of_classes(world.test, private_classes),
        )

    def learned_by(self, num: int, seed: int) -> Tensor:
        """Return the images of a silo: others for every seed, as long as there are enough."""
        return self.learned.roll(-seed * MAX_IMAGES, 0)[:num]

    def others(self, seed: int) -> Tensor:
        """Return images of the same classes that no silo of this seed learns."""
        return self.learned.roll(-seed * MAX_IMAGES, 0)[MAX_IMAGES:]


def cohort_of(images: Tensor) -> Cohort:
    """Return images as a cohort in which each is a unit of its own."""
    return Cohort(
        images, sha256_hex(images.numpy().tobytes()), torch.arange(len(images)), len(images), None
    )


class Stopwatch:
    """Measures the time of work that goes on after an interruption: what earlier processes took is in a file.

    Args:
        path: the file, which lies beside the parts that are kept of the work.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = time.monotonic()
        self._kept_at = self._started
        self._earlier_s = 0.0
        if path.exists():
            self._earlier_s = float(json.loads(path.read_bytes()))

    @property
    def elapsed_s(self) -> float:
        """The seconds so far, those of earlier processes included."""
        return self._earlier_s + time.monotonic() - self._started

    def keep(self) -> None:
        """Write the time down, at most once a second: called again and again while the work continues."""
        now = time.monotonic()
        if now - self._kept_at >= _KEEP_S:
            self._kept_at = now
            write_atomic(self._path, json.dumps(self.elapsed_s).encode())


@dataclass(frozen=True)
class Silo:
    """A silo of one size, and one way to train.

    Attributes:
        workshop: what all silos of the data set share.
        choice: how its expert is trained.
        num: how many images it learns.
        seed: of its images, and of training.
    """

    workshop: "LeakWorkshop"
    choice: TrainingChoice
    num: int
    seed: int = 0

    @cached_property
    def cohort(self) -> Cohort:
        """Its images, those held out last; an image is a unit."""
        data = self.workshop.data
        return cohort_of(torch.cat([data.learned_by(self.num, self.seed), data.held_out]))

    @property
    def folder(self) -> Path:
        """Of everything that is kept of it."""
        named = {choice: name for name, choice in CHOICES.items()}
        return self.workshop.folder / f"{named[self.choice]}-{self.num}-{self.seed}"

    @property
    def file(self) -> Path:
        """The trained expert."""
        return self.folder / "expert.safetensors"

    @cached_property
    def expert(self) -> PlannedExpert:
        """What the plan says of its expert."""
        units = self.cohort.num_units
        plan = plan_of(self.workshop.world.data.shape, self.choice, units, self.workshop.share)
        paid = None
        if plan.expert.privacy:
            mechanism = paid_mechanisms(plan, units)["expert"]
            paid = mechanism if isinstance(mechanism, DpSgdMechanism) else None
        base = self.workshop.base if self.choice.from_base else None
        return PlannedExpert(
            plan, "north", self.seed * _TRAININGS, base, Engine(), stops=False, paid=paid
        )

    def train(self) -> float:
        """Train the expert, unless it is there; return the seconds that training took, over all restarts."""
        self.workshop.train(
            self.expert, self.cohort, torch.arange(self.num), self.file, self.choice.label
        )
        return TrainingResult.parse(
            self.file.with_suffix(_RESULT).read_bytes(), subject="result"
        ).seconds

    def audit(self) -> tuple[ExpertAudit, float]:
        """Audit the expert as its site would; also return the seconds that this took, over all restarts."""
        folder = self.folder / "audit"
        stopwatch = Stopwatch(folder / "elapsed.json")
        subject = AuditedExpert(
            expert_id="north",
            expert=self.expert,
            file=self.file,
            files=self.workshop.files,
            inputs=self.cohort,
            pixels=self.cohort.images,
            learned_N=torch.arange(self.num),
            holdout_N=torch.arange(self.num, self.cohort.num_units),
            public=self.expert.base,
            secret=b"a table has no secrets",
            num_samples=_MOST_SAMPLES,
            settings=TrainingSettings(),
            folder=folder,
            job_folder=lambda name: JobFolder(self.folder / f"job-{name}"),
            make_task=self._make_task,
        )
        with progress(f"auditing {self.choice.label}, {self.num} images") as report_progress:

            def keep_time(num_done: int, num: int) -> None:
                stopwatch.keep()
                report_progress(num_done, num)

            audited = audit_expert(subject, keep_time, lambda: False)
        # With the parts goes the time that they took: an audit that is made again starts from nothing.
        shutil.rmtree(folder, ignore_errors=True)
        return audited, stopwatch.elapsed_s

    def judge(self, num_samples: int) -> dict[str, Estimate]:
        """Return FID and KID of the expert's samples against test images."""
        return self.workshop.judge(self.expert, self.file, num_samples)

    def attack(self, num_shadows: int) -> tuple[Success, ...]:
        """Attack the expert as an outsider does.

        Args:
            num_shadows: trained on images that no silo of the table learns.

        Returns:
            Nothing for privately trained experts, without shadows, or where there are too few other images.
        """
        data = self.workshop.data
        other_images = data.others(self.seed)
        if self.expert.paid or len(other_images) < self.num or not num_shadows:
            return ()
        shadows = []
        for number in range(num_shadows):
            shadow = replace(self.expert, number=self.expert.number + 1 + number)
            random = torch.Generator().manual_seed(number)
            row_N = torch.randperm(len(other_images), generator=random)[: self.num]
            cohort = cohort_of(other_images[row_N])
            path = self.folder / f"shadow-{number}" / "expert.safetensors"
            label = f"an outsider's shadow of {self.choice.label}"
            self.workshop.train(shadow, cohort, torch.arange(self.num), path, label)
            shadows.append(self.workshop.open(shadow, path))
        expert = self.workshop.open(self.expert, self.file)
        members = self.cohort.images[: min(self.num, len(data.held_out))]
        return attack_as_outsider(expert, shadows, members, data.held_out)

    def _make_task(self, expert: PlannedExpert, chosen: Tensor, folder: JobFolder) -> TrainingTask:
        folder.path.mkdir(parents=True, exist_ok=True)
        return make_training_task(expert, self.cohort, chosen, folder)


@dataclass(frozen=True)
class LeakWorkshop:
    """What all silos of one data set share.

    Attributes:
        data: the parts.
        world: the data set.
        folder: of everything that is kept.
        share: of all steps.
        classifier_file: the classifier whose features judge samples; trained where there is none.
    """

    data: Data
    world: World
    folder: Path
    share: float
    classifier_file: Path

    @cached_property
    def files(self) -> PlanFiles:
        """Encoder, clusters and sketch of public images; the audit looks at the encoder's features alone."""
        images = self.world.public.images
        encoder = PcaEncoder.fit(images, _DIMS)
        features = encoder.encode(images)
        clusters = fit_clustering(features, _GROUPS, 1, _GROUPS, seed=0)
        return PlanFiles(
            encoder, clusters, Sketch.fit(images, clusters.groups(features), _RANK, _GROUPS)
        )

    @cached_property
    def classifier(self) -> Classifier:
        """The classifier whose features judge samples, trained once on public images of all classes.

        Raises:
            SetupError: the one that is there learned other images.
        """
        remedy = "Give the classifier.safetensors of results on these images, or none."
        return open_classifier(
            self.classifier_file, self.world, _CLASSIFIER_STEPS, progress, remedy
        )

    @cached_property
    def classifier_digest(self) -> str:
        """The sha256 of the classifier's file; raises as `classifier` does."""
        _ = self.classifier  # trained where there is none
        return sha256_file(self.classifier_file)

    @cached_property
    def reference(self) -> FeatureSet:
        """The test images, as the classifier sees them."""
        return FeatureSet.of(self.classifier.encode(self.data.test), NEIGHBOURS)

    @cached_property
    def base(self) -> BaseExpert:
        """The public base, trained once."""
        path = self.folder / "base" / "expert.safetensors"
        images = self.data.public
        self.train(self.base_expert, cohort_of(images), torch.arange(len(images)), path, BASE.label)
        return BaseExpert(path.parent, File.of(path.name, path))

    @cached_property
    def base_expert(self) -> PlannedExpert:
        """The expert that becomes the base."""
        plan = plan_of(self.world.data.shape, BASE, len(self.data.public), self.share)
        return PlannedExpert(plan, "public", 0, None, Engine())

    def train(
        self, expert: PlannedExpert, cohort: Cohort, chosen: Tensor, path: Path, label: str
    ) -> None:
        """Train an expert as a job, from its last checkpoint where there is one; does nothing if it is there."""
        if path.with_suffix(_RESULT).exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = JobFolder(path.parent / "job")
        folder.path.mkdir(exist_ok=True)
        with progress(f"training {label}, {len(chosen)} images") as report_progress:
            result = train_job(
                make_training_task(expert, cohort, chosen, folder),
                folder,
                TrainingSettings(),
                path,
                on_progress=lambda state: report_progress(state.step, state.num_steps),
                should_stop=lambda: False,
            )
        write_atomic(path.with_suffix(_RESULT), result.encode())
        discard_job(folder)

    def open(self, expert: PlannedExpert, file: Path) -> nn.Module:
        """Open the weights of a trained expert."""
        plan = expert.plan
        weights = File.of(file.name, file)
        return load_expert(plan.expert.architecture, plan.expert_shape, file.parent, weights)

    def judge(self, expert: PlannedExpert, file: Path, num_samples: int) -> dict[str, Estimate]:
        """Return FID and KID of an expert's samples against test images."""
        plan = expert.plan
        network = self.open(expert, file)
        path = path_named(plan.objective.ensemble_path)
        target = AttackedExpert(network, path, "velocity", torch.device("cpu"))
        blocks = draw_samples(
            target, path, plan.expert_shape, None, num_samples, 0, lambda num: None
        )
        images = torch.cat(list(blocks)).clamp(-1.0, 1.0)
        metrics, _ = measure(
            FeatureSet.of(self.classifier.encode(images), NEIGHBOURS), self.reference
        )
        return {name: metrics[name] for name in ("fid", "kid")}
