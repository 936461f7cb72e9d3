"""What each statistic consists of: cost, tensors, draw, the bounds of honest noise, and words for people."""

# Shape legend: N records, U units.
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec
from ddm.privacy.accounting import Mechanism
from ddm.privacy.noise import Noise
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind, Statistics
from ddm.routers.sketch import Sketch

Records = NDArray[np.int64]
"""Numbers of images, one of each unit."""
Tensors = Mapping[str, Tensor]
"""The tensors of one statistic, by name."""
Draw = Callable[[Records, Noise], Tensors]
"""Called as ``draw(record_U, noise)`` with one record of each unit; returns the tensors that leave the silo."""


@dataclass(frozen=True)
class StatisticSource:
    """Everything from which a plan's statistics are computed.

    Attributes:
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        sketch: the plan's public sketch; statistics use its leading dimensions.
        images: shape (N, ...), read block by block.
        group_N: each image's public group.
        unit_N: the privacy unit of each image, numbered from 0 without a gap; with the image as the unit, its index.
        label_N: each image's class, None for a plan without classes.
        dataset_digest: the digest of the cohort.
    """

    plan: Plan
    plan_digest: str
    sketch: Sketch
    images: Images
    group_N: Tensor
    unit_N: Tensor
    label_N: Tensor | None
    dataset_digest: str


@dataclass(frozen=True)
class Statistic(ABC):
    """One statistic of a plan. Silo, intake, review and policy know a statistic by these methods alone.

    Args:
        statistics: what the plan requires; it contains this kind.
    """

    kind: ClassVar[StatisticKind]
    # In messages and tables, as in "bytes of the NAME".
    name: ClassVar[str]
    # In the report, for a reader who has no glossary.
    description: ClassVar[str]

    statistics: Statistics

    @property
    def file_name(self) -> str:
        """The file of the drawn statistic."""
        return f"{self.kind}.safetensors"

    @abstractmethod
    def mechanism(self) -> Mechanism:
        """Return the mechanism that the ledger pays for."""

    @abstractmethod
    def tensor_specs(self, num_units: int) -> dict[str, TensorSpec]:
        """Return the names, dtypes and shapes of the tensors that leave a silo of this many units."""

    @abstractmethod
    def prepare(self, source: StatisticSource) -> Draw:
        """Do everything that may fail, so that only the choice of records and the noise come after the debit.

        Raises:
            DataError: groups or classes that do not fit the plan.
            PolicyError: a sketch that would not protect as its epsilon claims.
            NumericalError: a statistic that would be pure noise.
        """

    @abstractmethod
    def check_public(self, plan: Plan, sketch: Sketch) -> None:
        """Refuse a plan whose public files would make the statistic useless; a silo checks it before it trains.

        Raises:
            NumericalError: it would be pure noise.
        """

    @abstractmethod
    def check_received(
        self,
        tensors: Tensors,
        num_units: int,
        plan: Plan,
        sketch: Sketch,
    ) -> None:
        """Refuse values that honest noise cannot explain; `tensors` have the specs of this statistic.

        Raises:
            TensorFileError: values out of bounds.
        """

    @abstractmethod
    def size_in_words(self) -> str:
        """Describe how much the statistic says, for the operator who writes the recipe."""

    @abstractmethod
    def noise_in_words(self) -> str:
        """Describe how much noise it holds, for the person who approves a submission."""


def checked_cells(
    cell_N: Tensor,
    num_cells: int,
    num_records: int,
    subject: str,
) -> NDArray[np.int64]:
    """Return each record's cell of a histogram.

    Raises:
        DataError: a record without a cell, or a cell that does not exist.
    """
    # This comes before the debit. Later, `bincount` would refuse a negative cell, or return a histogram with more cells
    # than the plan states, whose size would then tell something of the data.
    is_outside_N = (cell_N < 0) | (cell_N >= num_cells)
    num_outside = int(is_outside_N.sum())
    if len(cell_N) != num_records or num_outside:
        raise DataError(
            subject,
            expected=f"one of 0 to {num_cells - 1} for each of {num_records} images",
            got=f"{len(cell_N)} entries, {num_outside} of them outside",
        )
    return np.asarray(cell_N.numpy(), dtype=np.int64)
