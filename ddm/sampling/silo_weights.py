"""Divides weights of silos among their experts; imports no torch, so that the command line knows it at once."""

from collections.abc import Mapping, Sequence
from math import isfinite

from ddm.errors import MathError


def silos_with_data(silo_ids: Sequence[str], data_prior: Sequence[float]) -> list[str]:
    """Return the silos whose experts have data; another one has no share that could be weighed.

    Args:
        silo_ids: the silo of each expert.
        data_prior: each expert's share of all data.
    """
    return list(_silo_shares(silo_ids, data_prior))


def weights_of_experts(
    silo_weights: str | Mapping[str, float], silo_ids: Sequence[str], data_prior: Sequence[float]
) -> list[float]:
    """Return a weight for each expert: a silo's goes to its experts in proportion to their data.

    Args:
        silo_weights: by silo, in any unit, a silo that is not named is left out; or a word: data, for the shares of the
            data as they are, or equal.
        silo_ids: the silo of each expert.
        data_prior: each expert's share of all data.

    Raises:
        MathError: another word, a silo without data, a weight out of range, or none above 0.
    """
    if silo_weights == "data":
        return list(data_prior)
    silo_shares = _silo_shares(silo_ids, data_prior)
    if silo_weights == "equal":
        silo_weights = dict.fromkeys(silo_shares, 1.0)
    if isinstance(silo_weights, str):
        raise MathError("prior", expected="data, equal, or weights", got=repr(silo_weights[:60]))

    expected = (
        f"weights of at least 0, one of them above 0, of silos among {', '.join(silo_shares)}"
    )
    for silo_id, weight in silo_weights.items():
        if silo_id not in silo_shares or not isfinite(weight) or weight < 0:
            raise MathError("prior", expected=expected, got=f"{silo_id[:60]!r}: {weight}")
    total = sum(silo_weights.values())
    if total <= 0:
        raise MathError("prior", expected=expected, got=f"{len(silo_weights)} weights of 0")

    weights = []
    for silo_id, prior in zip(silo_ids, data_prior, strict=True):
        silo_weight = silo_weights.get(silo_id, 0.0)
        if silo_weight == 0.0:
            weights.append(0.0)
        else:
            weights.append(silo_weight / total * prior / silo_shares[silo_id])
    return weights


def _silo_shares(silo_ids: Sequence[str], data_prior: Sequence[float]) -> dict[str, float]:
    """Return each silo's share of all data, where it has any."""
    silo_shares = dict.fromkeys(silo_ids, 0.0)
    for silo_id, prior in zip(silo_ids, data_prior, strict=True):
        silo_shares[silo_id] += prior
    return {silo_id: share for silo_id, share in silo_shares.items() if share > 0}
