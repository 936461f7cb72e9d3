"""Which expert a sample follows at every solver step: the strategies, and which of them keep the silos' shares."""

# Shape legend: K experts, B batch.
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from torch import Tensor

from ddm.errors import MathError

Prefix = Literal["sample", "full"]


class Follow(Enum):
    """What a sample follows during one solver step."""

    MEAN = auto()  # the mixture of all experts
    DRAW = auto()  # one expert, drawn from the posterior at the step's start
    KEEP = auto()  # the expert of the step before
    ARGMAX = auto()  # the most probable expert


@dataclass(frozen=True)
class Full:
    """Follow the exact mixture: K evaluations for every one of `Sample`."""

    needs_router = True

    def follow(self, t: float, t_before: float) -> Follow:
        """Say what the step that starts at `t` follows; the step before it started at `t_before`."""
        return Follow.MEAN


@dataclass(frozen=True)
class Sample:
    """Draw an expert at every step and follow it: exact in law, one evaluation at a time."""

    needs_router = True

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.DRAW


@dataclass(frozen=True)
class Lock:
    """Draw a last time at the first step from `t_lock` on, and keep that expert: exact in law.

    Args:
        t_lock: in [0, 1]; at 1 the expert is drawn from the prior and no router is asked.
        prefix: before the lock, `sample` an expert at every step, or follow the `full` mixture.
    """

    t_lock: float = 1.0
    prefix: Prefix = "sample"

    def __post_init__(self) -> None:
        if not 0 <= self.t_lock <= 1 or self.prefix not in ("sample", "full"):
            got = f"{self.t_lock} and {self.prefix!r}"
            raise MathError("lock", expected="a time in [0, 1] and the prefix sample or full", got=got)

    @property
    def needs_router(self) -> bool:
        """Only before t = 1 is the posterior anything but the prior."""
        return self.t_lock < 1

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        if t > self.t_lock + 1e-9:
            return Follow.MEAN if self.prefix == "full" else Follow.DRAW
        return Follow.DRAW if t_before > self.t_lock + 1e-9 else Follow.KEEP


@dataclass(frozen=True)
class TopOne:
    """Follow the most probable expert at every step: biased towards large silos, here as the control."""

    needs_router = True

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.ARGMAX


Strategy = Full | Sample | Lock | TopOne


def strategy_named(name: str, *, tau: float = 1.0, prefix: Prefix = "sample") -> Strategy:
    """Return the strategy that the command line calls `name`; `tau` is the lock's time.

    Raises:
        MathError: there is no such strategy, or `tau` is not in [0, 1].
    """
    match name:
        case "full":
            return Full()
        case "sample":
            return Sample()
        case "lock":
            return Lock(tau, prefix)
        case "top-1":
            return TopOne()
        case _:
            raise MathError("strategy", expected="full, sample, lock or top-1", got=repr(name))


def draw_expert(w_BK: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw an expert per sample by inverting the cumulative posterior; weight 0 is never drawn.

    Args:
        w_BK: posterior, rows with a positive sum.
        uniform_B: in [0, 1).

    Returns:
        Shape (B,), int64.
    """
    cumulative_BK = w_BK.double().cumsum(dim=-1)
    # Dividing makes the last positive entry, and all after it, exactly 1, which no uniform number reaches.
    cumulative_BK = cumulative_BK / cumulative_BK[:, -1:]
    return (cumulative_BK <= uniform_B.double()[:, None]).sum(dim=-1)
