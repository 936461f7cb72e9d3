"""Which experts each sample followed, and from which time on."""

# Shape legend: N samples, B batch, K experts, E entries of the table, Y bytes of a set of experts.
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
        sets = np.unpackbits(self.experts_EY[first:last], axis=1, count=self.num_experts).astype(
            bool
        )
        times = self.t_E[first:last].tolist()
        return tuple(
            Followed(t, tuple(np.flatnonzero(row).tolist()))
            for t, row in zip(times, sets, strict=True)
        )

    def __repr__(self) -> str:
        return (
            f"Provenance of {self.num} samples, {len(self.sample_E) - self.num} changes of experts"
        )


def joined(parts: list[Provenance]) -> Provenance:
    """Return the table of samples that were drawn in parts; it ends where a part's table does not hold all of it."""
    first, rows = 0, list[np.ndarray]()
    for part in parts:
        rows.append(part.sample_E + first)
        first += part.num
    t_E, experts_EY = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("t_E", "experts_EY")
    )
    return Provenance(np.concatenate(rows), t_E, experts_EY, first, parts[-1].num_experts)


@dataclass
class Log:
    """Collects the table while samples travel.

    Args:
        active_K: the experts with a weight above 0; a mixture of all means these.
        num: N.
        most_changes: of one sample, in all.
    """

    active_K: Tensor
    num: int
    most_changes: int
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        entry = 8 + 8 + -(-len(self.active_K) // 8)
        self.num = min(self.num, max(1, MAX_BYTES // (entry * self.most_changes)))

    def note(self, first: int, t: float, allowed_BK: Tensor, changed_B: Tensor) -> None:
        """Note the experts that samples follow from time t on, for those that change them; `first` is their number."""
        changed_B = changed_B[: max(0, self.num - first)]
        changed = changed_B.nonzero()[:, 0]
        if len(changed):
            sets = (allowed_BK[changed] & self.active_K.to(allowed_BK.device)).cpu().numpy()
            rows = first + changed.cpu().numpy()
            self.rows.append((rows, np.full(len(rows), t), np.packbits(sets, axis=1)))

    def table(self) -> Provenance:
        """Return what was collected, sample by sample."""
        samples, times, sets = (np.concatenate(part) for part in zip(*self.rows, strict=True))
        order = np.argsort(samples, kind="stable")
        return Provenance(samples[order], times[order], sets[order], self.num, len(self.active_K))
