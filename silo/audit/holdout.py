"""Draws the units that no expert of this site learns, so that the audit can compare members with others.

A unit's rank follows from the secret beside the ledger and from the patient's identifier (of images without patients,
from their place in the data), so that every plan of the same data leaves out the same units and nobody else can know
which. How many they are follows from the number of units, which is public, and from policy.toml alone.
"""

import torch
from torch import Tensor

from silo.config import Policy
from silo.data.cohort import Cohort

# Shape legend: N images, U units.


def num_holdout_units(num_units: int, policy: Policy) -> int:
    """Return how many units are held out; none where that is too few to measure anything.

    A site also holds nothing out where fewer units than `training.min_images` would be left to learn from.
    """
    audit = policy.audit
    num_holdout = min(audit.num_holdout_units(num_units), audit.max_holdout_units)
    num_learned = num_units - num_holdout
    if num_holdout < audit.min_holdout_units or num_learned < policy.training.min_images:
        return 0
    return num_holdout


def holdout_mask(cohort: Cohort, policy: Policy) -> Tensor:
    """Return which images belong to units held out, boolean (N,)."""
    num_holdout = num_holdout_units(cohort.num_units, policy)
    by_rank_U = torch.argsort(cohort.rank_U, stable=True)
    is_holdout_U = torch.zeros(cohort.num_units, dtype=torch.bool)
    is_holdout_U[by_rank_U[:num_holdout]] = True
    return is_holdout_U[cohort.unit_N]
