"""What both histograms share: discrete Laplace noise, and the bounds that an honest histogram keeps."""

# Shape legend: N records, U units, G cells.
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddm.errors import TensorFileError
from ddm.privacy.accounting import DiscreteLaplaceMechanism
from ddm.privacy.bounds import cell_noise_bound, total_noise_bound
from ddm.privacy.noise import Noise, discrete_laplace
from ddm.protocol.plan import Plan
from ddm.routers.sketch import Sketch
from ddm.statistics.base import Statistic


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
        return true_G + discrete_laplace(num_cells, self.epsilon, noise)

    def check_received(
        self,
        tensors: Mapping[str, Tensor],
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
        reach = cell_noise_bound(self.epsilon, len(counts))
        if min(counts) < -reach or max(counts) > num_units + reach:
            expected = f"counts within [{-reach}, {num_units + reach}]"
            got = f"counts from {min(counts)} to {max(counts)}"
            raise TensorFileError(self.file_name, expected=expected, got=got)
        reach = total_noise_bound(self.epsilon, len(counts))
        if abs(sum(counts) - num_units) > reach:
            expected = f"counts with a sum within {reach} of the {num_units} units"
            raise TensorFileError(self.file_name, expected=expected, got=f"a sum of {sum(counts)}")


def discrete_laplace_std(epsilon: float) -> float:
    """Return the standard deviation of integer noise with ``P(z) ~ exp(-epsilon |z| / 2)``."""
    a = math.exp(-epsilon / 2)
    return math.sqrt(2 * a) / (1 - a)
