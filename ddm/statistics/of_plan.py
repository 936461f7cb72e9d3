"""Finds the statistics that a plan requires."""

from collections.abc import Mapping
from importlib import import_module

from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind, Statistics
from ddm.statistics.base import Statistic


def statistics_of(statistics: Statistics) -> Mapping[StatisticKind, Statistic]:
    """Return the statistics of a plan by kind, in the order in which they are drawn.

    The documents of `ddm.protocol.statistics` cannot name their implementations, which need torch. So the kind is the
    name of the module: `STATISTIC` in ``ddm/statistics/<kind>.py``. Kinds are literals of a document, never free text.
    """
    by_kind: dict[StatisticKind, Statistic] = {}
    for kind in statistics.terms:
        module = import_module(f"ddm.statistics.{kind}")
        by_kind[kind] = module.STATISTIC(statistics)
    return by_kind


def statistic_bytes(plan: Plan, num_units: int) -> Mapping[StatisticKind, int]:
    """Return the bytes of each statistic's tensors, of a silo with this many units."""
    sizes: dict[StatisticKind, int] = {}
    for kind, statistic in statistics_of(plan.statistics).items():
        specs = statistic.tensor_specs(num_units)
        sizes[kind] = sum(spec.bytes for spec in specs.values())
    return sizes
