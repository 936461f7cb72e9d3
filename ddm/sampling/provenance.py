"""Which experts each sample followed, and from which time on."""

# Shape legend: N samples, B batch, K experts, E entries of the table, Y bytes of a set of experts.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ddm.errors import MathError

MAX_BYTES = 1 << 24


class Followed(NamedTuple):
    """A part of a trajectory.

    Attributes:
        t: the time at which it began.
        experts: the experts that the sample followed, by number; several where it followed their mixture.
    """

    t: float
    experts: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Provenance:
    """A table with one entry whenever a sample changed the experts that it followed; the first samples fit in it.

    ``provenance[i]`` is the list of sample i, from noise to data. ``len(provenance)`` samples are in the table: all of
    them, unless it would take more than 16 MiB.
    """

    sample_E: np.ndarray
    t_E: np.ndarray
    experts_EY: np.ndarray
    num: int
    num_experts: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Followed, ...]:
        if not 0 <= i < self.num:
            expected = f"0 to {self.num - 1}, the samples whose experts were kept"
            raise MathError("sample's number", expected=expected, got=str(i))
        first, last = np.searchsorted(self.sample_E, [i, i + 1])
        times = self.t_E[first:last].tolist()
        packed_EY = self.experts_EY[first:last]
        follows_EK = np.unpackbits(packed_EY, axis=1, count=self.num_experts)
        parts = []
        for t, follows_K in zip(times, follows_EK, strict=True):
            experts = np.flatnonzero(follows_K)
            parts.append(Followed(t, tuple(experts.tolist())))
        return tuple(parts)

    def at(self, numbers: Sequence[int]) -> "Provenance | None":
        """Return the table of some samples, in this order; None where one of them is not in it."""
        if any(number >= self.num for number in numbers):
            return None
        first_E = np.searchsorted(self.sample_E, numbers)
        last_E = np.searchsorted(self.sample_E, np.asarray(numbers) + 1)
        spans = [np.arange(first, last) for first, last in zip(first_E, last_E, strict=True)]
        entries = np.concatenate([np.arange(0), *spans])
        sample_E = np.repeat(np.arange(len(numbers)), last_E - first_E)
        return Provenance(
            sample_E,
            self.t_E[entries],
            self.experts_EY[entries],
            len(numbers),
            self.num_experts,
        )

    def __repr__(self) -> str:
        num_changes = len(self.sample_E) - self.num
        return f"Provenance of {self.num} samples, {num_changes} changes of experts"


class _Changes(NamedTuple):
    """Samples that changed their experts at one time: their numbers, the time for each, and the experts in bits."""

    samples: np.ndarray
    times: np.ndarray
    experts: np.ndarray


@dataclass
class ProvenanceLog:
    """Collects the table while samples travel.

    Args:
        active_K: the experts with a weight above 0; a mixture of all means these.
        num: N; lowered to what fits into 16 MiB.
        max_changes: of one sample, in all.
    """

    active_K: Tensor
    num: int
    max_changes: int
    changes: list[_Changes] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_bytes_of_set = -(-len(self.active_K) // 8)
        entry_bytes = 8 + 8 + num_bytes_of_set
        # Bounded by the most changes that there may be, before the first is known: the first samples are then kept
        # whole.
        bytes_of_sample = entry_bytes * self.max_changes
        self.num = min(self.num, max(1, MAX_BYTES // bytes_of_sample))

    def note(
        self,
        first: int,
        t: float,
        allowed_BK: Tensor,
        changed_B: Tensor,
    ) -> None:
        """Note the experts that samples follow from time t on, for those that change them; `first` is their number."""
        num_kept = max(0, self.num - first)
        rows = changed_B[:num_kept].nonzero()[:, 0]
        if not len(rows):
            return
        active_K = self.active_K.to(allowed_BK.device)
        followed = (allowed_BK[rows] & active_K).cpu().numpy()
        samples = first + rows.cpu().numpy()
        times = np.full(len(samples), t)
        experts = np.packbits(followed, axis=1)
        self.changes.append(_Changes(samples, times, experts))

    def table(self) -> Provenance:
        """Return what was collected, sample by sample."""
        samples = np.concatenate([change.samples for change in self.changes])
        times = np.concatenate([change.times for change in self.changes])
        experts = np.concatenate([change.experts for change in self.changes])
        order = np.argsort(samples, kind="stable")
        return Provenance(
            samples[order],
            times[order],
            experts[order],
            self.num,
            len(self.active_K),
        )
