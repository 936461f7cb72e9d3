"""Strategies: which experts a sample follows at each solver step, and which strategies preserve the silos' shares."""

# Shape legend: K experts, B batch.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from ddm.errors import MathError

Prefix = Literal["sample", "full"]


class Follow(Enum):
    """The velocity that a sample follows during one solver step."""

    MEAN = auto()  # the mixture of all experts
    DRAW = auto()  # one expert, drawn from the posterior at the step's start
    LOCK = auto()  # one expert, drawn so for the last time
    KEEP = auto()  # the same as during the step before
    SELECT = auto()  # the mixture of the experts that the posterior at the step's start selects


@dataclass(frozen=True)
class Full:
    """Follow the exact mixture: K times the evaluations of `Sample`."""

    needs_router = True

    def follow(self, t: float, t_before: float) -> Follow:
        """Return what the step that starts at `t` follows; the step before it started at `t_before`."""
        return Follow.MEAN


@dataclass(frozen=True)
class Sample:
    """Draw an expert from the posterior at every step and follow it: exact in law, one evaluation per velocity."""

    needs_router = True

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.DRAW


@dataclass(frozen=True)
class Lock:
    """Draw an expert for the last time at the first step with t <= `t_lock`, and keep it to the end: exact in law.

    Args:
        t_lock: in [0, 1]; at 1 the expert is drawn from the prior and no router is needed.
        prefix: before t_lock, `sample` an expert at every step, or follow the `full` mixture.
    """

    t_lock: float = 1.0
    prefix: Prefix = "sample"

    def __post_init__(self) -> None:
        if not 0 <= self.t_lock <= 1 or self.prefix not in ("sample", "full"):
            got = f"t_lock={self.t_lock} and prefix={self.prefix!r}"
            raise MathError(
                "lock", expected="t_lock in [0, 1] and the prefix sample or full", got=got
            )

    @property
    def needs_router(self) -> bool:
        """Whether it draws experts below t = 1; at t = 1 the posterior is the prior."""
        return self.t_lock < 1

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        if t > self.t_lock + 1e-9:
            return Follow.MEAN if self.prefix == "full" else Follow.DRAW
        return Follow.LOCK if t_before > self.t_lock + 1e-9 else Follow.KEEP


@dataclass(frozen=True)
class TopK:
    """Follow the mixture of the k most probable experts, weights renormalised: biased towards large silos."""

    k: int = 2
    needs_router = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise MathError("top-k", expected="at least 1 expert", got=str(self.k))

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.SELECT

    def select(self, w_BK: Tensor) -> Tensor:
        """Return which experts are mixed, at least one per sample, bool (B, K)."""
        chosen_BK = torch.zeros_like(w_BK, dtype=torch.bool)
        chosen_BK.scatter_(1, _descending(w_BK)[:, : self.k], True)
        return chosen_BK & (w_BK > 0)


@dataclass(frozen=True)
class TopOne(TopK):
    """Follow the most probable expert at every step: the most biased strategy, kept as a control."""

    k: int = 1


@dataclass(frozen=True)
class Nucleus:
    """Follow the mixture of the fewest experts whose probabilities add up to `mass`: biased as `TopK` is."""

    mass: float = 0.9
    needs_router = True

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise MathError(
                "nucleus", expected="a probability above 0, at most 1", got=str(self.mass)
            )

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.SELECT

    def select(self, w_BK: Tensor) -> Tensor:
        """See `TopK.select`."""
        order_BK = _descending(w_BK)
        sorted_BK = w_BK.double().gather(1, order_BK)
        # the experts before it do not reach the mass
        needed_BK = sorted_BK.cumsum(1) - sorted_BK < self.mass
        return torch.zeros_like(needed_BK).scatter(1, order_BK, needed_BK) & (w_BK > 0)


@dataclass(frozen=True)
class Threshold:
    """Follow the mixture of all experts of probability >= `least`, or else the most probable: biased as `TopK` is."""

    least: float = 0.1
    needs_router = True

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise MathError("threshold", expected="a probability in [0, 1]", got=str(self.least))

    def follow(self, t: float, t_before: float) -> Follow:
        """See `Full.follow`."""
        return Follow.SELECT

    def select(self, w_BK: Tensor) -> Tensor:
        """See `TopK.select`."""
        return ((w_BK >= self.least) | TopK(1).select(w_BK)) & (w_BK > 0)


