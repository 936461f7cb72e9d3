"""The samples of an evaluation: drawn from a release with one strategy or several, or read from a file.

Samples from a file are in the plan's range, as the reference is, or they are refused: clipping values of another range
would measure something else. Only what sampling itself adds at the ends of the range is clipped, and stated.
"""

# Shape legend: N samples, E experts.

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.cli.conditions import condition_shares, shares_of_each
from ddm.cli.sampling import ComputeSettings, ReleaseSource, SamplingJob, draw
from ddm.ensemble import Ensemble
from ddm.errors import DataError
from ddm.footprint import sampling_bytes
from ddm.images.fit import check_row, fit
from ddm.images.npz import npz_names, read_array
from ddm.images.ranges import RangeCounter, ValueKind, range_of_type, range_remarks
from ddm.io.files import require_file
from ddm.loading.memory import expert_memory_bytes
from ddm.loading.release import Release
from ddm.protocol.data import DataSpec
from ddm.sampling.guidance import per_sample
from ddm.sampling.strategies import Strategy
from ddm.system.memory import MemoryLimit, available_bytes
from ddm.system.progress import ProgressCallback

# Solvers overshoot the ends of the range a little, at some pixels. Values further out, or more of them, have another
# range.
_MAX_OVERSHOOT = 0.25  # of the range's width, beyond either end
_MAX_CLIPPED_SHARE = 0.05  # of all values
_TOLERANCE = 1e-5  # rounding, as `ddm.images.fit.fit` forgives it


@dataclass(frozen=True)
class SampleSet:
    """One set of samples.

    Attributes:
        name: its strategy, or its file.
        images: float32, shape (N, ...), clipped to the data's range, as pictures are.
        expert_N: the expert of each; None where it is not known.
        notes: what to keep in mind when reading the figures of these samples.
    """

    name: str
    images: Tensor
    expert_N: Tensor | None = None
    notes: tuple[str, ...] = ()

    def silo_N(self, owners: Sequence[str], silos: Sequence[str]) -> Tensor | None:
        """Return the index of each sample's silo, by the owner of each expert."""
        if self.expert_N is None:
            return None
        silo_E = torch.tensor([silos.index(owner) for owner in owners])
        return silo_E[self.expert_N]


@dataclass(frozen=True)
class EvaluationDrawing:
    """How the samples of an evaluation are drawn.

    Attributes:
        opened: the release.
        computing: how its experts compute.
        num_processes: how many share the samples.
        seed: the seed of all samples.
        how: arguments of `Ensemble.sample`.
        declared_shares: each expert's share of the condition where somebody declared it.
    """

    opened: Release
    computing: ComputeSettings
    num_processes: int
    seed: int
    how: Mapping[str, Any]
    declared_shares: list[float] | None

    def draw(
        self,
        strategies: Mapping[str, Strategy],
        num: int,
        limit: MemoryLimit,
        beside: int,
        show_progress: Callable[[str], AbstractContextManager[ProgressCallback]],
    ) -> tuple[list[SampleSet], list[float]]:
        """Draw samples with every strategy, from the same noise.

        Args:
            strategies: by name.
            num: how many samples with each.
            limit: on all memory.
            beside: bytes of what is done with the samples.
            show_progress: shows the progress of one strategy, by a label.

        Returns:
            The samples, and the share of them that is due to each expert.
        """
        source = self._source(num, len(strategies), limit, beside)
        # Several processes load experts each for itself; this one then needs the shares alone.
        ensemble = source.ensemble(lazily=self.num_processes > 1 or self.opened.hosted is not None)
        if self.opened.hosted is not None:
            prior = self.how["prior"]
            with show_progress("fetching the experts") as advance:
                self.opened.fetch_experts(
                    [number for number, weight in enumerate(prior) if weight > 0], advance
                )
        condition = self.how["condition"]
        # The same noise and the same experts for every strategy, so that only the strategies differ.
        weight_K = shares_of_each(ensemble, condition, self.how["prior"], self.declared_shares)
        how = {**self.how, "condition_prior": self._common_shares(ensemble)}
        sample_sets = []
        for name, strategy in strategies.items():
            job = SamplingJob(source, strategy, self.seed, how)
            with show_progress(f"sampling {num} with {name}") as advance:
                drawn = draw(job, num, self.num_processes, weight_K, advance, ensemble)
            # Pictures are clipped to the range too, so that this is what people would see.
            images = drawn.images.clamp(*self.opened.plan.data.range)
            sample_sets.append(SampleSet(name, images, drawn.expert_N))
        return sample_sets, weight_K.expand(num, -1).mean(0).tolist()

    def _source(
        self, num: int, num_strategies: int, limit: MemoryLimit, beside: int
    ) -> ReleaseSource:
        """Return the release, with as much memory for experts as samples and figures leave in each process."""
        plan = self.opened.plan
        manifest = self.opened.manifest
        drawing_bytes = sampling_bytes(
            plan,
            len(manifest.experts),
            num=ceil(num / self.num_processes),
            batch=self.computing.batch,
            steps=self.how["steps"],
        )
        sample_bytes = 4 * num * prod(plan.data.shape) * num_strategies
        # Drawing and measuring come one after the other; the samples stay for both.
        needed = max(drawing_bytes, ceil(beside / self.num_processes))
        needed += ceil(sample_bytes / self.num_processes)
        expert_bytes = expert_memory_bytes(
            plan, manifest, limit.part(self.num_processes), beside=needed
        )
        return ReleaseSource(plan, manifest, self.opened.folder, expert_bytes, self.computing)

    def _common_shares(self, ensemble: Ensemble) -> list[float] | None:
        """Return the experts' shares under the condition that all samples have; None where each has its own class."""
        condition_N = per_sample(ensemble.condition, self.how["condition"])
        if condition_N is None:
            return condition_shares(ensemble, self.how["condition"], self.declared_shares)
        if condition_N.dim() == 3:
            # Texts: without declared shares, those of one text hold for all.
            return condition_shares(ensemble, condition_N[0], self.declared_shares)
        return self.declared_shares


