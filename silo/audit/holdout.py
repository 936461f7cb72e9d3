"""Draws the units that no expert of this site learns, so that the audit has somebody to compare members with.

A unit's rank follows from the secret beside the ledger and from the patient's identifier (of images without patients,
from their place in the data), so that every plan of the same data leaves out the same units and nobody else can tell
which. How many they are follows from the number of units, which is public, and from policy.toml alone.
"""

import torch
from torch import Tensor

from silo.config import Policy
from silo.data.cohort import Cohort

# Shape legend: N images, U units.


def num_held_out(num_units: int, policy: Policy) -> int:
    """Return how many units are held out: a share of them, or none where that is too few to measure anything.

    A site also holds nothing out where fewer units than `training.min_images` would be left to learn from.
    """
    terms = policy.audit
    num = min(int(terms.holdout_share * num_units), terms.max_holdout_units)
    return (
        num
        if num >= terms.min_holdout_units and num_units - num >= policy.training.min_images
        else 0
    )


def held_out(cohort: Cohort, policy: Policy) -> Tensor:
    """Return which images belong to units held out, boolean (N,)."""
    held_U = torch.zeros(cohort.num_units, dtype=torch.bool)
    held_U[torch.argsort(cohort.rank_U, stable=True)[: num_held_out(cohort.num_units, policy)]] = (
        True
    )
    return held_U[cohort.unit_N]
