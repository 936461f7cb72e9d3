"""The class counts: a noised histogram over classes and public groups, from which readers know who holds a class."""

# Shape legend: N records, U units, C classes, G public groups.
from dataclasses import dataclass

import torch

from ddm.errors import DataError
from ddm.io.tensors import TensorSpec
from ddm.privacy.noise import Noise
from ddm.statistics.base import Draw, Records, StatisticSource, Tensors, checked_cells
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
        if terms is None:
            return 0
        return terms.num_classes

    def tensor_specs(self, num_units: int) -> dict[str, TensorSpec]:
        """See `Statistic.tensor_specs`."""
        shape = (self.num_classes, self.num_groups)
        return {"counts": TensorSpec("I64", shape)}

    def prepare(self, source: StatisticSource) -> Draw:
        """See `Statistic.prepare`."""
        if source.label_N is None:
            raise DataError("classes", expected="one for each image", got="images without classes")
        num_records = len(source.images)
        group_N = checked_cells(source.group_N, self.num_groups, num_records, "groups")
        class_N = checked_cells(source.label_N, self.num_classes, num_records, "classes")
        # One histogram over pairs, as a unit is in one pair: classes and groups apart would cost epsilon twice.
        cell_N = class_N * self.num_groups + group_N

        def draw(record_U: Records, noise: Noise) -> Tensors:
            num_cells = self.num_classes * self.num_groups
            noised = self.noised_histogram(cell_N[record_U], num_cells, noise)
            noised_CG = noised.reshape(self.num_classes, self.num_groups)
            return {"counts": torch.from_numpy(noised_CG)}

        return draw

    def size_in_words(self) -> str:
        """See `Statistic.size_in_words`."""
        return f"{self.num_classes} classes"


STATISTIC = ClassCounts
