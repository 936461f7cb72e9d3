"""What each router family consists of: how it is fitted to what an aggregator or an owner has, and read back.

A family is one file of this folder: its router, and a `RouterFamily`. Its settings are a document of
`ddm.protocol.routers`, which must not import torch; `ddm.routers.families` joins the two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ddm.diffusion.path import Path, path_named
from ddm.io.tensors import TensorSpec
from ddm.partition.layout import Layout
from ddm.protocol.manifest import PublishedExpert
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import LossCallback, Router
from ddm.routers.comparison import HeldOut
from ddm.routers.counts import CountsRouter
from ddm.routers.labelled import Labelled
from ddm.routers.residual import PublicSketches
from ddm.routers.sketch import Sketch
from ddm.training.checkpoints import Checkpoints


class StorableRouter(Router, Protocol):
    """A router that a release can store."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores."""
        ...


@dataclass(frozen=True)
class RouterInputs:
    """All that a router may be fitted to; a family takes what it needs, and what is dear is made only then.

    Attributes:
        plan: the plan.
        counts: the counts router of the silos, fitted already.
        layout: the experts of each silo; None where each silo has one expert.
        num_units: the public number of units of each silo.
        share_K: the weight of each silo in what is fitted on all of them together; sums to 1.
        sketches: noised sketches (N, r) by silo; empty where the plan has none.
        t_release: noise level of the sketches; None where there are none.
        public_sketches: returns the sketches of the public images, or of an owner's labelled ones.
        labelled_images: returns images labelled by expert, as the settings of the samples router require.
        seed: the seed of initial weights, batches and noise.
        on_progress: called with step, number of steps and held-out loss.
        device: where networks are trained.
        checkpoints: of a training that may take hours; None where it begins again after an interruption.
    """

    plan: Plan
    counts: CountsRouter
    layout: Layout | None
    num_units: Sequence[int]
    share_K: Sequence[float]
    sketches: Mapping[str, Tensor]
    t_release: float | None
    public_sketches: Callable[[], PublicSketches]
    labelled_images: Callable[[SamplesSettings], Labelled]
    seed: int
    on_progress: LossCallback | None
    device: torch.device | str
    checkpoints: Checkpoints | None = None

    @property
    def path(self) -> Path:
        """The probability path of the ensemble."""
        return path_named(self.plan.objective.ensemble_path)


@dataclass(frozen=True)
class FittedRouter:
    """A router of the plan's experts.

    Attributes:
        router: the router.
        held_out: sketches that it was not fitted to, on which it is compared with counts; None without such sketches.
        is_changed: whether training made it different from the counts router.
    """

    router: StorableRouter
    held_out: HeldOut | None = None
    is_changed: bool = True


@dataclass(frozen=True)
class StoredRouter:
    """A published router's file, and what a reader needs to build the router from it.

    Attributes:
        plan: gives the number of groups and the network's size.
        sketch: the plan's.
        experts: the manifest's, in the router's class order.
        t_release: noise level of the sketches that the manifest states; None for a router without sketches.
        file_name: for errors.
        read_tensors: reads the file strictly, against these specs.
    """

    plan: Plan
    sketch: Sketch
    experts: Sequence[PublishedExpert]
    t_release: float | None
    file_name: str
    read_tensors: Callable[[Mapping[str, TensorSpec]], dict[str, Tensor]]

    @property
    def path(self) -> Path:
        """The probability path of the ensemble."""
        return path_named(self.plan.objective.ensemble_path)

    @property
    def silo_E(self) -> tuple[int, ...]:
        """The number of each expert's silo."""
        return silo_numbers(self.experts)


class RouterFamily(ABC):
    """One family of routers.

    Attributes:
        states_t_release: whether a manifest states the noise level of the sketches that the router was made from.
    """

    states_t_release: ClassVar[bool] = False

    @abstractmethod
    def fit(self, inputs: RouterInputs) -> FittedRouter:
        """Fit a router of the plan's experts.

        Raises:
            NumericalError: the training diverged.
            DataError, SetupError: the inputs lack what the family is fitted to.
        """

    @abstractmethod
    def load(self, stored: StoredRouter) -> Router:
        """Rebuild a router from its file.

        Raises:
            TensorFileError: the file is not such a router.
            MathError: its values are not those of a router.
        """


def silo_numbers(experts: Sequence[PublishedExpert]) -> tuple[int, ...]:
    """Return the number of each expert's silo, silos numbered as they first appear."""
    order = list(dict.fromkeys(expert.silo_id for expert in experts))
    return tuple(order.index(expert.silo_id) for expert in experts)
