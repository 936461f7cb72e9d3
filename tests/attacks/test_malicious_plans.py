"""A signed plan may still be an attack: it is refused in words that an officer of data protection understands."""

from collections.abc import Callable

import pytest
from torch import Tensor

from ddm.errors import ArchipelagoError, DocumentError, PolicyError, TensorFileError
from ddm.statistics.sketch import sketch_noise_level
from examples.paper.privacy import drawing
from silo.config import Policy, PrivacyPolicy
from tests.support.dishonest_aggregator import (
    DELTA,
    PUBLIC,
    RANK,
    DishonestAggregator,
    UnsignedPlan,
    clusters_around,
)

HONEST = UnsignedPlan.honest(clusters_around(PUBLIC[:8]))


def test_honest_plan_is_accepted(aggregator: DishonestAggregator) -> None:
    accepted = aggregator.offer(HONEST)
    assert accepted.files().sketch.rank == RANK


def spoiled(part: str, name: str, change: Callable[[Tensor], Tensor]) -> UnsignedPlan:
    plan = HONEST.copy()
    plan.tensors[part][name] = change(plan.tensors[part][name].clone())
    return plan


def asking(**releases: object) -> UnsignedPlan:
    plan = HONEST.copy()
    plan.document["statistics"] |= releases
    return plan


def twice_the_same(basis: Tensor) -> Tensor:
    basis[1] = basis[0]
    return basis


def one_not_a_number(basis: Tensor) -> Tensor:
    basis[0, 0] = float("nan")
    return basis


SKETCH = {"epsilon": 7.0, "delta": DELTA, "rank": 2}
PATIENT_SITE = Policy(privacy=PrivacyPolicy(unit="patient"))
REFUSED: dict[str, tuple[UnsignedPlan, type[ArchipelagoError], tuple[str, ...]]] = {
    "basis three times as long, so that noise is a third": (
        spoiled("sketch", "basis", lambda basis: 3 * basis),
        PolicyError,
        ("sketch basis", "orthonormal rows"),
    ),
    "basis with one row twice": (
        spoiled("sketch", "basis", twice_the_same),
        PolicyError,
        ("sketch basis", "orthonormal rows"),
    ),
    "scale of a thousand million": (
        spoiled("sketch", "scale", lambda scale: 0 * scale + 1e9),
        PolicyError,
        ("sketch scale", "1e-06 to 1e+06"),
    ),
    "scale of a thousand millionth": (
        spoiled("sketch", "scale", lambda scale: 0 * scale + 1e-9),
        PolicyError,
        ("sketch scale", "1e-06 to 1e+06"),
    ),
    "negative scale": (
        spoiled("sketch", "scale", lambda scale: -scale),
        PolicyError,
        ("sketch scale", "1e-06 to 1e+06"),
    ),
    "basis that is not a number": (
        spoiled("sketch", "basis", one_not_a_number),
        TensorFileError,
        ("sketch.safetensors, tensor basis", "finite"),
    ),
    "centroid that is not a number": (
        spoiled("centroids", "centroids", one_not_a_number),
        TensorFileError,
        ("centroids.safetensors, tensor centroids", "finite"),
    ),
    "encoder that is not a number": (
        spoiled("encoder", "basis", one_not_a_number),
        TensorFileError,
        ("encoder.safetensors, tensor basis", "finite"),
    ),
    "epsilon that is not a number": (
        asking(counts={"epsilon": float("nan"), "num_groups": 8}),
        DocumentError,
        ("plan.json", "JSON", "NaN is not a JSON number"),
    ),
    "noise level of its own choice": (
        asking(sketch=SKETCH | {"t_release": 0.0}),
        DocumentError,
        ("plan.json, field statistics.sketch", "not permitted"),
    ),
    "epsilon so large that hardly any noise is left": (
        asking(total={"epsilon": 990.0, "delta": DELTA}, sketch=SKETCH | {"epsilon": 900.0}),
        PolicyError,
        ("epsilon of the plan", "at most 8", "990"),
    ),
    "delta so large that anything may leak": (
        asking(total={"epsilon": 8.0, "delta": 0.5}, sketch=SKETCH | {"delta": 0.5}),
        PolicyError,
        ("delta of the plan", "at most 1e-05", "0.5"),
    ),
    "total below one of its parts": (
        asking(total={"epsilon": 1.0, "delta": DELTA}),
        DocumentError,
        ("plan.json, field statistics", "a statistic has epsilon 7, more than the total of 1"),
    ),
    "total below its parts together": (
        asking(counts={"epsilon": 4.0, "num_groups": 8}),
        PolicyError,
        ("privacy of all statistics together", "at most 8", "as it states", "got 10.91"),
    ),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_plan_is_refused_in_words_that_name_the_thing_and_what_is_allowed(
    aggregator: DishonestAggregator, attack: str
) -> None:
    plan, kind, words = REFUSED[attack]
    with pytest.raises(kind) as refusal:
        aggregator.offer(plan)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert refusal.value.remedy


def test_plan_that_protects_images_only_is_refused_where_patients_are_protected(
    aggregator: DishonestAggregator,
) -> None:
    with pytest.raises(PolicyError) as refusal:
        aggregator.offer(HONEST, PATIENT_SITE)
    message = str(refusal.value)
    assert all(
        word in message
        for word in ("privacy unit", "expected patient", "got image", "nothing about a patient")
    )
    assert aggregator.offer(asking(unit="patient"), PATIENT_SITE).plan.statistics.unit == "patient"


def test_more_epsilon_means_less_noise_so_that_limiting_epsilon_limits_what_a_plan_can_hide() -> (
    None
):
    """No field states t_release: the only way to less noise is an epsilon that the policy sees."""
    sketch = drawing.public_sketch(2)
    levels = [
        sketch_noise_level(
            drawing.make_plan({"sketch": SKETCH | {"epsilon": epsilon}}, rank=2), sketch
        )
        for epsilon in (7.0, 90.0, 900.0)
    ]
    assert levels == sorted(levels, reverse=True)
    assert levels[2] < 0.1 < 0.5 < levels[0]
