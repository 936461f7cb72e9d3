"""The worker's stages between an accepted plan and something to approve: scan, assign, train, audit, release."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ddm.errors import DataError, PolicyError
from ddm.files import write_atomic
from ddm.models import build_expert
from ddm.plan_files import PlanFiles
from ddm.protocol.base import Document, Model, NaturalInt, PlanId, PositiveInt
from ddm.protocol.plan import Budget
from ddm.protocol.submission import AuditVerdict, ExpertTraining
from ddm.schedule import LinearPath
from ddm.tensors import save_tensors
from ddm.training import Progress, train
from silo.audit import gate, measure
from silo.config import Policy, Site
from silo.data import Cohort, load_cohort
from silo.ledger import Ledger
from silo.reception import AcceptedPlan, workplace_folder
from silo.releases import draw_counts, draw_sketches, mechanisms

NUM_HOLDOUT_UNITS = 0  # every image of the cohort is trained on


class TrainingRecord(Document):
    """What the training of one expert came to; read back when the submission is drafted."""

    plan_id: PlanId
    expert_id: str
    num_images: PositiveInt
    steps: NaturalInt
    training: ExpertTraining


class AuditRecord(Model):
    """The verdict under which this plan's expert may leave."""

    verdict: AuditVerdict


@dataclass(frozen=True)
class Workplace:
    """One plan's folder on a site: checkpoints, the expert, the draws, the audit."""

    folder: Path

    @property
    def expert_path(self) -> Path:
        """The trained expert, EMA weights."""
        return self.folder / "expert.safetensors"

    @property
    def record_path(self) -> Path:
        """The `TrainingRecord`."""
        return self.folder / "training.json"

    @property
    def audit_path(self) -> Path:
        """The `AuditReport`."""
        return self.folder / "audit.json"

    @property
    def verdict_path(self) -> Path:
        """The `AuditRecord`."""
        return self.folder / "verdict.json"

    @property
    def releases(self) -> Path:
        """The draws, one file a release."""
        return self.folder / "releases"


def workplace(site: Site, plan_id: str) -> Workplace:
    """Return the folder in which this site works on `plan_id`."""
    folder = workplace_folder(site, plan_id)
    folder.mkdir(parents=True, exist_ok=True)
    return Workplace(folder)


def open_ledger(site: Site, policy: Policy) -> Ledger:
    """Open the site's one ledger under the policy's budget."""
    budget = Budget(epsilon=policy.privacy.budget_epsilon, delta=policy.privacy.budget_delta)
    return Ledger(site.ledger_path, budget=budget, unit="image")


def scan(site: Site, accepted: AcceptedPlan, policy: Policy) -> Cohort:
    """Read the private images and check them against the plan.

    Raises:
        DataError: see `silo.data.load_cohort`.
    """
    plan, data_path = accepted.plan, Path(site.settings().data)
    fewest = max(plan.partition.min_images, policy.training.min_images)
    return load_cohort(data_path, plan.data, min_images=fewest, salt=site.salt())


def check_budget(accepted: AcceptedPlan, cohort: Cohort, ledger: Ledger) -> None:
    """Refuse, before training and again before the first draw, a plan whose releases together are over budget.

    Raises:
        BudgetError: nothing was debited and no noise was drawn.
    """
    ledger.check_affordable(accepted.digest, cohort.digest, mechanisms(accepted.plan))


def assign(cohort: Cohort, files: PlanFiles, cohort_path: Path) -> torch.Tensor:
    """Assign every image to its nearest public centroid and write the cohort's table.

    Returns:
        The public group of each image, shape (N,), int64.
    """
    fine_N = files.clusters.assign(files.encoder.encode(cohort.images))
    coarse_N, group_N = files.clusters.coarse_F[fine_N], files.clusters.group_F[fine_N]
    frame = pd.DataFrame(
        {
            "index": np.arange(cohort.num_units),
            "fine": fine_N.numpy(),
            "coarse": coarse_N.numpy(),
            "group": group_N.numpy(),
        }
    )
    frame.attrs["dataset_digest"] = cohort.digest
    part = cohort_path.with_suffix(".part")
    frame.to_parquet(part, index=False)
    part.replace(cohort_path)
    return group_N


def train_expert(
    accepted: AcceptedPlan,
    cohort: Cohort,
    work: Workplace,
    expert_id: str,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Train this silo's expert, resuming exactly where an earlier process stopped; write it and its record.

    Raises:
        PolicyError: training took longer than the plan's limit.
        KeyboardInterrupt: `should_stop` answered yes; the last checkpoint stands.
    """
    plan = accepted.plan
    if work.record_path.exists():
        return
    expert = build_expert(plan.expert.architecture, plan.data.shape, seed=plan.expert.training.seed)

    def watch(progress: Progress) -> None:
        if progress.seconds > plan.limits.train_s:
            limit = f"at most {plan.limits.train_s} s"
            raise PolicyError("training time", expected=limit, got=f"{progress.seconds:.0f} s")
        on_progress(progress)

    trained = train(
        expert,
        cohort.images,
        plan.expert.training,
        LinearPath(),
        plan.t_distribution,
        checkpoint_dir=work.folder / "training",
        on_progress=watch,
        should_stop=should_stop,
    )
    save_tensors(work.expert_path, trained.ema)
    training = ExpertTraining(loss=trained.loss, seconds=trained.seconds, flops=trained.flops)
    record = TrainingRecord(
        plan_id=plan.plan_id,
        expert_id=expert_id,
        num_images=cohort.num_units,
        steps=trained.steps,
        training=training,
    )
    write_atomic(work.record_path, record.encode())


def check_auditable(accepted: AcceptedPlan, policy: Policy) -> None:
    """Refuse before days of training what the audit could not let pass afterwards.

    Raises:
        AuditError: too little held-out data to measure leakage, and no waiver.
    """
    audit = accepted.plan.audit
    if audit.min_holdout_units > NUM_HOLDOUT_UNITS:
        gate(measure(accepted.plan.plan_id, audit, num_holdout_units=NUM_HOLDOUT_UNITS), policy.audit)


def audit_expert(accepted: AcceptedPlan, work: Workplace, policy: Policy) -> AuditVerdict:
    """Audit the expert and pass it through the gate.

    Raises:
        AuditError: the audit did not pass and the policy holds no waiver.
    """
    report = measure(accepted.plan.plan_id, accepted.plan.audit, num_holdout_units=NUM_HOLDOUT_UNITS)
    write_atomic(work.audit_path, report.encode())
    return gate(report, policy.audit)


def release(
    accepted: AcceptedPlan, cohort: Cohort, files: PlanFiles, group_N: torch.Tensor, work: Workplace, ledger: Ledger
) -> None:
    """Draw this plan's releases, each debited in the ledger before its noise is drawn.

    Raises:
        BudgetError: the ledger would go over; nothing was drawn.
        LedgerError: the ledger is damaged.
    """
    if len(group_N) != cohort.num_units:
        raise DataError("assignment", expected=f"{cohort.num_units} images", got=f"{len(group_N)}")
    work.releases.mkdir(exist_ok=True)
    check_budget(accepted, cohort, ledger)
    args = (ledger, accepted.plan, accepted.digest)
    draw_counts(*args, group_N, cohort.digest, work.releases)
    draw_sketches(*args, files.sketch, cohort.images, cohort.digest, work.releases)
