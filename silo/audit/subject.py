"""One expert that would leave, and the units whose membership is tested on it."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import Target
from ddm.audit.effort import Effort, effort_of
from ddm.diffusion.path import path_named
from ddm.images.rows import Images
from ddm.loading.plan import PlanFiles
from ddm.models import load_expert
from ddm.protocol.architecture import ClassCondition, NoCondition
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.plan import Plan
from ddm.system.devices import device_named
from ddm.training.config import TrainingSettings
from ddm.training.job import JobFolder
from ddm.training.jobs import TrainingTask
from ddm.training.planned import BaseExpert, PlannedExpert
from silo.data.cohort import Cohort

# Shape legend: N images, I images of one side, U units.


@dataclass(frozen=True)
class Side:
    """Members, or units held out.

    Attributes:
        image_I: the numbers of their images.
        unit_I: each one's unit, from 0 without a gap.
    """

    image_I: Tensor
    unit_I: Tensor

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return int(self.unit_I.max()) + 1 if len(self.unit_I) else 0

    def only(self, units: Tensor) -> "Side":
        """Return some of the units, by a boolean for each."""
        kept_I = units[self.unit_I]
        return Side(self.image_I[kept_I], torch.unique(self.unit_I[kept_I], return_inverse=True)[1])


@dataclass(frozen=True)
class Subject:
    """One expert that would leave.

    Attributes:
        expert_id: its name.
        expert: how it was trained.
        file: its weights.
        files: the plan's.
        inputs: all images of the site as experts learn them, with their conditions.
        pixels: the same in pixels.
        learned_N: the numbers of the images that it learned.
        held_N: the numbers of the images held out that are like its own.
        public: the public expert that it started from, which then is the reference.
        secret: of the site; decides which units are looked at.
        num_samples: at most.
        settings: how this site trains.
        folder: private, of this expert's audit.
        job: the folder in which a training of the audit works, by name.
        wanted: says what such a training learns.
    """

    expert_id: str
    expert: PlannedExpert
    file: Path
    files: PlanFiles
    inputs: Cohort
    pixels: Images
    learned_N: Tensor
    held_N: Tensor
    public: BaseExpert | None
    secret: bytes
    num_samples: int
    settings: TrainingSettings
    folder: Path
    job: Callable[[str], JobFolder]
    wanted: Callable[[PlannedExpert, Tensor, JobFolder], TrainingTask]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.expert.plan

    @cached_property
    def base(self) -> BaseExpert:
        """The expert itself, as others start from it."""
        return BaseExpert(self.file.parent, File.of(self.file.name, self.file))

    @cached_property
    def digest(self) -> str:
        """Names everything that the measurement depends on."""
        rows = self.learned_N.numpy().tobytes() + self.held_N.numpy().tobytes()
        words = (
            f"{self.plan.digest} {self.base.file.digest} {self.inputs.digest} {self.num_samples} "
        )
        return sha256_hex(words.encode() + sha256_hex(rows).encode())

    @cached_property
    def seed(self) -> int:
        """A secret number, the same after a restart."""
        words = f"audit {self.plan.digest} {self.expert_id}"
        return int.from_bytes(hmac.digest(self.secret, words.encode(), "sha256")[:7], "big")

    @cached_property
    def num_held(self) -> int:
        """How many units are held out."""
        return len(torch.unique(self.inputs.unit_N[self.held_N]))

    @cached_property
    def effort(self) -> Effort:
        """What the audit computes."""
        members = min(self.num_held, len(torch.unique(self.inputs.unit_N[self.learned_N])) // 2)
        trained = self.public is None
        return effort_of(
            self.plan.expert.training, members + self.num_held, self.num_samples, reference=trained
        )

    @cached_property
    def held(self) -> Side:
        """The units held out."""
        return self._side(self.held_N, self.num_held, self.seed)

    @cached_property
    def members(self) -> Side:
        """As many units that the expert learned, drawn at random, and never more than half of them."""
        num = min(self.num_held, len(torch.unique(self.inputs.unit_N[self.learned_N])) // 2)
        return self._side(self.learned_N, num, self.seed + 1)

    @cached_property
    def others_N(self) -> Tensor:
        """The images that the expert learned, without any of the members' units: what a reference learns."""
        of_members = torch.isin(
            self.inputs.unit_N[self.learned_N], self.inputs.unit_N[self.members.image_I]
        )
        return self.learned_N[~of_members]

    @property
    def condition_N(self) -> Tensor | None:
        """The condition of every image, None for an unconditional expert."""
        match self.plan.condition:
            case NoCondition():
                return None
            case ClassCondition():
                return self.inputs.label_N
            case _:
                return self.inputs.text_NLD

    def planned(self, base: BaseExpert | None, num_steps: int, *, quick: bool) -> PlannedExpert:
        """Return a training of a few steps; `quick` forgets the average at once, for one that is to overfit."""
        training = self.plan.expert.training.model_copy(
            update={
                "ema_decay": 0.5 if quick else 0.9,
                "ema_half_life": None,
                "ema_width": None,
                "ema_snapshots": 0,
                "num_steps": num_steps,
                "checkpoint_steps": max(num_steps // 4, 1),
                "schedule": "constant",
                "final_rate": 0.0,
                "warmup_steps": 0
                if quick
                else min(self.plan.expert.training.warmup_steps, num_steps // 5),
                "order": "drawn",
                "mask_ratio": 0.0,
            }
        )
        # What it trains stays here, so that no ledger pays for it.
        expert = self.plan.expert.model_copy(update={"training": training, "privacy": None})
        return replace(
            self.expert, plan=self.plan.model_copy(update={"expert": expert}), base=base, paid=None
        )

    def target(self, folder: Path, file: File) -> Target:
        """Open an expert for attacks, where this machine computes.

        Raises:
            DigestError, TensorFileError: it is not what it should be.
        """
        objective, device = (
            self.plan.objective.of(self.expert.silo_id),
            device_named(self.settings.device),
        )
        architecture = self.plan.expert.architecture
        network = load_expert(
            architecture, self.plan.expert_shape, folder, file, self.plan.condition
        ).to(device)
        return Target(network, path_named(objective.path), objective.prediction, device)

    def _side(self, image_N: Tensor, num: int, seed: int) -> Side:
        """Draw units, and at most so many images of each as the effort says."""
        random = np.random.default_rng(seed)
        shuffled_N = image_N[torch.from_numpy(random.permutation(len(image_N)))]
        unit_N = self.inputs.unit_N[shuffled_N]
        present_U = torch.unique(unit_N)
        chosen_U = present_U[torch.from_numpy(np.sort(random.permutation(len(present_U))[:num]))]
        place_N = torch.searchsorted(chosen_U, unit_N).clamp(max=max(len(chosen_U) - 1, 0))
        taken_N = (
            chosen_U[place_N] == unit_N
            if len(chosen_U)
            else torch.zeros(len(unit_N), dtype=torch.bool)
        )
        image_I, unit_I = shuffled_N[taken_N], place_N[taken_N]
        order_I = torch.argsort(unit_I, stable=True)
        image_I, unit_I = image_I[order_I], unit_I[order_I]
        first_I = torch.searchsorted(unit_I.contiguous(), unit_I)
        kept_I = torch.arange(len(unit_I)) - first_I < self.effort.images_per_unit
        return Side(image_I[kept_I], unit_I[kept_I])
