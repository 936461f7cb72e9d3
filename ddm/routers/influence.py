"""How much may one silo count where all silos' statistics are weighed together?

A silo states its own number of units, and nothing proves it. Each silo's likelihood is fitted on its own statistics
alone, so what it states cannot change what the router says of two others; but the network on top, the temperature and
the choice of the family are fitted on all together, weighted by units. There a silo's share is capped. Its prior in
the ensemble is not: that is a statement which everybody reads, and which a researcher can replace.
"""

from collections.abc import Sequence

import numpy as np

from ddm.errors import MathError

# Shape legend: K silos.


def capped_shares(num_units: Sequence[int], cap: float) -> tuple[float, ...]:
    """Return each silo's share of all units, none above `cap`; what is cut goes to the others by their shares.

    With fewer than 1 / cap silos no shares fulfil that, and all are equal.

    Args:
        num_units: the public number of units of each silo, above 0.
        cap: in (0, 1]; 1 leaves every share as it is.

    Raises:
        MathError: a cap or a number of units out of range.
    """
    if not 0.0 < cap <= 1.0 or not num_units or min(num_units) < 1:
        raise MathError("shares of influence", expected="a cap in (0, 1] and units above 0", got="others")
    units_K = np.asarray(num_units, dtype=np.float64)
    share_K, cap = units_K / units_K.sum(), max(cap, 1.0 / len(units_K))
    cut_K = np.zeros(len(units_K), dtype=bool)
    while bool((over_K := share_K > cap * (1.0 + 1e-12)).any()):
        cut_K |= over_K
        left = 1.0 - cap * cut_K.sum()
        share_K = np.where(cut_K, cap, units_K / max(units_K[~cut_K].sum(), 1.0) * left)
    return tuple((share_K / share_K.sum()).tolist())
