"""What a debit covers, compared with what is asked for: units, and mechanisms up to rounding."""

import math
from collections.abc import Mapping

from ddm.errors import LedgerError
from ddm.privacy.accounting import GaussianMechanism, Mechanism
from ddm.protocol.base import Unit
from ddm.protocol.statistics import PaidKind
from ddm.protocol.weight_privacy import DpSgdMechanism

_MU_TOLERANCE = 1e-9
# Of a noise multiplier, which is searched for. What was paid for is what is drawn.
_NOISE_TOLERANCE = 1e-2


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


def are_same_mechanisms(
    paid: Mapping[PaidKind, Mechanism], requested: Mapping[PaidKind, Mechanism]
) -> bool:
    """Whether these are the same statistics; mu is computed, and machines may round it differently."""
    if paid.keys() != requested.keys():
        return False
    return all(_is_same_mechanism(paid[kind], requested[kind]) for kind in paid)


def _is_same_mechanism(first: Mechanism, second: Mechanism) -> bool:
    if isinstance(first, GaussianMechanism) and isinstance(second, GaussianMechanism):
        return math.isclose(first.mu, second.mu, rel_tol=_MU_TOLERANCE)
    if isinstance(first, DpSgdMechanism) and isinstance(second, DpSgdMechanism):
        # The rate follows from whole numbers by one division, so that it is the same on every machine.
        is_same_noise = math.isclose(
            first.noise_multiplier,
            second.noise_multiplier,
            rel_tol=_NOISE_TOLERANCE,
        )
        return is_same_noise and first.rate == second.rate and first.steps == second.steps
    return first == second


def describe_mechanisms(unit: Unit, mechanisms: Mapping[PaidKind, Mechanism]) -> str:
    """Name the statistics with their cost; only numbers of the plan, nothing of the data."""
    terms = []
    for kind, mechanism in mechanisms.items():
        for name, value in mechanism.model_dump(exclude={"kind"}).items():
            terms.append(f"{kind} ({name} {value:g})")
    return f"{', '.join(terms)} per {unit}"
