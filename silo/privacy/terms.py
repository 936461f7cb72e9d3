"""What a debit covers, compared with what is asked for: units, and mechanisms up to rounding."""

import math
from collections.abc import Mapping

from ddm.errors import LedgerError
from ddm.privacy.accounting import GaussianMechanism, Mechanism
from ddm.protocol.base import Unit
from ddm.protocol.statistics import PaidKind
from ddm.protocol.weight_privacy import DpSgdMechanism

_SAME = 1e-9
_SAME_NOISE = (
    1e-2  # of a noise multiplier, which is searched for; what was paid for is what is drawn
)


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


def alike(paid: Mapping[PaidKind, Mechanism], requested: Mapping[PaidKind, Mechanism]) -> bool:
    """Whether these are the same statistics; mu is computed, and machines may round it differently."""

    def same(first: Mechanism, second: Mechanism) -> bool:
        if isinstance(first, GaussianMechanism) and isinstance(second, GaussianMechanism):
            return math.isclose(first.mu, second.mu, rel_tol=_SAME)
        if isinstance(first, DpSgdMechanism) and isinstance(second, DpSgdMechanism):
            near = math.isclose(
                first.noise_multiplier, second.noise_multiplier, rel_tol=_SAME_NOISE
            )
            return near and (first.rate, first.steps) == (second.rate, second.steps)
        return first == second

    return paid.keys() == requested.keys() and all(
        same(paid[kind], requested[kind]) for kind in paid
    )


def in_words(unit: Unit, mechanisms: Mapping[PaidKind, Mechanism]) -> str:
    """Name the statistics with their cost; only numbers of the plan, nothing of the data."""
    costs = {kind: each.model_dump(exclude={"kind"}) for kind, each in mechanisms.items()}
    terms = (
        f"{kind} ({name} {value:g})" for kind, cost in costs.items() for name, value in cost.items()
    )
    return f"{', '.join(terms)} per {unit}"
