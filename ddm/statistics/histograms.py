"""What both histograms share: discrete Laplace noise, and the bounds that an honest histogram keeps."""

# Shape legend: N records, U units, G cells.
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddm.errors import TensorFileError
from ddm.privacy.accounting import DiscreteLaplaceMechanism
from ddm.privacy.bounds import cell_noise_bound, total_noise_bound
from ddm.privacy.noise import Noise, discrete_laplace
from ddm.protocol.plan import Plan
from ddm.routers.sketch import Sketch
from ddm.statistics.base import Statistic, Tensors


@dataclass(frozen=True)
class Histogram(Statistic):
    """A histogram of units over public cells, with discrete Laplace noise on every cell."""

    @property
    def num_groups(self) -> int:
        """The number of public groups, G."""
        return self.statistics.counts.num_groups

    @property
    def epsilon(self) -> float:
        """The plan's epsilon of this histogram."""
        return self.statistics.terms[self.kind].epsilon

    def mechanism(self) -> DiscreteLaplaceMechanism:
        """See `Statistic.mechanism`."""
        return DiscreteLaplaceMechanism(epsilon=self.epsilon)

    def check_public(self, plan: Plan, sketch: Sketch) -> None:
        """See `Statistic.check_public`; a histogram depends on no file of the plan."""

    def noise_in_words(self) -> str:
        """See `Statistic.noise_in_words`."""
        std = discrete_laplace_std(self.epsilon)
        return (
            f"each count of {self.statistics.unit}s: discrete Laplace, standard deviation {std:.3g}"
        )

    def noised_histogram(
        self,
        cell_U: NDArray[np.int64],
        num_cells: int,
        noise: Noise,
    ) -> NDArray[np.int64]:
        """Count the chosen records by cell, and add the noise."""
        true_G = np.bincount(cell_U, minlength=num_cells)
        noise_G = discrete_laplace(num_cells, self.epsilon, noise)
        return true_G + noise_G

    def check_received(
        self,
        tensors: Tensors,
        num_units: int,
        plan: Plan,
        sketch: Sketch,
    ) -> None:
        """Check each count against [0, n_k] and their sum against n_k, within their noise.

        Raises:
            TensorFileError: counts that honest noise cannot explain.
        """
        # Python's integers, since sums of hostile 64-bit counts overflow.
        counts = [int(count) for count in tensors["counts"].flatten().tolist()]
        # A silo could otherwise claim any share of a group, and with it the odds of all samples that resemble this
        # group.
        cell_reach = cell_noise_bound(self.epsilon, len(counts))
        lowest = min(counts)
        highest = max(counts)
        if lowest < -cell_reach or highest > num_units + cell_reach:
            raise TensorFileError(
                self.file_name,
                expected=f"counts within [{-cell_reach}, {num_units + cell_reach}]",
                got=f"counts from {lowest} to {highest}",
            )
        # Counts that are each within reach could still add up to a multiple of the units.
        total_reach = total_noise_bound(self.epsilon, len(counts))
        total = sum(counts)
        if abs(total - num_units) > total_reach:
            raise TensorFileError(
                self.file_name,
                expected=f"counts with a sum within {total_reach} of the {num_units} units",
                got=f"a sum of {total}",
            )


def discrete_laplace_std(epsilon: float) -> float:
    """Return the standard deviation of integer noise with ``P(z) ~ exp(-epsilon |z| / 2)``."""
    # The variance of a two-sided geometric distribution is 2 q / (1 - q)^2.
    ratio = math.exp(-epsilon / 2)
    return math.sqrt(2 * ratio) / (1 - ratio)
