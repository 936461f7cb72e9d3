"""A small training as a job: what is wanted, who trains it, and the bytes that come of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddm.protocol.base import sha256_hex
from ddm.protocol.plan import Plan
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder, TrainingResult
from ddm.training.jobs import TrainingTask, train_job
from ddm.training.planned import PlannedExpert
from ddm.training.progress import Progress
from tests.support.documents import plan_document, to_bytes

SHAPE = (1, 4, 4)
NUM = 40
TEXT = {"kind": "text", "dim": 3, "max_tokens": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dit": {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2},
    "mmdit": {"kind": "mmdit", "patch": 2, "hidden": 16, "depth": 2, "heads": 2, "shared_depth": 1},
}
RECIPE = {
    "num_steps": 100,
    "batch_size": 8,
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "ema_decay": 0.9,
}


def small_plan(kind: str = "dit", **training: object) -> Plan:
    """Return a plan whose expert is small; `training` replaces numbers of its recipe."""
    document = plan_document(data={"shape": list(SHAPE), "range": [-1.0, 1.0]})
    if kind == "mmdit":
        document["condition"] = TEXT
    document["expert"] |= {"architecture": ARCHITECTURES[kind], "training": RECIPE | training}
    return Plan.parse(to_bytes(document), subject="plan")


def small_task(kind: str = "dit", **training: object) -> TrainingTask:
    """Return the first expert of such a plan, with its inputs in memory."""
    random = torch.Generator().manual_seed(0)
    inputs = {"images": torch.rand(NUM, *SHAPE, generator=random) * 2 - 1}
    if kind == "mmdit":
        inputs["labels"] = torch.rand(NUM, 2, 3, generator=random)
    expert = PlannedExpert(
        small_plan(kind, **training), "north", 0, None, TrainingSettings(device="cpu").engine
    )
    return TrainingTask(expert, inputs, sha256_hex(b"data"))


@dataclass
class SmallJob:
    """One training in a folder."""

    path: Path
    settings: TrainingSettings = TrainingSettings(device="cpu")
    task: TrainingTask = field(default_factory=small_task)
    progress: list[Progress] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def folder(self) -> JobFolder:
        """The job's."""
        return JobFolder(self.path / "job")

    @property
    def expert(self) -> Path:
        """Where the expert goes."""
        return self.path / "kept" / "expert.safetensors"

    def __call__(
        self, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> TrainingResult:
        """Train to the end."""

        def note(progress: Progress) -> None:
            self.progress.append(progress)
            on_progress(progress)

        return train_job(
            self.task,
            self.folder,
            self.settings,
            self.expert,
            on_progress=note,
            should_stop=self.stop.is_set,
        )
