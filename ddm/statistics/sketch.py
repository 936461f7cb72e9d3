"""The sketches: one noised projection of each unit, on which a learned router is refitted."""

# Shape legend: N records, U units, R sketch dimensions.
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.diffusion.path import Path, path_named
from ddm.errors import PolicyError, TensorFileError
from ddm.images.rows import Images, blocks, rows_of
from ddm.io.tensors import TensorSpec
from ddm.privacy.accounting import GRID, GaussianMechanism, gaussian_mu, t_release
from ddm.privacy.bounds import sketch_norm_bound
from ddm.privacy.noise import Noise, rounded_gaussian, shuffled
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import SketchStatistic
from ddm.routers.sketch import Sketch
from ddm.statistics.base import Draw, Records, Statistic, StatisticSource, Tensors

# Values at a time, so that a statistic needs little more memory than its images.
_BLOCK_VALUES = 2**20


@dataclass(frozen=True)
class Sketches(Statistic):
    """One noised sketch of each unit, in a random order.

    ``s_r = alpha_r s_0 + (sigma_r / C) n``, with s_0 and the noise rounded to the public grid.
    """

    kind = "sketch"
    name = "sketches"
    description = "noised low-dimensional sketches"

    @property
    def terms(self) -> SketchStatistic:
        """What the plan requires of the sketches."""
        terms = self.statistics.sketch
        if terms is None:
            raise PolicyError(
                "plan",
                expected="the statistic sketch",
                got="a plan without it",
                remedy=(
                    "Ask the aggregator for another plan: this one contradicts itself, and "
                    "policy.toml cannot change that."
                ),
            )
        return terms

    @property
    def mu(self) -> float:
        """The budget of the Gaussian mechanism."""
        return gaussian_mu(self.terms.epsilon, self.terms.delta)

    def mechanism(self) -> GaussianMechanism:
        """See `Statistic.mechanism`."""
        return GaussianMechanism(mu=self.mu)

    def tensor_specs(self, num_units: int) -> dict[str, TensorSpec]:
        """See `Statistic.tensor_specs`."""
        shape = (num_units, self.terms.rank)
        return {"sketch": TensorSpec("F32", shape)}

    def noise_level(self, path: Path, sketch: Sketch) -> "NoiseLevel":
        """Return the noise level at which the sketches are drawn.

        Raises:
            NumericalError: they would be pure noise.
        """
        t = t_release(self.mu, sketch.scale, path, self.terms.rank)
        time = torch.tensor(t, dtype=torch.float64)
        return NoiseLevel(
            t=t,
            alpha=float(path.alpha(time)),
            sigma=float(path.sigma(time)),
        )

    def prepare(self, source: StatisticSource) -> Draw:
        """See `Statistic.prepare`."""
        source.sketch.check()
        path = path_named(source.plan.objective.ensemble_path)
        level = self.noise_level(path, source.sketch)
        # In steps of the grid, of s_0: the noise of s_r is alpha_r times as large.
        std = level.sigma / (level.alpha * source.sketch.scale) / GRID
        grid_NR = _on_grid(source.sketch.head(self.terms.rank), source.images)

        def draw(record_U: Records, noise: Noise) -> Tensors:
            noised_UR = _noised(grid_NR, record_U, std, noise)
            # The order of the records would tell a silo's order of files, so that a row could be attributed.
            order_U = shuffled(len(noised_UR), noise)
            return {"sketch": _as_sketches(noised_UR, order_U, level.alpha)}

        return draw

    def check_public(self, plan: Plan, sketch: Sketch) -> None:
        """See `Statistic.check_public`."""
        path = path_named(plan.objective.ensemble_path)
        self.noise_level(path, sketch)

    def check_received(
        self,
        tensors: Tensors,
        num_units: int,
        plan: Plan,
        sketch: Sketch,
    ) -> None:
        """See `Statistic.check_received`."""
        path = path_named(plan.objective.ensemble_path)
        level = self.noise_level(path, sketch)
        sketch_UR = tensors["sketch"]
        num_rows, rank = sketch_UR.shape
        bound = sketch_norm_bound(level.alpha, level.sigma, sketch.scale, rank, num_rows)
        norm_U = sketch_UR.double().norm(dim=1)
        largest_norm = float(norm_U.max())
        if largest_norm > bound:
            raise TensorFileError(
                self.file_name,
                expected=f"rows with a norm of at most {bound:.4g}",
                got=f"a norm of {largest_norm:.4g}",
            )

    def size_in_words(self) -> str:
        """See `Statistic.size_in_words`."""
        return f"rank {self.terms.rank}"

    def noise_in_words(self) -> str:
        """See `Statistic.noise_in_words`."""
        # (sigma_r / C) / alpha_r, since mu is 2 C alpha_r / sigma_r.
        std = 2 / self.mu
        unit = self.statistics.unit
        return (
            f"each value of the sketch of one {unit}, of length "
            f"1 at most: Gaussian, standard deviation {std:.3g}"
        )


