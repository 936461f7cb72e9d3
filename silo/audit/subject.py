"""One expert that would leave the site, and the units whose membership is tested on it."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddm.audit.attacks import AttackedExpert
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

_MAX_SEED = 2**63


@dataclass(frozen=True)
class AttackedUnits:
    """Members, or units held out.

    Attributes:
        image_I: the numbers of their images, sorted by unit.
        unit_I: the unit of each image, from 0 without a gap.
    """

    image_I: Tensor
    unit_I: Tensor

    @property
    def num_units(self) -> int:
        """How many units there are."""
        if len(self.unit_I) == 0:
            return 0
        return int(self.unit_I.max()) + 1

    def select(self, is_selected_U: Tensor) -> "AttackedUnits":
        """Return some of the units, by a boolean for each, numbered again without a gap."""
        selected_I = is_selected_U[self.unit_I]
        _, unit_I = torch.unique(self.unit_I[selected_I], return_inverse=True)
        return AttackedUnits(self.image_I[selected_I], unit_I)


@dataclass(frozen=True)
class AuditedExpert:
    """One expert that would leave the site.

    Attributes:
        expert_id: its name.
        expert: how it was trained.
        file: its weights.
        files: the plan's.
        inputs: all images of the site as experts learn them, with their conditions.
        pixels: the same in pixels.
        learned_N: the numbers of the images that it learned.
        holdout_N: the numbers of the images held out that are like its own.
        public: the public expert that it started from, which then is the reference.
        secret: the secret of the site; decides which units are tested.
        num_samples: at most.
        settings: how this site trains.
        folder: private, of this expert's audit.
        job_folder: returns the folder of one of the audit's trainings, by name.
        make_task: returns the task of such a training: an expert, the images that it learns, its folder.
    """

    expert_id: str
    expert: PlannedExpert
    file: Path
    files: PlanFiles
    inputs: Cohort
    pixels: Images
    learned_N: Tensor
    holdout_N: Tensor
    public: BaseExpert | None
    secret: bytes
    num_samples: int
    settings: TrainingSettings
    folder: Path
    job_folder: Callable[[str], JobFolder]
    make_task: Callable[[PlannedExpert, Tensor, JobFolder], TrainingTask]

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
        learned_bytes = self.learned_N.numpy().tobytes()
        holdout_bytes = self.holdout_N.numpy().tobytes()
        parts = [
            self.plan.digest,
            self.base.file.digest,
            self.inputs.digest,
            str(self.num_samples),
            sha256_hex(learned_bytes + holdout_bytes),
        ]
        text = " ".join(parts)
        return sha256_hex(text.encode())

    @cached_property
    def seed(self) -> int:
        """A secret number, the same after a restart.

        Anybody who signs plans knows plan and expert, and must not know which units are tested.
        """
        message = f"audit {self.plan.digest} {self.expert_id}"
        digest = hmac.digest(self.secret, message.encode(), "sha256")
        return int.from_bytes(digest[:7], "big")

    @cached_property
    def num_holdout(self) -> int:
        """How many units are held out."""
        holdout_units = self.inputs.unit_N[self.holdout_N]
        return len(torch.unique(holdout_units))

    @cached_property
    def num_members(self) -> int:
        """How many of the units that the expert learned are tested: a reference needs the others to learn from."""
        learned_units = self.inputs.unit_N[self.learned_N]
        num_learned = len(torch.unique(learned_units))
        return min(self.num_holdout, num_learned // 2)

    @cached_property
    def effort(self) -> Effort:
        """What the audit computes."""
        return effort_of(
            self.plan.expert.training,
            self.num_members + self.num_holdout,
            self.num_samples,
            trains_reference=self.public is None,
        )

    @cached_property
    def holdout(self) -> AttackedUnits:
        """The units held out."""
        return self._draw_units(self.holdout_N, self.num_holdout, self.seed)

    @cached_property
    def members(self) -> AttackedUnits:
        """The same number of units that the expert learned, drawn at random, and never more than half of them."""
        return self._draw_units(self.learned_N, self.num_members, self.seed + 1)

    @cached_property
    def others_N(self) -> Tensor:
        """The images that the expert learned, without any of the members' units: what a reference learns."""
        learned_unit_N = self.inputs.unit_N[self.learned_N]
        member_units = self.inputs.unit_N[self.members.image_I]
        is_of_member_N = torch.isin(learned_unit_N, member_units)
        return self.learned_N[~is_of_member_N]

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

    def planned(
        self,
        base: BaseExpert | None,
        num_steps: int,
        *,
        overfits: bool,
        draw: int = 0,
    ) -> PlannedExpert:
        """Return a training of a few steps; one that overfits follows the last steps instead of their average.

        Args:
            base: the expert that it starts from; None for random weights.
            num_steps: the number of steps of the training.
            overfits: see above.
            draw: of its random numbers; every draw takes other batches and other noise.
        """
        # The plan's average is made for its many steps; over these few it would still be near the start.
        planned_training = self.plan.expert.training
        ema_decay = 0.9
        warmup_steps = min(planned_training.warmup_steps, num_steps // 5)
        if overfits:
            ema_decay = 0.5
            warmup_steps = 0
        training = planned_training.model_copy(
            update={
                "ema_decay": ema_decay,
                "ema_half_life": None,
                "ema_width": None,
                "ema_snapshots": 0,
                "num_steps": num_steps,
                "seed": (planned_training.seed + draw) % _MAX_SEED,
                "schedule": "constant",
                "final_rate": 0.0,
                "warmup_steps": warmup_steps,
                "order": "drawn",
                "mask_ratio": 0.0,
            }
        )
        # The weights stay on this site, so that their privacy costs nothing and no ledger pays for it.
        expert = self.plan.expert.model_copy(update={"training": training, "privacy": None})
        plan = self.plan.model_copy(update={"expert": expert})
        return replace(self.expert, plan=plan, base=base, paid=None)

    def open_for_attack(self, weights: BaseExpert) -> AttackedExpert:
        """Open an expert of this architecture on the device of this site.

        Raises:
            DigestError, TensorFileError: it is not what it should be.
        """
        objective = self.plan.objective.of(self.expert.silo_id)
        device = device_named(self.settings.device)
        network = load_expert(
            self.plan.expert.architecture,
            self.plan.expert_shape,
            weights.folder,
            weights.file,
            self.plan.condition,
        )
        path = path_named(objective.path)
        return AttackedExpert(network.to(device), path, objective.prediction, device)

    def _draw_units(
        self,
        image_N: Tensor,
        num_units: int,
        seed: int,
    ) -> AttackedUnits:
        """Draw units, and at most `effort.images_per_unit` images of each."""
        # Shuffled first, so that the images of a unit that are tested are a random choice of them.
        random = np.random.default_rng(seed)
        order_N = torch.from_numpy(random.permutation(len(image_N)))
        shuffled_N = image_N[order_N]
        unit_N = self.inputs.unit_N[shuffled_N]
        present_U = torch.unique(unit_N)
        drawn_places = random.permutation(len(present_U))[:num_units]
        chosen_U = present_U[torch.from_numpy(np.sort(drawn_places))]

        is_chosen_N = torch.isin(unit_N, chosen_U)
        image_I = shuffled_N[is_chosen_N]
        unit_I = torch.searchsorted(chosen_U, unit_N[is_chosen_N])
        order_I = torch.argsort(unit_I, stable=True)
        image_I = image_I[order_I]
        unit_I = unit_I[order_I]

        # Units are sorted by now: an image's rank in its unit is its distance from the unit's first image.
        first_I = torch.searchsorted(unit_I.contiguous(), unit_I)
        rank_I = torch.arange(len(unit_I)) - first_I
        is_tested_I = rank_I < self.effort.images_per_unit
        return AttackedUnits(image_I[is_tested_I], unit_I[is_tested_I])
