"""What does a plan draw from private data, and what does all of it cost together?"""

from collections.abc import Mapping
from typing import Literal

from ddm.errors import PolicyError
from ddm.privacy.accounting import DiscreteLaplaceMechanism, GaussianMechanism, Mechanism, gaussian_mu, total_epsilon
from ddm.protocol.plan import Plan

Kind = Literal["counts", "sketch", "moments", "class_counts"]
_SLACK = 1 + 1e-9  # parts that sum to exactly the total fit it
_MIN_EPSILON = 1e-6  # below it a statistic is noise alone, and whole numbers of 64 bits may not hold it


def mechanisms(plan: Plan) -> Mapping[Kind, Mechanism]:
    """Return everything that the plan draws, by kind, in the order in which it is drawn.

    Raises:
        PolicyError: a statistic with an epsilon that leaves noise alone.
    """
    asked = plan.statistics
    least = min(part.epsilon for part in (asked.counts, asked.class_counts, asked.moments, asked.sketch) if part)
    if least < _MIN_EPSILON:
        expected = f"at least {_MIN_EPSILON:g}, or it is noise alone"
        raise PolicyError(f"plan {plan.plan_id}: epsilon of a statistic", expected=expected, got=f"{least:g}")
    drawn: dict[Kind, Mechanism] = {"counts": DiscreteLaplaceMechanism(epsilon=asked.counts.epsilon)}
    if asked.class_counts:
        drawn["class_counts"] = DiscreteLaplaceMechanism(epsilon=asked.class_counts.epsilon)
    if asked.moments:
        drawn["moments"] = GaussianMechanism(mu=gaussian_mu(asked.moments.epsilon, asked.moments.delta))
    if asked.sketch:
        drawn["sketch"] = GaussianMechanism(mu=gaussian_mu(asked.sketch.epsilon, asked.sketch.delta))
    return drawn


def plan_epsilon(plan: Plan) -> float:
    """Return what all statistics of the plan cost together at ``statistics.total.delta``, composed."""
    return total_epsilon(mechanisms(plan).values(), plan.statistics.total.delta)


def check_total(plan: Plan) -> None:
    """Refuse a plan whose statistics cost more than the total it states.

    Raises:
        PolicyError: names both, or a statistic that is noise alone.
    """
    total, found = plan.statistics.total, plan_epsilon(plan)
    if not found <= total.epsilon * _SLACK:
        expected = f"epsilon of at most {total.epsilon:g} at delta {total.delta:g}, as it states"
        raise PolicyError(f"plan {plan.plan_id}: all statistics together", expected=expected, got=f"{found:.4g}")
