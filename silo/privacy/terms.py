"""What a debit covers, compared with what is asked for: units, and mechanisms up to rounding."""

import math
from collections.abc import Mapping

from ddm.errors import LedgerError
from ddm.privacy.accounting import GaussianMechanism, Mechanism
from ddm.privacy.plan_cost import Kind
from ddm.protocol.base import Unit

_SAME = 1e-9


def check_unit(subject: str, unit: Unit, counted: Unit) -> None:
    """Refuse to count what protects an image in a ledger that protects patients.

    Raises:
        LedgerError: it says nothing about a patient.
    """
    if (unit, counted) == ("image", "patient"):
        raise LedgerError(
            subject,
            expected="statistics per patient, since the policy's privacy.unit is patient",
            got="statistics per image, which say nothing about a patient",
            remedy="Statistics drawn per image cannot be counted per patient: set privacy.unit back to image.",
        )


def alike(paid: Mapping[Kind, Mechanism], requested: Mapping[Kind, Mechanism]) -> bool:
    """Whether these are the same statistics; mu is computed, and machines may round it differently."""

    def same(first: Mechanism, second: Mechanism) -> bool:
        if isinstance(first, GaussianMechanism) and isinstance(second, GaussianMechanism):
            return math.isclose(first.mu, second.mu, rel_tol=_SAME)
        return first == second

    return paid.keys() == requested.keys() and all(same(paid[kind], requested[kind]) for kind in paid)


def in_words(unit: Unit, mechanisms: Mapping[Kind, Mechanism]) -> str:
    """Name the statistics with their cost; only numbers of the plan, nothing of the data."""
    costs = {kind: each.model_dump(exclude={"kind"}) for kind, each in mechanisms.items()}
    terms = (f"{kind} ({name} {value:g})" for kind, cost in costs.items() for name, value in cost.items())
    return f"{', '.join(terms)} per {unit}"
