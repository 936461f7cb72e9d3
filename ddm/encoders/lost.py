"""Rows of a network's output that are not finite: refused where data are public, and filled in where they are private.

A silo must not stop, nor do anything else that others see, because a network that came with a plan overflows for one
of its images: that would answer a question about the image which no ledger debits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddm.errors import ArchipelagoError


def fill_lost(found: Tensor, lost: float | None, error: Callable[[], ArchipelagoError]) -> Tensor:
    """Return rows whose values are all finite; each row depends on itself alone.

    Args:
        found: shape (N, ...).
        lost: what every value of a row becomes that is not finite throughout; None refuses it.
        error: what to raise then.
    """
    lost_N = ~torch.isfinite(found).flatten(1).all(1)
    if not bool(lost_N.any()):
        return found
    if lost is None:
        raise error()
    return found.masked_fill(lost_N.reshape(-1, *[1] * (found.ndim - 1)), lost)
