"""Caps the influence of one silo where all silos' statistics are weighted by their numbers of units.

A silo states its own number of units without proof. Each silo's likelihood is fitted on its own statistics only, so
this number cannot change the router's odds between two other silos. But the residual network, the temperature and the
choice of the router family are fitted on all silos together, weighted by units; there a silo's share is capped. Its
prior in the ensemble is not capped but bounded by the number agreed at enrolment; above the cap a person decides.
"""

from collections.abc import Sequence

import numpy as np

from ddm.errors import MathError

# Shape legend: K silos.


def capped_shares(num_units: Sequence[int], cap: float) -> tuple[float, ...]:
    """Return each silo's share of all units, none above `cap`; the excess is divided among the others by their shares.

    With fewer than 1 / cap silos that is impossible, and all shares are equal.

    Args:
        num_units: the public number of units of each silo, above 0.
        cap: in (0, 1]; 1 leaves every share as it is.

    Raises:
        MathError: a cap or a number of units out of range.
    """
    fewest_units = min(num_units, default=0)
    if not 0.0 < cap <= 1.0 or fewest_units < 1:
        got = f"a cap of {cap:g} and {len(num_units)} silos of at least {fewest_units} units"
        raise MathError(
            "shares of influence", expected="a cap in (0, 1] and units above 0", got=got
        )
    units_K = np.asarray(num_units, dtype=np.float64)
    share_K = units_K / units_K.sum()
    cap = max(cap, 1.0 / len(units_K))
    is_capped_K = np.zeros(len(units_K), dtype=bool)
    # Dividing the excess may lift another silo above the cap, so this is repeated until none is.
    while True:
        is_over_K = share_K > cap * (1.0 + 1e-12)
        if not bool(is_over_K.any()):
            break
        is_capped_K |= is_over_K
        left = 1.0 - cap * is_capped_K.sum()
        free_units = max(units_K[~is_capped_K].sum(), 1.0)
        share_K = np.where(is_capped_K, cap, units_K / free_units * left)
    normalised_K = share_K / share_K.sum()
    return tuple(normalised_K.tolist())
