"""Makes a real federation with synthetic, untrained experts of any size: documents and keys are genuine."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aggregator.config import Federation, FederationSettings
from aggregator.membership.registry import card_of, enroll_silo
from aggregator.planning.draft import draft_plan
from aggregator.planning.recipe import Recipe
from aggregator.planning.sign import sign_plan
from aggregator.setup import init_federation
from ddm.io.files import write_atomic
from ddm.io.settings import save_settings
from ddm.io.tensors import TensorSpec, stored_bytes
from ddm.models import expected_tensors
from ddm.planning.networks import open_networks
from ddm.protocol.architecture import Dit
from ddm.protocol.base import now_utc, sha256_file
from ddm.protocol.plan import Plan
from ddm.protocol.submission import ExpertTraining, Waiver
from ddm.trust.keys import SigningKey
from silo.config import Policy, Site
from silo.plan.waiver import write_waiver
from silo.plan.workspace import TrainingRecord, open_workspace
from silo.setup import SiteSetup, init_site, make_card, read_invitation
from silo.worker.worker import Worker

PASSPHRASE = b"benchmark"
SHAPE = (1, 4, 4)
NUM_IMAGES = 60
NUM_STEPS = 6
_BLOCK = 2**24  # values written at once, 64 MiB

# About 18 hidden^2 numbers a block.
TINY = Dit(patch=2, hidden=16, depth=1, heads=2)
ARCHITECTURES = {
    "64 MiB": Dit(patch=2, hidden=512, depth=3, heads=8),
    "1 GiB": Dit(patch=2, hidden=1024, depth=14, heads=16),
    "12 GiB": Dit(patch=2, hidden=2048, depth=42, heads=16),
}

_POLICY = {
    "privacy": {"unit": "image"},
    "data": {"kind": "arrays", "shape": SHAPE, "range": (-1.0, 1.0)},
    "training": {"max_expert_bytes": 16 * 1024**3, "min_images": 10},
    "audit": {"required": True},
    "approval": {"kind": "policy"},
}


def _waiver(plan_digest: str) -> Waiver:
    until = now_utc() + timedelta(days=1)
    terms: dict[str, Any] = {
        "plan_digest": plan_digest,
        "verdict": "inconclusive",
        "expires_at": until,
    }
    return Waiver(role="benchmark", reason="made-up images", **terms)


def recipe() -> Recipe:
    """The smallest possible plan; its architecture is replaced before it is signed."""
    training = {
        "num_steps": NUM_STEPS,
        "batch_size": 8,
        "learning_rate": 0.002,
        "weight_decay": 0.01,
    }
    tables = {
        "rehearsal": True,
        "data": {"shape": SHAPE, "range": [-1.0, 1.0]},
        "encoder": {"kind": "pca", "dim": 4},
        "clustering": {"num_fine": 8, "num_coarse": 2},
        "sketch": {"rank": 4},
        "partition": {"kind": "silo", "min_images": 10},
        "expert": {
            "architecture": TINY.model_dump(mode="json"),
            "training": {**training, "ema_decay": 0.9},
        },
        "statistics": {
            "unit": "image",
            "total": {"epsilon": 8.0, "delta": 1e-5},
            "counts": {"epsilon": 1.0, "num_groups": 4},
            "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 2},
        },
        "router": {"kind": "learned", "hidden": 8, "depth": 1, "num_steps": 20},
        "audit": {
            "required": True,
            "min_holdout_units": 300,
            "max_near_copy_rate": 0.01,
            "max_mia_auc": 0.6,
        },
        "limits": {
            "expert_bytes": 1 << 20,
            "statistic_bytes": 1 << 20,
            "train_s": 600,
            "gpu_hours": 1.0,
        },
    }
    return Recipe.model_validate_json(json.dumps(tables))


def expert_bytes(architecture: Dit) -> int:
    """Return an upper bound on the size of an expert's file."""
    return stored_bytes(expected_tensors(architecture, SHAPE))


