"""Every kind of a plan's document has its statistic, and the tensors that it says."""

import json
from typing import get_args

from ddm.protocol.plan import Plan
from ddm.protocol.statistics import StatisticKind, Statistics
from ddm.statistics.base import Statistic
from ddm.statistics.of_plan import statistic_bytes, statistics_of
from tests.support.documents import plan_document

ALL = {
    "unit": "image",
    "total": {"epsilon": 8.0, "delta": 1e-5},
    "counts": {"epsilon": 1.0, "num_groups": 32},
    "class_counts": {"epsilon": 0.5, "num_classes": 10},
    "sketch": {"epsilon": 6.0, "delta": 1e-5, "rank": 8},
}


def test_every_kind_of_the_document_has_a_statistic_of_its_name() -> None:
    statistics = Statistics.model_validate(ALL)
    members = statistics_of(statistics)
    assert set(members) == set(statistics.terms) == set(get_args(StatisticKind))
    assert all(isinstance(one, Statistic) and one.kind == kind for kind, one in members.items())
    assert list(members) == ["counts", "class_counts", "sketch"], "the order of the draws"
    assert len({one.name for one in members.values()}) == len(members)


def test_terms_list_only_what_the_plan_requires() -> None:
    only = {name: ALL[name] for name in ("unit", "total", "counts")}
    assert list(Statistics.model_validate(only).terms) == ["counts"]


def test_bytes_of_statistics_are_those_of_their_tensors() -> None:
    plan = Plan.model_validate_json(json.dumps(plan_document()))
    assert statistic_bytes(plan, num_units=100) == {"counts": 8 * 32, "sketch": 4 * 8 * 100}
