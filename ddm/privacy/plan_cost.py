"""The privacy cost of a plan: the mechanisms that it draws from private data, and their composition."""

from collections.abc import Mapping
from typing import Literal

from ddm.errors import PolicyError
from ddm.privacy.accounting import (
    DiscreteLaplaceMechanism,
    GaussianMechanism,
    Mechanism,
    gaussian_mu,
    noise_multiplier_for,
    total_epsilon,
)
from ddm.protocol.plan import Plan, Statistics
from ddm.protocol.weight_privacy import DpSgdMechanism

Kind = Literal["counts", "sketch", "class_counts"]
# what a debit may cover: statistics, and the private training of an expert
Paid = Kind | Literal["expert"]
_SLACK = 1 + 1e-9  # admits parts that add up to exactly the total
_MIN_EPSILON = 1e-6  # below it a statistic is pure noise, which 64-bit integers may not hold


def mechanisms(plan: Plan) -> Mapping[Kind, Mechanism]:
    """Return the mechanism of each of a plan's statistics, by kind, in the order in which they are drawn.

    Raises:
        PolicyError: a statistic with so small an epsilon that it is pure noise.
    """
    return _mechanisms(plan.statistics, f"plan {plan.plan_id}")


def _mechanisms(statistics: Statistics, subject: str) -> Mapping[Kind, Mechanism]:
    least = min(
        part.epsilon
        for part in (
            statistics.counts,
            statistics.class_counts,
            statistics.sketch,
        )
        if part
    )
    if least < _MIN_EPSILON:
        expected = f"at least {_MIN_EPSILON:g}, below which it is noise alone"
        raise PolicyError(f"{subject}: epsilon of a statistic", expected=expected, got=f"{least:g}")
    drawn: dict[Kind, Mechanism] = {
        "counts": DiscreteLaplaceMechanism(epsilon=statistics.counts.epsilon)
    }
    if statistics.class_counts:
        drawn["class_counts"] = DiscreteLaplaceMechanism(epsilon=statistics.class_counts.epsilon)
    if statistics.sketch:
        drawn["sketch"] = GaussianMechanism(
            mu=gaussian_mu(statistics.sketch.epsilon, statistics.sketch.delta)
        )
    return drawn


def paid_mechanisms(plan: Plan, num_units: int | None = None) -> Mapping[Paid, Mechanism]:
    """Return all that a plan draws from a silo's data: its statistics and, if it is trained privately, the expert.

    Args:
        plan: the plan.
        num_units: of the silo, from which the noise of private training follows; None for as many as any silo of the
            plan agreed to bring at most, which tells about what it costs.

    Raises:
        PolicyError: see `mechanisms`.
        NumericalError: no noise is enough.
    """
    drawn: dict[Paid, Mechanism] = dict(mechanisms(plan).items())
    if terms := plan.expert.privacy:
        num = num_units or max(
            agreed.units(plan.statistics.unit) or 1 for agreed in plan.agreed.values()
        )
        rate, steps = terms.rate(num), plan.expert.training.num_steps
        noise = noise_multiplier_for(terms.epsilon, terms.delta, rate, steps)
        drawn["expert"] = DpSgdMechanism(noise_multiplier=noise, rate=rate, steps=steps)
    return drawn


def plan_epsilon(plan: Plan) -> float:
    """Return the composed epsilon of all statistics of the plan, at ``statistics.total.delta``."""
    return total_epsilon(mechanisms(plan).values(), plan.statistics.total.delta)


def check_total(plan: Plan) -> None:
    """Refuse a plan whose statistics cost more than its stated total.

    Raises:
        PolicyError: they do, or a statistic is pure noise.
    """
    check_statistics(plan.statistics, f"plan {plan.plan_id}")


def check_statistics(statistics: Statistics, subject: str) -> None:
    """Refuse statistics that cost more than their stated total; `subject` is what to call them in an error.

    Raises:
        PolicyError: they do, or one is pure noise.
    """
    total = statistics.total
    found = total_epsilon(_mechanisms(statistics, subject).values(), total.delta)
    if not found <= total.epsilon * _SLACK:
        expected = f"epsilon of at most {total.epsilon:g} at delta {total.delta:g}, as it states"
        raise PolicyError(
            f"{subject}: all statistics together", expected=expected, got=f"{found:.4g}"
        )
