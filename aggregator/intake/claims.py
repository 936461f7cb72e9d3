"""Limits the effect of a silo's stated number of units: by the agreed number, and by its share of the prior.

A silo states its number of units without proof, can invent statistics to match, and its experts' prior is its share of
all units. So a submission that states more than was agreed at enrolment, or that would hold more of the prior than
`max_influence`, waits in quarantine, whatever statistics the plan has. A person may admit it with a lower number, never
with one above what was agreed; the manifest then carries that number and the reason.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from aggregator.config import Federation
from aggregator.intake.quarantine import (
    QuarantineDecision,
    Rule,
    decisions_on,
    is_admitted,
)
from ddm.errors import PolicyError, RefusedError
from ddm.protocol.plan import Plan
from ddm.protocol.submission import Submission


@dataclass(frozen=True)
class CountedUnits:
    """The number of units that a silo's prior counts, and why it is lower than what the silo stated, if it is."""

    units: int
    reason: str | None = None


def agreed_units(plan: Plan, silo_id: str) -> int:
    """Return the most units that a silo may count as."""
    return plan.agreed[silo_id].units(plan.statistics.unit)


def counted_units(
    plan: Plan, submission: Submission, decisions: Sequence[QuarantineDecision]
) -> CountedUnits:
    """Return what an accepted submission counts as: what it states, or the lowest number with which it was admitted.

    Args:
        plan: the current one, which states what was agreed.
        submission: verified.
        decisions: all decisions about it, oldest first.

    Raises:
        PolicyError: it states more than was agreed, and no person admitted it.
    """
    stated = submission.num_units
    agreed = agreed_units(plan, submission.silo_id)
    admissions = [decision for decision in decisions if decision.verdict == "admitted"]
    if not admissions:
        if stated > agreed:
            raise PolicyError(
                f"{plan.statistics.unit}s of silo {submission.silo_id}",
                expected=f"at most {agreed}",
                got=f"{stated}, which no person admitted",
            )
        return CountedUnits(stated)
    # The last decision is the lowest: `record_decision` lets later ones only lower the number.
    admitted_units = [decision.units for decision in admissions if decision.units is not None]
    # Also by what was agreed: no admission lets a silo count for more.
    units = min(stated, agreed, *admitted_units)
    if units < stated:
        return CountedUnits(units, admissions[-1].reason)
    return CountedUnits(units)


def claim_faults(
    federation: Federation,
    plan: Plan,
    silo_id: str,
    claimed: int,
    remaining: Set[str],
) -> dict[Rule, str]:
    """Describe what is implausible about the number of units that a silo states, whatever its statistics, by rule.

    Args:
        federation: the operator's folder.
        plan: the plan.
        silo_id: the silo.
        claimed: the number.
        remaining: the plan's silos that take part (`remaining_silos`).
    """
    max_influence = federation.settings().max_influence
    agreed = agreed_units(plan, silo_id)
    unit = plan.statistics.unit
    faults: dict[Rule, str] = {}
    if claimed > agreed:
        faults["units"] = (
            f"states {claimed} {unit}s, more than the {agreed} agreed at enrolment, as the plan states"
        )
    # As if all others had brought what they agreed to: anybody who comes first must not be judged by its being alone.
    units = {
        other: agreed_units(plan, other)
        for other in plan.members
        if other != silo_id and other in remaining
    }
    units[silo_id] = claimed
    share = overweight(units, max_influence).get(silo_id)
    if share is not None:
        faults["influence"] = (
            f"states {claimed} {unit}s ({agreed} agreed): {share:.1%} of the prior even if all others bring as many as "
            f"they agreed to, above max_influence of {max_influence:.1%}"
        )
    return faults


def overweight(units: Mapping[str, int], max_influence: float) -> dict[str, float]:
    """Return the silos whose share of all units is above `max_influence`, with their shares.

    Empty for at most 1 / max_influence silos, of which one would always be above the limit, or all exactly at it.
    """
    if len(units) * max_influence <= 1.0:
        return {}
    total = sum(units.values())
    # A share of exactly `max_influence` is allowed, also where the division rounds up.
    limit = max_influence * (1.0 + 1e-12)
    return {silo_id: num / total for silo_id, num in units.items() if num / total > limit}


def overweight_words(
    federation: Federation, units: Mapping[str, int], digests: Mapping[str, str]
) -> dict[str, str]:
    """Describe which accepted silos hold too much of the prior, except those that a person admitted in spite of it.

    Args:
        federation: the operator's folder.
        units: what each silo counts as.
        digests: the digests of their submissions.
    """
    max_influence = federation.settings().max_influence
    words_of_silos = {}
    for silo_id, share in overweight(units, max_influence).items():
        decisions = decisions_on(federation, digests[silo_id])
        if is_admitted(decisions, "influence"):
            continue
        words_of_silos[silo_id] = (
            f"{units[silo_id]} units, {share:.1%} of the prior, above max_influence of {max_influence:.1%}"
        )
    return words_of_silos


def refuse_overweight(
    federation: Federation, units: Mapping[str, int], digests: Mapping[str, str]
) -> None:
    """Compare all accepted silos before the router is trained: others may have brought less than agreed.

    Args:
        federation: the operator's folder.
        units: what each silo counts as.
        digests: the digests of their submissions.

    Raises:
        RefusedError: one holds more of the prior than `max_influence`, and nobody has admitted it.
    """
    words_of_silos = overweight_words(federation, units, digests)
    if words_of_silos:
        raise RefusedError(
            "accepted submissions",
            expected="no silo with more of the prior than max_influence, unless a person admitted it",
            got="; ".join(f"{silo_id}: {words}" for silo_id, words in words_of_silos.items())[
                :1000
            ],
            remedy=(
                f"Admit it: `aggregator admit {federation.path} SILO --reason TEXT`, with less if you add "
                "--units N. If this share is known and wanted, raise max_influence in federation.toml."
            ),
        )
