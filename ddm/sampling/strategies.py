"""Strategies: which experts a sample follows at each solver step, and which strategies preserve the silos' shares.

A strategy is one class here. It is listed in `STRATEGIES`, from which the command line takes its names and settings.
This module imports no torch, so that the command line knows the names at once.
"""

# Shape legend: K experts, B batch.
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddm.errors import MathError

if TYPE_CHECKING:
    from torch import Tensor

Prefix = Literal["sample", "full"]

# Times of the grid are sums of floating point numbers; a step that starts at t_lock must count as such.
_SAME_TIME = 1e-9


class StepRule(Enum):
    """What a sample follows during one solver step."""

    MIXTURE = auto()  # the mixture of all experts
    DRAW = auto()  # one expert, drawn from the posterior at the step's start
    LOCK = auto()  # one expert, drawn so for the last time
    KEEP = auto()  # the same as during the step before
    SELECT = auto()  # the mixture of the experts that the strategy selects at the step's start


class Strategy(ABC):
    """Which experts samples follow.

    Attributes:
        name: on the command line.
        settings: the fields that a caller may set by name, by their name on the command line.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, str]] = {}

    @property
    def needs_router(self) -> bool:
        """Whether it needs a posterior below t = 1; at t = 1 the posterior is the prior."""
        return True

    @property
    def keeps_first_expert(self) -> bool:
        """Whether a sample from pure noise follows, to the end, the expert that its first number draws."""
        return False

    @abstractmethod
    def step_rule(self, t: float, t_before: float) -> StepRule:
        """Return what the step that starts at `t` follows; the step before it started at `t_before`."""

    def select(self, w_BK: "Tensor") -> "Tensor":
        """Return which experts are mixed where the rule is SELECT, at least one per sample, bool (B, K)."""
        return w_BK > 0


@dataclass(frozen=True)
class Full(Strategy):
    """Follow the exact mixture: K times the evaluations of `Sample`."""

    name = "full"

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        return StepRule.MIXTURE


@dataclass(frozen=True)
class Sample(Strategy):
    """Draw an expert from the posterior at every step and follow it: exact in law, one evaluation per velocity."""

    name = "sample"

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        return StepRule.DRAW


@dataclass(frozen=True)
class Lock(Strategy):
    """Draw an expert for the last time at the first step with t <= `t_lock`, and keep it to the end: exact in law.

    Args:
        t_lock: in [0, 1]; at 1 the expert is drawn from the prior and no router is needed.
        prefix: before t_lock, `sample` an expert at every step, or follow the `full` mixture.
    """

    name = "lock"
    settings = {"tau": "t_lock", "prefix": "prefix"}

    t_lock: float = 1.0
    prefix: Prefix = "sample"

    def __post_init__(self) -> None:
        if not _is_share(self.t_lock) or self.prefix not in ("sample", "full"):
            expected = "t_lock in [0, 1] and the prefix sample or full"
            got = f"t_lock={self.t_lock!r} and prefix={self.prefix!r}"
            raise MathError("lock", expected=expected, got=got)

    @property
    def needs_router(self) -> bool:
        """Whether it draws experts below t = 1."""
        return self.t_lock < 1

    @property
    def keeps_first_expert(self) -> bool:
        """Whether it locks at t = 1."""
        return self.t_lock >= 1

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        if t > self.t_lock + _SAME_TIME:
            if self.prefix == "full":
                return StepRule.MIXTURE
            return StepRule.DRAW
        # The first step at or below t_lock draws; all later ones keep what it drew.
        if t_before > self.t_lock + _SAME_TIME:
            return StepRule.LOCK
        return StepRule.KEEP


@dataclass(frozen=True)
class TopK(Strategy):
    """Follow the mixture of the k most probable experts, weights renormalised: biased towards large silos."""

    name = "top-k"
    settings = {"k": "k"}

    k: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.k, Integral) or self.k < 1:
            raise MathError("top-k", expected="at least 1 expert", got=repr(self.k))

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        return StepRule.SELECT

    def select(self, w_BK: "Tensor") -> "Tensor":
        """See `Strategy.select`."""
        none_BK = w_BK < 0
        most_probable_BK = _descending(w_BK)[:, : self.k]
        selected_BK = none_BK.scatter(1, most_probable_BK, True)
        # Where fewer than k experts have a weight, the others are not evaluated.
        return selected_BK & (w_BK > 0)


@dataclass(frozen=True)
class TopOne(TopK):
    """Follow the most probable expert at every step: the most biased strategy, kept as a control."""

    name = "top-1"
    settings = {}

    k: int = 1


@dataclass(frozen=True)
class Nucleus(Strategy):
    """Follow the mixture of the fewest experts whose probabilities add up to `mass`: biased as `TopK` is."""

    name = "nucleus"
    settings = {"mass": "mass"}

    mass: float = 0.9

    def __post_init__(self) -> None:
        if not _is_share(self.mass) or self.mass == 0:
            expected = "a probability above 0, at most 1"
            raise MathError("nucleus", expected=expected, got=repr(self.mass))

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        return StepRule.SELECT

    def select(self, w_BK: "Tensor") -> "Tensor":
        """See `Strategy.select`."""
        order_BK = _descending(w_BK)
        sorted_BK = w_BK.double().gather(1, order_BK)
        # An expert is needed where those before it do not reach the mass.
        mass_before_BK = sorted_BK.cumsum(1) - sorted_BK
        needed_BK = mass_before_BK < self.mass
        # From the order of probability back to that of the experts.
        none_BK = w_BK < 0
        selected_BK = none_BK.scatter(1, order_BK, needed_BK)
        return selected_BK & (w_BK > 0)


@dataclass(frozen=True)
class Threshold(Strategy):
    """Follow the mixture of all experts of probability >= `least`, or else the most probable: biased as `TopK` is."""

    name = "threshold"
    settings = {"least": "least"}

    least: float = 0.1

    def __post_init__(self) -> None:
        if not _is_share(self.least):
            raise MathError("threshold", expected="a probability in [0, 1]", got=repr(self.least))

    def step_rule(self, t: float, t_before: float) -> StepRule:
        """See `Strategy.step_rule`."""
        return StepRule.SELECT

    def select(self, w_BK: "Tensor") -> "Tensor":
        """See `Strategy.select`."""
        # The most probable expert stays where none reaches the threshold, since a sample must follow at least one.
        is_probable_BK = w_BK >= self.least
        is_most_probable_BK = TopK(1).select(w_BK)
        return (is_probable_BK | is_most_probable_BK) & (w_BK > 0)


_CLASSES: tuple[type[Strategy], ...] = (
    Full,
    Sample,
    Lock,
    TopOne,
    TopK,
    Nucleus,
    Threshold,
)
STRATEGIES: Mapping[str, type[Strategy]] = {strategy.name: strategy for strategy in _CLASSES}


def strategy_named(name: str, **settings: Any) -> Strategy:
    """Return the strategy that the command line calls `name`.

    Args:
        name: one of `STRATEGIES`.
        settings: by their names on the command line, as in tau=0.5; one of None is not set.

    Raises:
        MathError: there is no such strategy, a setting is out of range, or the strategy does not take it.
    """
    if name not in STRATEGIES:
        raise MathError("strategy", expected=", ".join(STRATEGIES), got=repr(name))
    strategy = STRATEGIES[name]
    fields: dict[str, Any] = {}
    for setting, value in settings.items():
        if value is None:
            continue
        if setting not in strategy.settings:
            expected = "no settings"
            if strategy.settings:
                expected = f"no other settings than {' and '.join(strategy.settings)}"
            raise MathError(f"strategy {name}", expected=expected, got=f"{setting}={value!r}")
        fields[strategy.settings[setting]] = value
    return strategy(**fields)


def _is_share(value: object) -> bool:
    """Whether it is a number in [0, 1]."""
    return isinstance(value, Real) and 0 <= float(value) <= 1


def resolve_strategy(strategy: str | Strategy, tau: float | None) -> Strategy:
    """Return a strategy that is given itself or by its name; `tau` is the lock's time.

    Raises:
        MathError: see `strategy_named`, or `tau` beside a strategy that has its time.
    """
    if isinstance(strategy, str):
        return strategy_named(strategy, tau=tau)
    if tau is not None:
        raise MathError(
            "tau",
            expected='tau with strategy="lock"',
            got=f"strategy={strategy}",
            remedy="Leave tau out and give the time to the strategy itself: strategy=Lock(t_lock=...).",
        )
    if not isinstance(strategy, Strategy):
        expected = f"a strategy, or one of {', '.join(STRATEGIES)}"
        raise MathError("strategy", expected=expected, got=repr(strategy))
    return strategy


@dataclass(frozen=True)
class Segment:
    """Consecutive solver steps during which every sample follows the same experts.

    Args:
        first_step: the number of its first step.
        rule: what the samples follow, decided at its first step; KEEP only in the first segment of a part of a
            trajectory, where it keeps what the part before followed.
        times: where its steps begin, and where the last one ends.
    """

    first_step: int
    rule: StepRule
    times: tuple[float, ...]


def segments(
    strategy: Strategy,
    times: Sequence[float],
    router_every: int = 1,
    t_before: float = inf,
) -> list[Segment]:
    """Cut the time grid into segments, at the steps where samples may change experts.

    Args:
        strategy: decides what each step follows.
        times: S + 1 times, descending.
        router_every: the router is evaluated at every n-th step only, and its weights are kept in between. The step at
            which an expert is locked always evaluates it.
        t_before: where the step before the first one started; infinite where there was none.

    Raises:
        MathError: `router_every` below 1.
    """
    if not isinstance(router_every, Integral) or router_every < 1:
        got = repr(router_every)
        raise MathError("router_every", expected="a whole number, at least 1", got=got)
    cut: list[Segment] = []
    starts_before = [t_before, *times]
    for step, (t, t_next) in enumerate(pairwise(times)):
        rule: Any = strategy.step_rule(t, starts_before[step])
        if not isinstance(rule, StepRule):
            subject = f"step_rule of the strategy {type(strategy).__name__}"
            raise MathError(subject, expected="a StepRule, such as StepRule.DRAW", got=repr(rule))
        continues = False
        if cut:
            # A change of the rule begins a segment, so that the step which locks always evaluates the router.
            reuses_weights = step % router_every > 0 and rule is cut[-1].rule
            continues = rule is StepRule.KEEP or reuses_weights
        if continues:
            longer_times = (*cut[-1].times, t_next)
            cut[-1] = replace(cut[-1], times=longer_times)
        else:
            cut.append(Segment(step, rule, (t, t_next)))
    return cut


def draw_expert(w_BK: "Tensor", uniform_B: "Tensor") -> "Tensor":
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
    uniform_B1 = uniform_B.double()[:, None]
    # The number of experts whose cumulative share the number has passed is that of the expert it falls upon.
    return (cumulative_BK <= uniform_B1).sum(dim=-1)


def _descending(w_BK: "Tensor") -> "Tensor":
    """Return the experts of each sample by descending probability; ties keep the experts' order."""
    return w_BK.argsort(dim=1, descending=True, stable=True)
