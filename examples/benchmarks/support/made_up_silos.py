"""Plays any number of silos without their sites: genuine cards, statistics, signatures, and experts of one training.

The expert is trained once, for seconds. Each silo's is that one with other noise in its weights, so that screening
compares them as it compares real ones, and takes none for a copy of another.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from torch import Tensor

from ddm.io.files import write_atomic
from ddm.io.tensors import save_tensors
from ddm.loading.plan import PlanFiles
from ddm.models import build_expert
from ddm.privacy.noise import OS_NOISE
from ddm.protocol.base import File, now_utc, sha256_hex
from ddm.protocol.enrolment import CARD_KIND, AgreedSize, Card
from ddm.protocol.plan import Plan
from ddm.protocol.policy import PolicyLimits, PrivacyLimits
from ddm.protocol.statistics import SubmittedStatistic
from ddm.protocol.submission import (
    Approval,
    AuditVerdict,
    LedgerHead,
    Spent,
    Submission,
    SubmittedExpert,
    SubmittedTraining,
    Waiver,
    expert_path,
    submission_path,
)
from ddm.protocol.weight_privacy import NoWeightPrivacy
from ddm.statistics.base import StatisticSource
from ddm.statistics.of_plan import statistics_of
from ddm.system.version import software_versions
from ddm.trust.envelope import seal
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata

# Of the order of the P-256 curve, whose private keys are numbers from 1 to below it.
_NODE_KEY_BOUND = 2**255
# Of the trained expert.
_NUM_STEPS = 600
_BATCH = 256
_LEARNING_RATE = 3e-3
# Of a weight, relative to the root mean square of its tensor.
_WEIGHT_NOISE = 0.2


def train_common_expert(plan: Plan) -> dict[str, Tensor]:
    """Return the weights of an expert that learnt the velocity of images that are noise, as every silo's are."""
    torch.manual_seed(0)
    expert = build_expert(plan.expert.architecture, plan.expert_shape, seed=0)
    optimizer = torch.optim.Adam(expert.parameters(), lr=_LEARNING_RATE)
    for _ in range(_NUM_STEPS):
        x_0 = 2 * torch.rand(_BATCH, *plan.expert_shape) - 1
        eps = torch.randn_like(x_0)
        t = torch.rand(_BATCH)
        t_B111 = t.view(-1, *[1] * len(plan.expert_shape))
        x_t = (1 - t_B111) * x_0 + t_B111 * eps
        loss = (expert(x_t, t) - (eps - x_0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in expert.state_dict().items()}


@dataclass(frozen=True)
class MadeUpSilo:
    """One silo: a name, and keys that follow from it, so that each process of a benchmark has the same ones.

    Attributes:
        number: from 0.
        num_images: the number of its images, each a privacy unit.
    """

    number: int
    num_images: int

    @property
    def silo_id(self) -> str:
        """Its name."""
        return f"silo{self.number:04d}"

    @property
    def key(self) -> SigningKey:
        """The key that seals its card and signs its submission."""
        return SigningKey(Ed25519PrivateKey.from_private_bytes(self._secret("signing")))

    def card(self, root_digest: str) -> bytes:
        """Return its enrolment card for a federation, as `silo enroll` writes it."""
        secret = int.from_bytes(self._secret("node")) % _NODE_KEY_BOUND + 1
        node_key = ec.derive_private_key(secret, ec.SECP256R1()).public_key()
        card = Card(
            root_digest=root_digest,
            agreed=AgreedSize(images=self.num_images),
            limits=PolicyLimits(privacy=PrivacyLimits(unit="image")),
            silo_id=self.silo_id,
            signing_key=str(self.key.public),
            node_key=node_key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
            created_at=now_utc(),
        )
        return seal(card.encode(), CARD_KIND, self.key)

    def write_submission(
        self, folder: Path, plan: Plan, files: PlanFiles, weights: Mapping[str, Tensor]
    ) -> None:
        """Write the files of its first submission as they arrive at the aggregator, all but training genuine.

        Args:
            folder: where the aggregator receives it.
            plan: in force.
            files: its public tensors.
            weights: of the common expert.
        """
        expert_file = self._write_expert(folder, weights)
        statistics = self._write_statistics(folder, plan, files)
        submission = self._describe(plan, expert_file, statistics, now_utc())
        document = submission.encode()
        document_path = submission_path(self.silo_id)
        write_atomic(folder / document_path, document, is_durable=False)
        signed = {
            f"{plan.plan_id}/{document_path}": (len(document), sha256_hex(document)),
            f"{plan.plan_id}/{expert_file.path}": (expert_file.bytes, expert_file.digest),
        }
        role = sign_silo_metadata(
            plan.plan_id,
            self.silo_id,
            signed,
            self.key,
            root_digest=plan.root_digest,
            version=submission.sequence,
            now=submission.created_at,
        )
        role_path = folder / "metadata" / f"{plan.plan_id}.{self.silo_id}.json"
        write_atomic(role_path, role, is_durable=False)

    def _secret(self, purpose: str) -> bytes:
        return hashlib.sha256(f"{self.silo_id} {purpose}".encode()).digest()

    def _write_expert(self, folder: Path, weights: Mapping[str, Tensor]) -> File:
        generator = torch.Generator().manual_seed(self.number)
        tensors = {}
        for name, value in weights.items():
            scale = _WEIGHT_NOISE * value.square().mean().sqrt()
            tensors[name] = value + scale * torch.randn(value.shape, generator=generator)
        path = expert_path(self.silo_id, self.silo_id)
        (folder / path).parent.mkdir(parents=True)
        save_tensors(folder / path, tensors)
        return File.of(path, folder / path)

    def _write_statistics(
        self, folder: Path, plan: Plan, files: PlanFiles
    ) -> tuple[SubmittedStatistic, ...]:
        """Draw the statistics of images that are noise, with the noise of the plan."""
        values = np.random.default_rng(self.number).uniform(
            -1, 1, (self.num_images, *plan.data.shape)
        )
        images = torch.from_numpy(values.astype(np.float32))
        source = StatisticSource(
            plan=plan,
            plan_digest=plan.digest,
            sketch=files.sketch,
            images=images,
            group_N=files.clusters.groups(files.encoder.encode(images)),
            unit_N=torch.arange(self.num_images),
            label_N=None,
            dataset_digest=sha256_hex(values.tobytes()),
        )
        submitted = []
        for statistic in statistics_of(plan.statistics).values():
            draw = statistic.prepare(source)
            path = folder / statistic.file_name
            save_tensors(path, draw(np.arange(self.num_images), OS_NOISE))
            terms = plan.statistics.terms[statistic.kind]
            submitted.append(
                SubmittedStatistic(
                    kind=statistic.kind,
                    epsilon=terms.epsilon,
                    delta=terms.delta,
                    file=File.of(statistic.file_name, path),
                )
            )
        return tuple(submitted)

    def _describe(
        self,
        plan: Plan,
        expert_file: File,
        statistics: tuple[SubmittedStatistic, ...],
        now: datetime,
    ) -> Submission:
        digest = sha256_hex(f"{self.silo_id} debit".encode())
        waiver = Waiver(
            role="benchmark",
            reason="made-up images",
            plan_digest=plan.digest,
            verdict="inconclusive",
            expires_at=now + timedelta(days=1),
        )
        expert = SubmittedExpert(
            expert_id=self.silo_id,
            num_images=self.num_images,
            steps=plan.expert.training.num_steps,
            file=expert_file,
            training=SubmittedTraining(seconds=1.0, flops=1.0),
            privacy=NoWeightPrivacy(),
        )
        return Submission(
            root_digest=plan.root_digest,
            plan_id=plan.plan_id,
            plan_digest=plan.digest,
            silo_id=self.silo_id,
            sequence=1,
            created_at=now,
            num_units=self.num_images,
            isolation="none",
            experts=(expert,),
            statistics=statistics,
            spent=Spent(epsilon=plan.spends.epsilon, delta=plan.spends.delta, unit="image"),
            ledger=LedgerHead(head_digest=digest, num_entries=1, chain=(digest,)),
            audit=AuditVerdict(verdict="waived", digest=digest, waiver=waiver),
            approval=Approval(kind="policy", at=now),
            software=software_versions(),
        )
