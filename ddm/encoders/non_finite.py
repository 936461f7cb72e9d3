"""Rows of a network's output that are not finite: refused where data are public, and replaced where they are private.

A silo must not stop, nor do anything else that others see, because a network that came with a plan overflows for one
of its images: that would answer a question about the image which no ledger debits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddm.errors import ArchipelagoError


def replace_non_finite(
    rows: Tensor,
    replacement: float | None,
    error: Callable[[], ArchipelagoError],
) -> Tensor:
    """Return rows whose values are all finite; each row depends on itself alone.

    Args:
        rows: shape (N, ...).
        replacement: every value of a row that has values that are not finite; None refuses such rows.
        error: makes the error of a refusal.
    """
    is_broken_N = ~torch.isfinite(rows).flatten(1).all(1)
    if not bool(is_broken_N.any()):
        return rows
    if replacement is None:
        raise error()
    num_inner = rows.ndim - 1
    return rows.masked_fill(is_broken_N.reshape(-1, *[1] * num_inner), replacement)
