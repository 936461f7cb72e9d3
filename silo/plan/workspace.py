"""The folder of a site's work on one plan: checkpoints, experts, statistics, the audit."""

from dataclasses import dataclass
from pathlib import Path

from ddm.protocol.base import Document, ExpertId, NaturalInt, PlanId, PositiveInt
from ddm.protocol.submission import ExpertTraining
from silo.config import Site
from silo.plan.acceptance import workspace_folder


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
        """A trained expert, EMA weights."""
        return self.folder / "experts" / expert_id / "expert.safetensors"

    def record_path(self, expert_id: str) -> Path:
        """Return the path of its `TrainingRecord`, written after the weights: once it exists, the expert is trained."""
        return self.folder / "experts" / expert_id / "training.json"

    def checkpoints(self, expert_id: str) -> Path:
        """The checkpoints of its training."""
        return self.folder / "experts" / expert_id / "training"

    def record(self, expert_id: str) -> TrainingRecord:
        """Read an expert's record."""
        return TrainingRecord.parse(self.record_path(expert_id).read_bytes(), subject="training.json")

    @property
    def audit_path(self) -> Path:
        """The `AuditReport`."""
        return self.folder / "audit.json"

    @property
    def statistics(self) -> Path:
        """The drawn statistics, a file each."""
        return self.folder / "statistics"


def open_workspace(site: Site, plan_id: str) -> Workspace:
    """Return the folder in which this site works on `plan_id`, made if need be."""
    folder = workspace_folder(site, plan_id)
    folder.mkdir(parents=True, exist_ok=True)
    return Workspace(folder)
