"""The class counts: a noised histogram over classes and public groups, from which readers know who holds a class."""

# Shape legend: N records, U units, C classes, G public groups.
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import DataError
from ddm.io.tensors import TensorSpec
from ddm.privacy.noise import Noise
from ddm.statistics.base import Draw, StatisticSource, checked_cells
from ddm.statistics.histograms import Histogram


@dataclass(frozen=True)
class ClassCounts(Histogram):
    """The histogram over classes and public groups; published, unlike the others."""

    kind = "class_counts"
    name = "class counts"
    description = "histogram over classes and groups"

    @property
    def num_classes(self) -> int:
        """C; 0 where the plan has no class counts."""
        terms = self.statistics.class_counts
        return 0 if terms is None else terms.num_classes

    def tensor_specs(self, num_units: int) -> dict[str, TensorSpec]:
        """See `Statistic.tensor_specs`."""
        return {"counts": TensorSpec("I64", (self.num_classes, self.num_groups))}

    def prepare(self, source: StatisticSource) -> Draw:
        """See `Statistic.prepare`."""
        if source.label_N is None:
            raise DataError("classes", expected="one for each image", got="images without classes")
        num_records = len(source.images)
        group_N = checked_cells(source.group_N, self.num_groups, num_records, "groups")
        class_N = checked_cells(source.label_N, self.num_classes, num_records, "classes")
        # One histogram over pairs, as a unit is in one pair: classes and groups apart would cost epsilon twice.
        cell_N = class_N * self.num_groups + group_N

        def draw(record_U: NDArray[np.int64], noise: Noise) -> Mapping[str, Tensor]:
            num_cells = self.num_classes * self.num_groups
            noised = self.noised_histogram(cell_N[record_U], num_cells, noise)
            return {"counts": torch.from_numpy(noised.reshape(self.num_classes, self.num_groups))}

        return draw

    def size_in_words(self) -> str:
        """See `Statistic.size_in_words`."""
        return f"{self.num_classes} classes"


STATISTIC = ClassCounts
