"""What a plan draws and costs, against its own document."""

import pytest

from ddm.errors import PolicyError
from ddm.privacy.accounting import (
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    gaussian_delta,
    total_epsilon,
)
from ddm.protocol.plan import Plan
from ddm.statistics.cost import check_total, mechanisms, plan_epsilon
from tests.support.documents import plan_document, to_bytes

ALL = {
    "total": {"epsilon": 9.0, "delta": 1e-5},
    "counts": {"epsilon": 1.0, "num_groups": 32},
    "class_counts": {"epsilon": 0.5, "num_classes": 10},
    "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 8},
}


def plan(**statistics: object) -> Plan:
    document = plan_document()
    document["statistics"] = {"unit": "image", **statistics}
    document["router"] = {"kind": "counts"}
    return Plan.parse(to_bytes(document), subject="plan.json")


def test_plan_draws_each_release_by_the_mechanism_that_its_epsilon_and_delta_imply() -> None:
    drawn = mechanisms(plan(**ALL))
    assert list(drawn) == ["counts", "class_counts", "sketch"]
    assert drawn["counts"] == DiscreteLaplaceMechanism(epsilon=1.0)
    assert drawn["class_counts"] == DiscreteLaplaceMechanism(epsilon=0.5)
    mechanism = drawn["sketch"]
    assert isinstance(mechanism, GaussianMechanism)
    assert gaussian_delta(mechanism.mu, 7.0) == pytest.approx(1e-5, rel=1e-6)


def test_plan_draws_nothing_that_it_does_not_ask_for() -> None:
    assert list(mechanisms(plan(total=ALL["total"], counts=ALL["counts"]))) == ["counts"]


def test_plan_costs_all_its_releases_composed() -> None:
    whole = plan(**ALL)
    assert plan_epsilon(whole) == total_epsilon(mechanisms(whole).values(), 1e-5)
    without = plan(**{name: value for name, value in ALL.items() if name != "class_counts"})
    assert 7.0 < plan_epsilon(without) < plan_epsilon(whole) < 1.0 + 0.5 + 7.0


def test_plan_that_states_less_than_it_costs_is_refused_with_both_figures() -> None:
    cost = plan_epsilon(plan(**ALL))
    check_total(plan(**ALL | {"total": {"epsilon": cost, "delta": 1e-5}}))
    with pytest.raises(PolicyError, match="as it states") as caught:
        check_total(plan(**ALL | {"total": {"epsilon": cost * 0.999, "delta": 1e-5}}))
    assert f"{cost:.4g}" in str(caught.value)
    pure = {
        "counts": {"epsilon": 0.1, "num_groups": 32},
        "class_counts": {"epsilon": 0.2, "num_classes": 10},
    }
    # 0.1 + 0.2 is a rounding above 0.3
    check_total(plan(total={"epsilon": 0.3, "delta": 0.0}, **pure))


@pytest.mark.parametrize("kind", ["counts", "class_counts", "sketch"])
def test_release_that_would_be_noise_alone_is_refused(kind: str) -> None:
    terms = {**ALL, kind: {**ALL[kind], "epsilon": 1e-7}}
    with pytest.raises(PolicyError, match="noise alone"):
        mechanisms(plan(**terms))