def read_samples(spec: DataSpec, num_experts: int, path: Path, num: int | None) -> SampleSet:
    """Read samples that were drawn before, and the expert of each if the file has it.

    Args:
        spec: shape and range that they should have.
        num_experts: the number of experts of the release that they are compared under; 0 for samples of a student,
            which has no experts.
        path: an npz with `images`, and maybe `expert`, as `ddm sample` writes it.
        num: read only the first ones; None for all.

    Raises:
        MissingFileError: nothing at `path`.
        DataError: no such file, images of another shape, or values of another range.
    """
    require_file(path, "an npz that ddm sample wrote")
    # A compressed file may unpack to any size.
    array = read_array(path, "images", max_bytes=available_bytes())
    if array.ndim < 2 or not len(array):
        raise DataError(
            "samples",
            expected="at least one image",
            got=f"an array of shape {array.shape}",
            remedy="Give samples that `ddm sample RELEASE --root FILE --num N --out FILE.npz` drew.",
        )
    array = array[:num]
    check_row(array.dtype, array.shape[1:], spec)
    notes: list[str] = []
    if array.dtype.kind == "f":
        low, high = spec.range
        array, clipped_share = _clipped(array, spec.range)
        if clipped_share > 0:
            notes.append(
                f"{clipped_share:.2%} of the samples' values were beyond {low:g} to {high:g} and were clipped."
            )
    counter = RangeCounter()
    counter.add_images(array)
    value_range = range_of_type(array.dtype.name) or spec.range
    notes += range_remarks(
        counter.use(), value_range, ValueKind.SAMPLES, subject="The samples' values"
    )
    images = fit(array, range(len(array)), spec=spec)
    expert_N = None
    if num_experts:
        expert_N = _read_experts(path, len(images), num, num_experts)
    return SampleSet(path.name, images, expert_N, tuple(notes))


def _clipped(array: NDArray[Any], value_range: tuple[float, float]) -> tuple[NDArray[Any], float]:
    """Return samples clipped to the plan's range, and the share of their values that were beyond it.

    Raises:
        DataError: values of another range, by how far they are beyond the plan's, or by how many are.
    """
    low, high = value_range
    array = array.astype(np.float32, copy=False)
    # NaN and infinity are left for `fit`, which names their row.
    finite = array[np.isfinite(array)]
    is_beyond = (finite < low - _TOLERANCE) | (finite > high + _TOLERANCE)
    share = float(is_beyond.mean()) if finite.size else 0.0
    if share == 0.0:
        return array, share
    lowest = float(finite.min())
    highest = float(finite.max())
    overshoot = max(low - lowest, highest - high) / (high - low)
    if overshoot > _MAX_OVERSHOOT or share > _MAX_CLIPPED_SHARE:
        raise DataError(
            "samples",
            expected=f"values within [{low:g}, {high:g}], as the plan's images and the reference have",
            got=f"{lowest:g} to {highest:g}, with {share:.1%} of the values beyond that range",
            remedy=f"Scale them to {low:g} to {high:g}, or save whole numbers of 8 or 16 bits, which are scaled here.",
        )
    return np.where(np.isfinite(array), array.clip(low, high), array), share


def _read_experts(path: Path, num_images: int, num: int | None, num_experts: int) -> Tensor | None:
    """Read the expert that each sample followed; None if the file does not say it."""
    if "expert" not in npz_names(path):
        return None
    # 256 MiB are 33 million numbers of 8 bytes.
    expert_N = read_array(path, "expert", max_bytes=1 << 28)[:num]
    is_whole = expert_N.dtype.kind in "iu" and expert_N.shape == (num_images,)
    if not is_whole or not ((expert_N >= 0) & (expert_N < num_experts)).all():
        expected = f"{num_images} numbers below {num_experts}"
        raise DataError(
            "expert",
            expected=expected,
            got=f"{expert_N.dtype}, other numbers",
            remedy="Give samples of this release: `ddm sample RELEASE --root FILE --num N --out FILE.npz`.",
        )
    return torch.from_numpy(expert_N.astype(np.int64))
