"""Trains one expert as a plan says: the weights that it starts from, its seed, its objective, its condition."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ddm.diffusion.path import path_named
from ddm.errors import MissingFileError, SetupError
from ddm.images.rows import Images
from ddm.io.tensors import save_tensors
from ddm.models import MAX_WEIGHT, build_expert, load_expert
from ddm.models.adaptation import adapt, merged
from ddm.privacy.secret_stream import read_secret
from ddm.protocol.architecture import NoCondition
from ddm.protocol.base import File
from ddm.protocol.plan import Plan
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.system.cores import computing_in
from ddm.training.batches import Examples
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.objective import TrainingObjective
from ddm.training.private import PrivateTraining
from ddm.training.progress import Progress

_MAX_SEED = 2**63
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseExpert:
    """The expert that training starts from: its folder, and its path, bytes and digest."""

    folder: Path
    file: File


def public_base(plan: Plan, bundle: Path | None) -> BaseExpert | None:
    """Return the plan's public expert, from which its experts start; None where they start from random weights.

    Raises:
        MissingFileError: there is one, and no folder with the plan's files.
    """
    if plan.expert.base is None:
        return None
    if bundle is None:
        raise MissingFileError(
            plan.expert.base,
            expected="the plan's public expert",
            got="no folder with the plan's files",
        )
    return BaseExpert(bundle, plan.file(plan.expert.base))


@dataclass(frozen=True)
class PlannedExpert:
    """The weights from which one expert of a plan starts, and its training settings.

    Attributes:
        plan: the plan.
        silo_id: the silo, or the island.
        number: which of the silo's experts, or which island: its seed follows from it.
        base: the expert that it starts from; None for random weights.
        engine: how this machine trains.
        stops: whether a gradient that is not finite ends the training, see `ddm.training.state.TrainingState`, and
            whether weights that readers refuse are an error. Not at a silo: the plan's weights may overflow, or cross
            the bound, for one image only, and a stop would reveal that.
        paid: private training, as the ledger paid for it.
    """

    plan: Plan
    silo_id: str
    number: int
    base: BaseExpert | None
    engine: Engine
    stops: bool = True
    paid: DpSgdMechanism | None = None

    @property
    def seed(self) -> int:
        """The seed of its training, different for each number."""
        return (self.plan.expert.training.seed + self.number) % _MAX_SEED

    def start(self) -> nn.Module:
        """Build the model to train, from random weights or from another expert.

        Raises:
            MissingFileError, DigestError, TensorFileError: that expert is not the one that the documents list.
            SetupError: the adaptation names weights that the expert lacks.
        """
        expert = self.plan.expert
        shape = self.plan.expert_shape
        condition = self.plan.condition
        if self.base is None:
            return build_expert(expert.architecture, shape, condition=condition, seed=self.seed)
        base = load_expert(expert.architecture, shape, self.base.folder, self.base.file, condition)
        return adapt(base, expert.adaptation, seed=self.seed)

    def train(
        self,
        tensors: Mapping[str, Images],
        path: Path,
        checkpoints: Path,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        *,
        secret: Path | None = None,
    ) -> FinishedTraining | None:
        """Train on `images`, for a conditional expert `labels`, and write the whole expert to `path`.

        A plan that trains privately needs `units` as well, and the file of the training's `secret`.

        Returns:
            The finished run; None in all processes but the one that wrote the expert.

        Raises:
            KeyboardInterrupt: `should_stop` returned true; a checkpoint was written first.
            SetupError, NumericalError, DataError: see `ddm.training.loop.train`.
            MissingFileError: private training without its secret.
        """
        plan = self.plan
        objective = plan.objective.of(self.silo_id)
        condition = plan.condition
        labels = tensors.get("labels")
        if not isinstance(labels, Tensor):
            labels = None
        drop = 0.0
        if not isinstance(condition, NoCondition):
            drop = condition.drop
        trained = train(
            self.start(),
            Examples(tensors["images"], labels, drop),
            plan.expert.training.model_copy(update={"seed": self.seed}),
            TrainingObjective(
                path_named(objective.path), plan.t_distribution, objective.prediction
            ),
            TrainingRun(checkpoints, on_progress, should_stop, self.engine, self.stops),
            private=self._private(tensors.get("units"), secret),
        )
        if not trained.ema:
            return None
        # A release holds experts of one architecture, so that what an adaptation added becomes part of the weights.
        with computing_in(trained.threads):
            weights = merged(trained.ema, plan.expert.adaptation)
        if not self.stops:
            weights = _bounded(weights)
        save_tensors(path, weights)
        return trained

    def _private(self, unit_N: Images | None, secret: Path | None) -> PrivateTraining | None:
        """Return what private training needs; None for a plan that does not ask for it.

        Raises:
            SetupError: the plan asks for it, and not everything is given.
        """
        terms = self.plan.expert.privacy
        if terms is None:
            return None
        if unit_N is None or secret is None or self.paid is None:
            raise SetupError(
                "private training",
                expected="each image's unit, a secret and the debit in the ledger",
                got="not all of these",
                remedy="Only a silo's worker, whose ledger pays for it, can train such an expert.",
            )
        # Of numbers that are read from a file, all rows.
        units = unit_N if isinstance(unit_N, Tensor) else unit_N[torch.arange(len(unit_N))]
        return PrivateTraining(terms, self.paid, units.long(), read_secret(secret))


def _bounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that every reader takes: at most `MAX_WEIGHT` in magnitude, and 0 where they are not finite."""
    bounded = {}
    num_changed = 0
    for name, weight in weights.items():
        if not weight.is_floating_point():
            bounded[name] = weight
            continue
        bounded[name] = torch.where(weight.isfinite(), weight, 0.0).clamp(-MAX_WEIGHT, MAX_WEIGHT)
        # NaN differs from every number, so it is counted too.
        num_changed += int((bounded[name] != weight).sum())
    if num_changed:
        _log.warning(
            "%d weights were not finite or above %g, and were set to 0 or to the bound",
            num_changed,
            MAX_WEIGHT,
        )
    return bounded
