"""The models that `ddm evaluate` measures: a verified release, or a student by its record."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

from ddm.cli.evaluated_samples import SampleSet
from ddm.cli.sampling import ComputeSettings, SamplingJob, StudentSource, draw
from ddm.distillation.student import Student
from ddm.evaluation.features import Features, encoder_features
from ddm.loading.release import Release
from ddm.protocol.architecture import Condition
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from ddm.sampling.strategies import Lock
from ddm.system.memory import MemoryLimit
from ddm.system.progress import ProgressCallback


@dataclass(frozen=True)
class EvaluatedModel:
    """What an evaluation has to know about the model whose samples it measures.

    Attributes:
        data: shape and range of its samples.
        transform: what the plan makes of raw images; None for a student, whose record does not state it.
        condition: the kind of condition that it takes.
        owners: the silo of each expert; empty for a student, which is one network of all silos.
        silos: names of the silos.
        counts_classes: whether each expert's share of a class is known.
        origin: what the figures say about it.
        open_encoder: opens the features of the plan's encoder; None for a student, which is published without it.
    """

    data: DataSpec
    transform: TransformSpec | None
    condition: Condition
    owners: Sequence[str]
    silos: Sequence[str]
    counts_classes: bool
    origin: Mapping[str, Any]
    open_encoder: Callable[[], Features] | None

    @classmethod
    def of_release(cls, opened: Release) -> "EvaluatedModel":
        """Describe a verified release."""
        plan = opened.plan
        manifest = opened.manifest
        return cls(
            data=plan.data,
            transform=plan.transform,
            condition=plan.condition,
            owners=[expert.silo_id for expert in manifest.experts],
            silos=[silo.silo_id for silo in manifest.silos],
            # One expert has all of every class.
            counts_classes=plan.statistics.class_counts is not None or len(manifest.experts) == 1,
            origin={
                "release": {
                    "plan_id": manifest.plan_id,
                    "version": manifest.version,
                    "manifest": opened.manifest_digest,
                },
                "student": None,
            },
            open_encoder=lambda: encoder_features(plan, opened.folder),
        )

    @classmethod
    def of_student(cls, record: Student) -> "EvaluatedModel":
        """Describe a student by its record, which nobody signed."""
        source = record.source
        return cls(
            data=record.data,
            transform=None,
            condition=record.condition,
            owners=(),
            silos=(),
            counts_classes=True,
            origin={
                "release": {
                    "plan_id": source.plan_id,
                    "version": source.version,
                    "manifest": source.manifest,
                },
                "student": {"digest": record.file.digest},
            },
            open_encoder=None,
        )


@dataclass(frozen=True)
class StudentDrawing:
    """How the samples of a student's evaluation are drawn.

    Attributes:
        record: the student's.
        weights: the file of its weights.
        computing: how it computes.
        num_processes: how many share the samples.
        seed: the seed of all samples.
        how: arguments of `Ensemble.sample`.
    """

    record: Student
    weights: Path
    computing: ComputeSettings
    num_processes: int
    seed: int
    how: Mapping[str, Any]

    def draw(
        self,
        num: int,
        limit: MemoryLimit,
        beside: int,
        show_progress: Callable[[str], AbstractContextManager[ProgressCallback]],
    ) -> SampleSet:
        """Draw the samples.

        Args:
            num: the number of them.
            limit: on all memory.
            beside: bytes of what is done with the samples.
            show_progress: shows the progress, by a label.

        Raises:
            MemoryLimitError: they do not fit; nothing was loaded.
        """
        drawing_bytes = self.record.sampling_bytes(
            num=ceil(num / self.num_processes),
            batch=self.computing.batch,
            steps=self.how["steps"],
        )
        sample_bytes = 4 * num * self.record.data.dim
        # Drawing and measuring come one after the other; the samples stay for both.
        needed = max(drawing_bytes, ceil(beside / self.num_processes))
        needed += ceil(sample_bytes / self.num_processes)
        limit.part(self.num_processes).check("memory", needed)
        source = StudentSource(self.record, self.weights, self.computing)
        # An ensemble of one, whose expert all samples follow: there is no router, and no other strategy.
        job = SamplingJob(source, Lock(), self.seed, {**self.how, "condition_prior": None})
        with show_progress(f"sampling {num}") as advance:
            drawn = draw(job, num, self.num_processes, torch.ones(1), advance)
        # Pictures are clipped to the range too, so that this is what people would see.
        return SampleSet(self.weights.name, drawn.images.clamp(*self.record.data.range))