def write_expert(path: Path, architecture: Dit, *, seed: int, sparse: bool = False) -> None:
    """Write a valid expert file without holding it in memory.

    Args:
        path: of the file.
        architecture: gives names and shapes.
        seed: of the values; no two blocks of the file are equal.
        sparse: write zeros that take no disk space instead.
    """
    specs: dict[str, TensorSpec] = dict(sorted(expected_tensors(architecture, SHAPE).items()))
    header = {}
    end = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.bytes],
        }
        end += spec.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).normal(0, 0.02, _BLOCK).astype(np.float32).view(np.uint32)
    with path.open("wb") as handle:
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        if sparse:
            handle.truncate(handle.tell() + end)
            return
        for number, start in enumerate(range(0, end, 4 * _BLOCK)):
            # The lowest bits of the mantissa, so that the values stay what they are.
            block = values ^ np.uint32(number)
            handle.write(block.tobytes()[: end - start])


@dataclass(frozen=True)
class MadeUp:
    """A federation below one folder, and its signed plan."""

    path: Path
    federation: Federation
    sites: dict[str, Site]
    plan: Plan

    @classmethod
    def create(cls, path: Path, num_silos: int, architecture: Dit) -> "MadeUp":
        """Make the operator's folder and the silos' sites, enroll them, sign a plan for this architecture."""
        federation = Federation(path / "fed")
        init_federation(
            federation,
            FederationSettings(name="bench", host="127.0.0.1", port=9092, licence="CC-BY-4.0"),
            PASSPHRASE,
        )
        invitation = federation.path / "invitation.json"
        sites = {}
        for number in range(num_silos):
            silo_id = f"silo{number}"
            site = Site(path / silo_id)
            data = path / f"{silo_id}.npz"
            np.savez(data, images=_images(number))
            invited = read_invitation(invitation, sha256_file(invitation))
            key = init_site(site, SiteSetup(silo_id, data), invited, PASSPHRASE)
            save_settings(Policy.model_validate(_POLICY), site.path / "policy.toml", "benchmark")
            (path / f"{silo_id}.card.json").write_bytes(make_card(site, key))
            enroll_silo(federation, path / f"{silo_id}.card.json")
            sites[silo_id] = site
        return cls(path, federation, sites, _sign(federation, architecture, path / "scratch"))

    def node_keys(self) -> dict[str, str]:
        """Each silo's node key."""
        return {silo_id: card_of(self.federation, silo_id).node_key for silo_id in self.sites}

    def answer(self, silo_id: str, write: Callable[[Path], None]) -> None:
        """Let the silo's worker do everything but training: `write` writes the expert instead."""
        site = self.sites[silo_id]
        plan_id = self.plan.plan_id
        if not (site.inbox / plan_id / "bundle").exists():
            shutil.copytree(self.federation.bundle(plan_id), site.inbox / plan_id / "bundle")
        write_waiver(site, _waiver(self.plan.digest))
        worker = Worker(site, SigningKey.load(site.key_path, PASSPHRASE), lambda state: None)
        worker.begin()
        while worker.state.state != "in_outbox":
            if worker.state.state == "assigned":
                self._skip_training(site, silo_id, write)
            before = worker.state
            worker.step()
            if worker.state == before:
                raise SystemExit(
                    f"{silo_id}: expected the next state, got no change from {before.state}: {before.problem}"
                )

    def _skip_training(self, site: Site, silo_id: str, write: Callable[[Path], None]) -> None:
        work = open_workspace(site, self.plan.plan_id)
        write(work.expert_path(silo_id))
        record = TrainingRecord(
            plan_id=self.plan.plan_id,
            expert_id=silo_id,
            num_units=NUM_IMAGES,
            num_images=NUM_IMAGES,
            steps=NUM_STEPS,
            training=ExpertTraining(loss=1.0, seconds=1.0, flops=1),
        )
        write_atomic(work.record_path(silo_id), record.encode())


def _images(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (NUM_IMAGES, *SHAPE)).astype(np.float32)


def _sign(federation: Federation, architecture: Dit, scratch: Path) -> Plan:
    public = torch.from_numpy(np.concatenate([_images(seed) for seed in range(1000, 1004)]))
    chosen = recipe()
    draft = draft_plan(federation, chosen, open_networks(chosen), public, scratch)
    plan = draft.plan
    expert = plan.expert.model_copy(update={"architecture": architecture})
    limits = plan.limits.model_copy(update={"expert_bytes": expert_bytes(architecture)})
    plan = plan.model_copy(update={"expert": expert, "limits": limits})
    sign_plan(federation, replace(draft, plan=plan), PASSPHRASE)
    shutil.rmtree(scratch)
    return plan