Selecting = TopK | Nucleus | Threshold
Strategy = Full | Sample | Lock | Selecting

# The settings that each strategy takes.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "sample": (),
    "lock": ("tau", "prefix"),
    "top-1": (),
    "top-k": ("k",),
    "nucleus": ("mass",),
    "threshold": ("least",),
}


def strategy_named(
    name: str,
    *,
    tau: float | None = None,
    prefix: Prefix | None = None,
    k: int | None = None,
    mass: float | None = None,
    least: float | None = None,
) -> Strategy:
    """Return the strategy that the command line calls `name`; `tau` is the lock's time.

    Raises:
        MathError: there is no such strategy, a setting is out of range, or the strategy does not take it.
    """
    settings = {"tau": tau, "prefix": prefix, "k": k, "mass": mass, "least": least}
    chosen: dict[str, Any] = {
        setting: value for setting, value in settings.items() if value is not None
    }
    if name not in SETTINGS:
        raise MathError("strategy", expected=", ".join(SETTINGS), got=repr(name))
    for setting, value in chosen.items():
        if setting not in SETTINGS[name]:
            takes = " and ".join(SETTINGS[name])
            expected = f"no other settings than {takes}" if takes else "no settings"
            raise MathError(f"strategy {name}", expected=expected, got=f"{setting}={value!r}")
    match name:
        case "full":
            return Full()
        case "sample":
            return Sample()
        case "lock":
            return Lock(chosen.get("tau", 1.0), chosen.get("prefix", "sample"))
        case "top-1":
            return TopOne()
        case "top-k":
            return TopK(**chosen)
        case "nucleus":
            return Nucleus(**chosen)
        case _:
            return Threshold(**chosen)


def chosen_strategy(strategy: str | Strategy, tau: float | None) -> Strategy:
    """Return a strategy that is given itself or by its name; `tau` is the lock's time.

    Raises:
        MathError: see `strategy_named`, or `tau` beside a strategy that has its time.
    """
    if isinstance(strategy, str):
        return strategy_named(strategy, tau=tau)
    if tau is not None:
        remedy = (
            "Leave tau out and give the time to the strategy itself: strategy=Lock(t_lock=...)."
        )
        raise MathError(
            "tau", expected='tau with strategy="lock"', got=f"strategy={strategy}", remedy=remedy
        )
    return strategy


@dataclass(frozen=True)
class Segment:
    """Consecutive solver steps during which every sample follows the same experts.

    Args:
        first: the number of its first step.
        follow: what the samples follow, decided at its first step; KEEP only in the first segment of a part of a
            trajectory, where it keeps what the part before followed.
        times: where its steps begin, and where the last one ends.
    """

    first: int
    follow: Follow
    times: tuple[float, ...]


def segments(
    strategy: Strategy, times: Sequence[float], router_every: int = 1, t_before: float = inf
) -> list[Segment]:
    """Cut the time grid into segments, at the steps where samples may change experts.

    Args:
        strategy: decides what each step follows.
        times: S + 1 times, descending.
        router_every: the router is evaluated at every n-th step only, and its weights are kept in between; the step at
            which an expert is locked always asks it.
        t_before: where the step before the first one started; infinite where there was none.

    Raises:
        MathError: `router_every` below 1.
    """
    if router_every < 1:
        raise MathError("router_every", expected="at least 1 step", got=str(router_every))
    found: list[Segment] = []
    befores = [t_before, *times]
    for n, (t, t_next) in enumerate(pairwise(times)):
        follow = strategy.follow(t, befores[n])
        if found and (
            follow is Follow.KEEP or (n % router_every > 0 and follow is found[-1].follow)
        ):
            found[-1] = replace(found[-1], times=(*found[-1].times, t_next))
        else:
            found.append(Segment(n, follow, (t, t_next)))
    return found


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


def _descending(w_BK: Tensor) -> Tensor:
    """Return the experts of each sample by descending probability; ties keep the experts' order."""
    return w_BK.argsort(dim=1, descending=True, stable=True)
