"""The counts: a noised histogram over public groups, which every plan requires."""

# Shape legend: U units, G public groups.
from dataclasses import dataclass

import torch

from ddm.io.tensors import TensorSpec
from ddm.privacy.noise import Noise
from ddm.statistics.base import Draw, Records, StatisticSource, Tensors, checked_cells
from ddm.statistics.histograms import Histogram


@dataclass(frozen=True)
class Counts(Histogram):
    """The histogram over public groups; it also decides which experts a silo has in each cluster."""

    kind = "counts"
    name = "counts"
    description = "histogram over public groups"

    def tensor_specs(self, num_units: int) -> dict[str, TensorSpec]:
        """See `Statistic.tensor_specs`."""
        return {"counts": TensorSpec("I64", (self.num_groups,))}

    def prepare(self, source: StatisticSource) -> Draw:
        """See `Statistic.prepare`."""
        num_records = len(source.images)
        group_N = checked_cells(source.group_N, self.num_groups, num_records, "groups")

        def draw(record_U: Records, noise: Noise) -> Tensors:
            noised_G = self.noised_histogram(group_N[record_U], self.num_groups, noise)
            return {"counts": torch.from_numpy(noised_G)}

        return draw

    def size_in_words(self) -> str:
        """See `Statistic.size_in_words`."""
        return f"{self.num_groups} public groups"


STATISTIC = Counts
