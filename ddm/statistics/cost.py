"""The privacy cost of a plan: the mechanisms that it draws from private data, and their composition."""

from collections.abc import Mapping

from ddm.errors import PolicyError
from ddm.privacy.accounting import Mechanism, noise_multiplier_for, total_epsilon
from ddm.protocol.plan import Plan
from ddm.protocol.statistics import PaidKind, StatisticKind, Statistics
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.statistics.of_plan import statistics_of

# Admits parts that add up to exactly the total.
_SLACK = 1 + 1e-9
# Below it a statistic is pure noise, which 64-bit integers may not hold.
_MIN_EPSILON = 1e-6


def mechanisms(plan: Plan) -> Mapping[StatisticKind, Mechanism]:
    """Return the mechanism of each of a plan's statistics, by kind, in the order in which they are drawn.

    Raises:
        PolicyError: a statistic with so small an epsilon that it is pure noise.
    """
    return _mechanisms(plan.statistics, f"plan {plan.plan_id}")


def _mechanisms(statistics: Statistics, subject: str) -> Mapping[StatisticKind, Mechanism]:
    smallest_epsilon = min(terms.epsilon for terms in statistics.terms.values())
    if smallest_epsilon < _MIN_EPSILON:
        raise PolicyError(
            f"{subject}: epsilon of a statistic",
            expected=f"at least {_MIN_EPSILON:g}, below which it is noise alone",
            got=f"{smallest_epsilon:g}",
        )
    by_kind: dict[StatisticKind, Mechanism] = {}
    for kind, statistic in statistics_of(statistics).items():
        by_kind[kind] = statistic.mechanism()
    return by_kind


def paid_mechanisms(
    plan: Plan,
    num_units: int | None = None,
) -> Mapping[PaidKind, Mechanism]:
    """Return all that a plan draws from a silo's data: its statistics and, if it is trained privately, the expert.

    Args:
        plan: the plan.
        num_units: the number of units of the silo, from which the noise of private training follows. None for as many
            as any silo of the plan agreed to bring at most, which gives about the same cost.

    Raises:
        PolicyError: see `mechanisms`.
        NumericalError: no noise is enough.
    """
    paid: dict[PaidKind, Mechanism] = dict(mechanisms(plan).items())
    terms = plan.expert.privacy
    if terms is None:
        return paid
    if not num_units:
        # The noise is solved for the epsilon that the plan states, so that the number of units hardly changes the cost.
        num_units = _most_agreed_units(plan)
    rate = terms.rate(num_units)
    steps = plan.expert.training.num_steps
    noise = noise_multiplier_for(terms.epsilon, terms.delta, rate, steps)
    paid["expert"] = DpSgdMechanism(
        noise_multiplier=noise,
        rate=rate,
        steps=steps,
    )
    return paid


def _most_agreed_units(plan: Plan) -> int:
    """Return the most units that any silo of the plan agreed to bring, at least 1."""
    most_units = 1
    for terms in plan.agreed.values():
        num_units = terms.units(plan.statistics.unit)
        most_units = max(most_units, num_units or 1)
    return most_units


def plan_epsilon(plan: Plan) -> float:
    """Return the composed epsilon of all statistics of the plan, at ``statistics.total.delta``."""
    delta = plan.statistics.total.delta
    return total_epsilon(mechanisms(plan).values(), delta)


def check_total(plan: Plan) -> None:
    """Refuse a plan whose statistics cost more than its stated total.

    Raises:
        PolicyError: they do, or a statistic is pure noise.
    """
    check_statistics(plan.statistics, f"plan {plan.plan_id}")


def check_statistics(statistics: Statistics, subject: str) -> None:
    """Refuse statistics that cost more than their stated total; `subject` names them in an error.

    Raises:
        PolicyError: they do, or one is pure noise.
    """
    total = statistics.total
    by_kind = _mechanisms(statistics, subject)
    composed_epsilon = total_epsilon(by_kind.values(), total.delta)
    # Not >, so that an epsilon that is not a number is refused.
    if not composed_epsilon <= total.epsilon * _SLACK:
        raise PolicyError(
            f"{subject}: all statistics together",
            expected=f"epsilon of at most {total.epsilon:g} at delta {total.delta:g}, as it states",
            got=f"{composed_epsilon:.4g}",
        )
