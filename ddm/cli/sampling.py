"""Draws the samples of one command, in this process or in several that each draw some of them.

Sample i has a random stream of its own, so that which process draws it changes no more than rounding. Processes do not
communicate with each other: each opens the files that this process verified, checks the same digests, and sends its
samples through its pipe. Where an expert is drawn once for each sample, at t = 1, samples are ordered by their experts,
so that each process loads its share of the experts and evaluates them in full batches.
"""

# Shape legend: K experts, N samples.

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddm.cli.editing_options import FROM_NOISE, EditingOptions
from ddm.distillation.student import Student, build_student
from ddm.ensemble import Ensemble
from ddm.loading.ensemble import build_ensemble
from ddm.models.arithmetic import Arithmetic
from ddm.protocol.data import DataSpec
from ddm.protocol.manifest import Manifest
from ddm.protocol.plan import Plan
from ddm.sampling.guidance import per_sample
from ddm.sampling.strategies import Strategy, draw_expert
from ddm.sampling.trajectories import EDIT_PURPOSE, draw_noise
from ddm.system.devices import DeviceName, device_named
from ddm.system.parallel import PartDescription, run_parts
from ddm.system.progress import ProgressCallback

"""Called with the steps taken and the steps to take, of all samples."""

SAMPLING = PartDescription(
    "sampling process", "nothing was written", "a lower --processes, --set batch or --num"
)
# Reports cost a message each, and a person reads the progress bar at most a few times a second.
_REPORT_S = 0.2  # between two progress reports of a process
_PIECE_BYTES = 1 << 26  # of images that are sent at once


@dataclass(frozen=True)
class DrawnSamples:
    """Samples in the order of their numbers.

    Args:
        images: float32, shape (N, C, H, W) or (N, C, D, H, W).
        expert_N: the last expert that each followed.
    """

    images: Tensor
    expert_N: Tensor


class SampleSource(Protocol):
    """What samples are drawn from; it can be sent to another process, unlike networks on a GPU."""

    @property
    def data(self) -> DataSpec:
        """Shape and range of a sample."""
        ...

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The shape of what experts see of it."""
        ...

    def ensemble(self, rank: int = 0, *, lazily: bool = False) -> Ensemble:
        """Build the ensemble; lazily, experts are loaded on first use even where all of them fit."""
        ...


@dataclass(frozen=True)
class ComputeSettings:
    """How experts compute.

    Args:
        device: where; with several GPUs each process has its own.
        arithmetic: the arithmetic in which it computes.
        batch: most samples that an expert is given at once.
    """

    device: DeviceName
    arithmetic: Arithmetic
    batch: int

    def device_of_process(self, rank: int) -> torch.device:
        """Return the device of one process, and set what torch keeps for the whole process."""
        self.arithmetic.configure_torch()
        device = device_named(self.device, setting="--device")
        if device.type != "cuda":
            return device
        # Processes take the GPUs in turn.
        return torch.device("cuda", rank % torch.cuda.device_count())


@dataclass(frozen=True)
class ReleaseSource:
    """A verified release.

    Args:
        plan: the plan of the release.
        manifest: the manifest of the release.
        folder: the folder of the release.
        expert_bytes: the maximum of experts in memory at once, in each process; None for all of them.
        computing: how its experts compute.
    """

    plan: Plan
    manifest: Manifest
    folder: Path
    expert_bytes: int | None
    computing: ComputeSettings

    @property
    def data(self) -> DataSpec:
        """Shape and range of a sample."""
        return self.plan.data

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The shape of what experts see of it."""
        return self.plan.expert_shape

    def ensemble(self, rank: int = 0, *, lazily: bool = False) -> Ensemble:
        """Build the ensemble; lazily, experts are loaded on first use even where all of them fit."""
        memory_bytes = self.expert_bytes
        if lazily and memory_bytes is None:
            # A limit that all of them fit in, so that each is loaded when it is first needed.
            memory_bytes = sum(expert.file.bytes for expert in self.manifest.experts)
        ensemble = build_ensemble(
            self.plan,
            self.manifest,
            self.folder,
            memory_bytes=memory_bytes,
            device=self.computing.device_of_process(rank),
            arithmetic=self.computing.arithmetic,
        )
        return replace(ensemble, chunk_size=self.computing.batch)


