"""A silo that has no data at all: its experts, its statistics and its number of units are invented, and signed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from ddm.io.tensors import save_tensors
from ddm.loading.plan import PlanFiles
from ddm.models import build_expert
from ddm.partition.layout import silo_parts
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.partition import SiloPartition
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind, SubmittedStatistic
from ddm.protocol.submission import (
    Approval,
    AuditVerdict,
    ExpertTraining,
    LedgerHead,
    Spent,
    Submission,
    SubmittedExpert,
    Waiver,
    expert_path,
    submission_path,
)
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.statistics.sketch import sketch_noise_level
from ddm.trust.silo_role import sign_silo_metadata
from tests.support.federation import TinyFederation

DIGEST = "d" * 64


@dataclass(frozen=True)
class DishonestSilo:
    """Invents submissions of one silo for the federation's present plan, in perfect form.

    Attributes:
        tiny: the federation.
        silo_id: one of its silos, whose key signs.
    """

    tiny: TinyFederation
    silo_id: str

    def send(self, num_units: int, **heavier: int) -> Path:
        """Put a submission that states so many units where the ServerApp puts what it fetched.

        Args:
            num_units: what it states, and what its statistics add up to.
            heavier: what single statistics add up to instead, by kind.
        """
        plan, plan_digest = self.tiny.federation.current_plan()
        files = PlanFiles.load(plan, self.tiny.federation.plan_targets(plan.plan_id))
        folder = self.tiny.federation.incoming / plan.plan_id / self.silo_id / "1"
        statistics = {
            kind: self._statistic(kind, plan, files, heavier.get(kind, num_units))
            for kind in plan.statistics.terms
        }
        for kind, tensors in statistics.items():
            save_tensors(folder / f"{kind}.safetensors", tensors)
        experts = self._experts(plan, files, statistics["counts"]["counts"], folder, num_units)
        submission = Submission(
            root_digest=plan.root_digest,
            plan_id=plan.plan_id,
            plan_digest=plan_digest,
            silo_id=self.silo_id,
            sequence=1,
            created_at=now_utc(),
            num_units=num_units,
            isolation="containers",
            experts=experts,
            statistics=tuple(_describe_statistic(kind, plan, folder) for kind in statistics),
            spent=Spent(
                epsilon=plan.statistics.total.epsilon,
                delta=plan.statistics.total.delta,
                unit=plan.statistics.unit,
            ),
            ledger=LedgerHead(head_digest=DIGEST, num_entries=1, chain=(DIGEST,)),
            audit=AuditVerdict(verdict="waived", digest=DIGEST, waiver=_waiver(plan_digest)),
            approval=Approval(kind="person", at=now_utc()),
            software={},
        )
        self._sign(submission, folder)
        return folder

    def _sign(self, submission: Submission, folder: Path) -> None:
        encoded = submission.encode()
        prefix = f"{submission.plan_id}/"
        name = submission_path(self.silo_id)
        (folder / name).write_bytes(encoded)
        signed = {prefix + name: (len(encoded), sha256_hex(encoded))}
        signed |= {
            prefix + expert.file.path: (expert.file.bytes, expert.file.digest)
            for expert in submission.experts
        }
        key = self.tiny.key(self.silo_id)
        role = folder / "metadata" / f"{submission.plan_id}.{self.silo_id}.json"
        role.parent.mkdir()
        role.write_bytes(
            sign_silo_metadata(
                submission.plan_id,
                self.silo_id,
                signed,
                key,
                root_digest=submission.root_digest,
                version=1,
                now=now_utc(),
            )
        )

    def _statistic(
        self, kind: str, plan: Plan, files: PlanFiles, num_units: int
    ) -> dict[str, Tensor]:
        """Invent a statistic of so many units; every one lies well within what honest noise explains."""
        terms = plan.statistics
        if kind == "counts":
            return {"counts": self._counts(plan, terms.counts.num_groups, num_units)}
        if kind == "class_counts":
            assert terms.class_counts is not None
            shape = (terms.class_counts.num_classes, terms.counts.num_groups)
            return {"counts": self._counts(plan, shape[0] * shape[1], num_units).view(shape)}
        # Pure noise of the level that the plan prescribes: an honest sketch differs from it by the data alone.
        assert terms.sketch is not None
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(num_units, terms.sketch.rank, generator=generator)
        t_release = sketch_noise_level(plan, files.sketch) or 0.0
        return {"sketch": t_release / files.sketch.scale * noise}

    def _counts(self, plan: Plan, num_cells: int, num_units: int) -> Tensor:
        """Deal four fifths of the units evenly, and the rest to a cell of this silo's own."""
        counts = torch.full((num_cells,), 4 * num_units // (5 * num_cells), dtype=torch.int64)
        own_cell = sorted(plan.silos).index(self.silo_id) % num_cells
        counts[own_cell] += num_units - counts.sum()
        return counts

    def _experts(
        self, plan: Plan, files: PlanFiles, counts_G: Tensor, folder: Path, num_units: int
    ) -> tuple[SubmittedExpert, ...]:
        """Freshly drawn weights, which after so few steps of training cannot be told from trained ones."""
        experts = []
        # Elsewhere the number would say more than the noised counts do, and intake refuses it.
        num_images = None
        if isinstance(plan.partition, SiloPartition) and plan.statistics.unit == "image":
            num_images = num_units
        for part in silo_parts(plan.partition, self.silo_id, files.clusters, counts_G):
            seed = int(sha256_hex(part.expert_id.encode())[:8], 16)
            expert = build_expert(
                plan.expert.architecture, plan.expert_shape, condition=plan.condition, seed=seed
            )
            weights: Mapping[str, Tensor] = {
                name: value.detach()
                + 1e-4 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
                for name, value in expert.state_dict().items()
            }
            path = expert_path(self.silo_id, part.expert_id)
            save_tensors(folder / path, weights)
            experts.append(
                SubmittedExpert(
                    expert_id=part.expert_id,
                    cluster=part.cluster,
                    num_images=num_images,
                    steps=plan.expert.training.num_steps,
                    file=File.of(path, folder / path),
                    training=ExpertTraining(loss=0.5, seconds=1.0, flops=1.0),
                    privacy=NoWeightPrivacy(),
                )
            )
        return tuple(experts)


def _waiver(plan_digest: str) -> Waiver:
    until = now_utc() + timedelta(days=30)
    return Waiver(
        role="nobody",
        reason="made up",
        plan_digest=plan_digest,
        verdict="inconclusive",
        expires_at=until,
    )


def _describe_statistic(kind: StatisticKind, plan: Plan, folder: Path) -> SubmittedStatistic:
    terms = plan.statistics.terms[kind]
    file = File.of(f"{kind}.safetensors", folder / f"{kind}.safetensors")
    return SubmittedStatistic(kind=kind, epsilon=terms.epsilon, delta=terms.delta, file=file)