@dataclass(frozen=True)
class NoiseLevel:
    """The level at which sketches are drawn.

    Attributes:
        t: t_release.
        alpha: weight of the data there.
        sigma: weight of the noise there.
    """

    t: float
    alpha: float
    sigma: float


def sketch_noise_level(plan: Plan, sketch: Sketch) -> float | None:
    """Return the t_release that the plan's epsilon and delta imply for its sketches; None for a plan without them.

    Raises:
        NumericalError: the sketches would be pure noise.
    """
    if plan.statistics.sketch is None:
        return None
    path = path_named(plan.objective.ensemble_path)
    level = Sketches(plan.statistics).noise_level(path, sketch)
    return level.t


def _on_grid(sketch: Sketch, images: Images) -> NDArray[np.int32]:
    """Return every image's sketch in the unit ball, in whole steps of the public grid, of which 2^16 are a radius."""
    grid_NR = np.empty((len(images), sketch.rank), np.int32)
    num_rows = rows_of(8 * _BLOCK_VALUES, images.shape[1:], 8)
    for start, block in blocks(images, size=num_rows):
        sketch_BR = sketch.project(block).numpy()
        rows = slice(start, start + len(block))
        grid_NR[rows] = np.rint(sketch_BR / GRID)
    return grid_NR


def _noised(
    grid_NR: NDArray[np.int32],
    record_U: Records,
    std: float,
    noise: Noise,
) -> NDArray[np.int64]:
    """Return the records' sketches with noise, in steps of the grid, in the order of the records."""
    rank = grid_NR.shape[1]
    num_rows = max(1, _BLOCK_VALUES // rank)
    noised_UR = np.empty((len(record_U), rank), np.int64)
    for start in range(0, len(noised_UR), num_rows):
        rows = slice(start, start + num_rows)
        grid_BR = grid_NR[record_U[rows]]
        noise_BR = rounded_gaussian(grid_BR.shape, std, noise)
        noised_UR[rows] = grid_BR + noise_BR
    return noised_UR


def _as_sketches(
    noised_UR: NDArray[np.int64],
    order_U: NDArray[np.int64],
    alpha: float,
) -> Tensor:
    """Return noised rows in another order as sketches, float32."""
    num_units, rank = noised_UR.shape
    num_rows = max(1, _BLOCK_VALUES // rank)
    sketch_UR = torch.empty(num_units, rank)
    for start in range(0, num_units, num_rows):
        rows = slice(start, start + num_rows)
        shuffled_BR = noised_UR[order_U[rows]]
        # This rounding to float32 comes after the noise, so it is post-processing.
        sketch_BR = torch.from_numpy(shuffled_BR * (alpha * GRID))
        sketch_UR[rows] = sketch_BR.float()
    return sketch_UR


STATISTIC = Sketches