@dataclass(frozen=True)
class StudentSource:
    """A student, by its record.

    Args:
        record: as it was read, before anything that it names.
        weights: the file of its weights.
        computing: how it computes.
    """

    record: Student
    weights: Path
    computing: ComputeSettings

    @property
    def data(self) -> DataSpec:
        """Shape and range of a sample."""
        return self.record.data

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The shape of what the student sees of it."""
        return self.record.latent.shape(self.record.data.shape)

    def ensemble(self, rank: int = 0, *, lazily: bool = False) -> Ensemble:
        """Load the student as an ensemble of one."""
        ensemble = build_student(
            self.record,
            self.weights,
            device=self.computing.device_of_process(rank),
            arithmetic=self.computing.arithmetic,
        )
        return replace(ensemble, chunk_size=self.computing.batch)


@dataclass(frozen=True)
class SamplingJob:
    """What one command draws.

    Args:
        source: what samples are drawn from.
        strategy: which experts samples follow.
        seed: the seed of all samples.
        how: further arguments of `Ensemble.sample`, `steps` and `condition` among them.
        editing: what becomes of images that samples begin with.
        begin: those images, one for each sample, and where they are known; None for samples from noise.
        order: the rows of the samples in the order in which several processes take equal shares of them.
        first_number: number of the sample in row 0; a sample's random stream follows from its number and the seed.
    """

    source: SampleSource
    strategy: Strategy
    seed: int
    how: Mapping[str, Any]
    editing: EditingOptions = FROM_NOISE
    begin: tuple[Any, Any] | None = None
    order: tuple[int, ...] = ()
    first_number: int = 0

    @property
    def num_moves(self) -> int:
        """How often each sample moves."""
        return self.editing.num_moves(self.how["steps"])

    def draw(
        self, ensemble: Ensemble, rows: Sequence[int], advance: ProgressCallback
    ) -> DrawnSamples:
        """Draw the samples of these rows, in this process."""
        rows = list(rows)
        how = {name: _as_tensor(value) for name, value in self.how.items()}
        how["strategy"] = self.strategy
        how["seed"] = self.seed
        how["numbers"] = self.numbers_of(rows)
        how["on_progress"] = advance
        # One condition for all samples stays as it is; one for each is reduced to this process's samples.
        condition_N = per_sample(ensemble.condition, how["condition"])
        if condition_N is not None:
            how["condition"] = condition_N[rows]
        begin = None
        if self.begin is not None:
            images, known = self.begin
            begin = _as_tensor(images)[rows], _as_tensor(known)
        samples = self.editing.draw(ensemble, len(rows), begin, how)
        return DrawnSamples(samples.images, samples.expert_N)

    def numbers_of(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the samples in these rows."""
        return [self.first_number + row for row in rows]

    def __call__(self, rank: int, num: int, report: Callable[[Any], None]) -> None:
        """Draw this process's samples, as one of several."""
        # Neighbours in the order have the same expert, so that each process gets a run of them and loads few experts.
        rows = torch.as_tensor(self.order).tensor_split(num)[rank].tolist()
        if not rows:
            return
        last_report = 0.0

        def report_progress(num_done: int, num_steps: int) -> None:
            nonlocal last_report
            if num_done == num_steps or time.monotonic() - last_report > _REPORT_S:
                last_report = time.monotonic()
                report((rank, num_done))

        drawn = self.draw(self.source.ensemble(rank, lazily=True), rows, report_progress)
        # Sent in pieces, since the receiver unpacks a message as a whole beside the array that it fills.
        piece_images = max(1, _PIECE_BYTES // (4 * drawn.images[0].numel()))
        for first in range(0, len(rows), piece_images):
            piece = slice(first, first + piece_images)
            report((rows[piece], drawn.images[piece].numpy(), drawn.expert_N[piece].numpy()))


def draw(
    job: SamplingJob,
    num: int,
    num_processes: int,
    weight_K: Tensor,
    advance: ProgressCallback,
    ensemble: Ensemble | None = None,
) -> DrawnSamples:
    """Draw rows 0 to num - 1, here, from the ensemble if it is built already, or as `draw_together` does."""
    if num_processes == 1:
        return job.draw(ensemble or job.source.ensemble(), range(num), advance)
    return draw_together(job, num, num_processes, weight_K, advance)


def draw_together(
    job: SamplingJob, num: int, num_processes: int, weight_K: Tensor, advance: ProgressCallback
) -> DrawnSamples:
    """Draw rows 0 to num - 1 in several processes; the threads of this one are divided among them.

    Args:
        job: what to draw.
        num: how many samples.
        num_processes: how many processes.
        weight_K: each expert's share at t = 1, under the condition, shape (K,) or, for each sample, (N, K).
        advance: shows the progress of all.

    Raises:
        SetupError: a process died.
        ArchipelagoError: what a process raised.
    """
    # Filled as pieces arrive, in the order of the rows, whichever process drew them.
    images = np.empty((num, *job.source.data.shape), np.float32)
    expert_N = np.empty(num, np.int64)
    num_done_by_rank = [0] * num_processes

    def receive(
        message: tuple[int, int] | tuple[list[int], NDArray[np.float32], NDArray[np.int64]],
    ) -> None:
        # Progress has two parts; three parts are a piece of the samples.
        if len(message) == 2:
            rank, num_done = message
            num_done_by_rank[rank] = num_done
            advance(sum(num_done_by_rank), num * job.num_moves)
            return
        rows, piece_images, piece_expert_N = message
        images[rows] = piece_images
        expert_N[rows] = piece_expert_N

    # As arrays, here and back, since torch would put tensors into shared memory, which many containers have little of.
    how = {name: _as_array(value) for name, value in job.how.items()}
    begin = None
    if job.begin is not None:
        begin = _as_array(job.begin[0]), _as_array(job.begin[1])
    order = tuple(sample_order(job, num, weight_K).tolist())
    run_parts(
        replace(job, how=how, begin=begin, order=order),
        num_processes,
        threads=max(1, torch.get_num_threads() // num_processes),
        on_report=receive,
        description=SAMPLING,
    )
    return DrawnSamples(torch.from_numpy(images), torch.from_numpy(expert_N))


def sample_order(job: SamplingJob, num: int, weight_K: Tensor) -> Tensor:
    """Return the rows of all samples in the order in which processes take equal shares of them.

    Under lock at t = 1 that is the order of their experts, which are drawn here as they will be there.
    """
    if not job.strategy.keeps_first_expert:
        return torch.arange(num)
    return _first_experts(job, num, weight_K).argsort(stable=True)


def _first_experts(job: SamplingJob, num: int, weight_K: Tensor) -> Tensor:
    """Return the expert that each sample's first random number draws, shape (N,)."""
    shape = job.source.expert_shape
    purpose = "sample"
    if job.begin is not None:
        purpose = EDIT_PURPOSE
    uniforms = []
    for number in job.numbers_of(range(num)):
        # One number at a time: each sample has a random stream of its own.
        _, uniform_11 = draw_noise([number], shape, job.seed, 1, purpose=purpose)
        uniforms.append(uniform_11[:, 0])
    return draw_expert(weight_K.expand(num, -1), torch.cat(uniforms))


def needed_experts(job: SamplingJob, num: int, weight_K: Tensor) -> list[int]:
    """Return the numbers of the experts that may be evaluated for these samples; no other file is opened.

    Under lock at t = 1 these are the drawn ones, otherwise all with a prior above 0.
    """
    if job.strategy.keeps_first_expert and job.begin is None:
        return sorted(set(_first_experts(job, num, weight_K).tolist()))
    prior = job.how["prior"]
    return [number for number, weight in enumerate(prior) if weight > 0]


def expert_shares_of(drawn: DrawnSamples, ensemble: Ensemble) -> tuple[float, ...]:
    """Return the share of the samples that each expert accounts for."""
    # Counted over all experts, so that one without a sample has the share 0.
    counts_K = torch.bincount(drawn.expert_N, minlength=len(ensemble.experts)).double()
    return tuple((counts_K / counts_K.sum()).tolist())


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
