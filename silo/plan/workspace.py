"""The folder of a site's work on one plan: checkpoints, experts, statistics, the audit."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ddm.protocol.base import Document, ExpertId, NaturalInt, PlanId, PositiveInt
from ddm.protocol.submission import ExpertTraining
from ddm.training.job import JobFolder
from ddm.training.metrics import METRICS_NAME
from silo.config import AUDIT_REPORT, Site


class TrainingRecord(Document):
    """The outcome of training one expert; stays on the site until the submission is drafted from it."""

    plan_id: PlanId
    expert_id: ExpertId
    num_units: PositiveInt
    num_images: PositiveInt
    steps: NaturalInt
    training: ExpertTraining


@dataclass(frozen=True)
class Workspace:
    """One plan's folder on a site."""

    folder: Path

    def expert_path(self, expert_id: str) -> Path:
        """Return the path of a trained expert, its averaged weights."""
        return self.folder / "experts" / expert_id / "expert.safetensors"

    def record_path(self, expert_id: str) -> Path:
        """Return the path of its `TrainingRecord`, written after the weights: once it exists, the expert is trained."""
        return self.folder / "experts" / expert_id / "training.json"

    def metrics_path(self, expert_id: str) -> Path:
        """Return the path of a trained expert's learning curve, which is as private as its loss."""
        return self.folder / "experts" / expert_id / METRICS_NAME

    def job(self, expert_id: str, jobs: Path | None = None) -> JobFolder:
        """Return the folder in which an expert is trained.

        Args:
            expert_id: the expert.
            jobs: the folder of the site's jobs that other machines see; None for training on this machine.
        """
        # On a shared folder the plan's name is part of the path, since other plans have experts of the same names.
        if jobs is None:
            return JobFolder(self.folder / "experts" / expert_id / "training")
        return JobFolder(jobs / self.folder.name / expert_id)

    def record(self, expert_id: str) -> TrainingRecord:
        """Read an expert's record."""
        data = self.record_path(expert_id).read_bytes()
        return TrainingRecord.parse(data, subject="training.json")

    @property
    def audit_path(self) -> Path:
        """The `AuditReport`."""
        return self.folder / AUDIT_REPORT

    @property
    def held_path(self) -> Path:
        """Which images no expert of this plan learns; written before the first is trained."""
        return self.folder / "held.safetensors"

    def audit_folder(self, expert_id: str) -> Path:
        """Return the folder that the audit of one expert keeps on the site: its parts, and the worst that it found."""
        return self.folder / "audit" / expert_id

    def clear(self) -> None:
        """Remove everything that was made for the plan; what the ledger paid for stays with the ledger."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def statistics(self) -> Path:
        """The drawn statistics, a file each."""
        return self.folder / "statistics"


def open_workspace(site: Site, plan_id: str) -> Workspace:
    """Return the folder in which this site works on `plan_id`, made if it does not exist."""
    folder = site.work_folder(plan_id)
    folder.mkdir(parents=True, exist_ok=True)
    return Workspace(folder)
