"""Where does a site's work on one plan lie: checkpoints, experts, draws, the audit?"""

from dataclasses import dataclass
from pathlib import Path

from ddm.protocol.base import Document, ExpertId, Model, NaturalInt, PlanId, PositiveInt
from ddm.protocol.submission import AuditVerdict, ExpertTraining
from silo.config import Site
from silo.plan.acceptance import workplace_folder


class TrainingRecord(Document):
    """What the training of one expert came to; stays on the site, and is read back when the submission is drafted."""

    plan_id: PlanId
    expert_id: ExpertId
    num_units: PositiveInt
    num_images: PositiveInt
    steps: NaturalInt
    training: ExpertTraining


class AuditRecord(Model):
    """The verdict under which this plan's experts may leave."""

    verdict: AuditVerdict


@dataclass(frozen=True)
class Workplace:
    """One plan's folder on a site."""

    folder: Path

    def expert_path(self, expert_id: str) -> Path:
        """A trained expert, EMA weights."""
        return self.folder / "experts" / expert_id / "expert.safetensors"

    def record_path(self, expert_id: str) -> Path:
        """Its `TrainingRecord`, written after the weights: where it lies, the expert is done."""
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
    def verdict_path(self) -> Path:
        """The `AuditRecord`."""
        return self.folder / "verdict.json"

    @property
    def statistics(self) -> Path:
        """The draws, one file a statistic."""
        return self.folder / "statistics"


def workplace(site: Site, plan_id: str) -> Workplace:
    """Return the folder in which this site works on `plan_id`."""
    folder = workplace_folder(site, plan_id)
    folder.mkdir(parents=True, exist_ok=True)
    return Workplace(folder)
