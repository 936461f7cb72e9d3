"""Which silo each sample came from, and the share of the samples that each silo should have."""

# Shape legend: N samples, S silos.
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from ddm.errors import MathError, ShapeError
from ddm.io.array_input import real_tensor


@dataclass(frozen=True)
class ResolvedOrigins:
    """The silos of samples, checked.

    Attributes:
        silo_N: the number of each sample's silo, int64.
        names: the silos' names, by number.
        weights: the share that each silo should have, in the caller's unit; None where it is not known.
    """

    silo_N: Tensor
    names: tuple[str, ...]
    weights: list[float] | None

    def counts(self) -> dict[str, int]:
        """Return the number of samples by silo."""
        num_S = torch.bincount(self.silo_N, minlength=len(self.names))
        return dict(zip(self.names, num_S.tolist(), strict=True))


@dataclass(frozen=True)
class SampleOrigins:
    """The silos that samples came from.

    Attributes:
        silo_N: the index of the silo of each sample, such as `Samples.expert_N`: an array or a tensor.
        silos: the silos' names, in order; by default their indices.
        prior: the share that each silo should have, in any unit; None where it is not known.
    """

    silo_N: Any
    silos: Sequence[str] = ()
    prior: Any = None

    def resolve(self, num_samples: int) -> ResolvedOrigins:
        """Check the silos of `num_samples` samples.

        Raises:
            DataError: silos or a prior that are not numbers.
            ShapeError: not one whole number from 0, of a silo that exists, for each sample; or not one weight for each
                silo.
            MathError: weights below 0, that are not finite, or all 0.
        """
        num_silos = len(self.silos) or None
        silo_N = _silo_numbers(self.silo_N, num_samples, num_silos)
        names = tuple(self.silos)
        if not names:
            names = _numbered_silos(silo_N, self.prior)
        weights = None
        if self.prior is not None:
            weights = _weights(self.prior, len(names))
        return ResolvedOrigins(silo_N, names, weights)


def _numbered_silos(silo_N: Tensor, prior: Any) -> tuple[str, ...]:
    """Name silos by their numbers; a silo without samples is known by its weight in the prior."""
    num_silos = int(silo_N.max()) + 1
    if prior is not None:
        num_weights = real_tensor(prior, "prior").numel()
        num_silos = max(num_silos, num_weights)
    return tuple(str(index) for index in range(num_silos))


def _silo_numbers(
    silo_N: Any,
    num_samples: int,
    num_silos: int | None,
) -> Tensor:
    """Return the index of the silo of each sample, int64.

    Args:
        silo_N: the caller's.
        num_samples: N.
        num_silos: how many silos there are; None where only their numbers are known.

    Raises:
        DataError: no numbers.
        ShapeError: not one whole number from 0, of a silo that exists, for each sample.
    """
    silos = "a silo"
    if num_silos is not None:
        silos = f"one of {num_silos} silos"
    expected = f"the number of {silos} for each of {num_samples} samples"
    numbers = real_tensor(silo_N, "silo_N").cpu()
    shape = tuple(numbers.shape)
    if shape != (num_samples,) or num_samples == 0:
        raise ShapeError("silo_N", expected=expected, got=f"shape {shape}")
    whole = numbers.long()
    # A number that is not whole would become that of another silo, and NaN that of any.
    are_whole = bool((whole == numbers).all())
    are_silos = int(whole.min()) >= 0
    if num_silos is not None:
        are_silos = are_silos and int(whole.max()) < num_silos
    if not are_whole or not are_silos:
        raise ShapeError("silo_N", expected=expected, got="other numbers")
    return whole


def _weights(prior: Any, num_silos: int) -> list[float]:
    """Return one weight for each silo, in the caller's unit.

    Raises:
        DataError: no numbers.
        ShapeError: another number of weights.
        MathError: weights below 0, that are not finite, or all 0.
    """
    weight_S = real_tensor(prior, "prior").double().cpu()
    shape = tuple(weight_S.shape)
    if shape != (num_silos,):
        raise ShapeError(
            "prior",
            expected=f"{num_silos} weights, one for each silo",
            got=f"shape {shape}",
        )
    total = float(weight_S.sum())
    are_at_least_0 = bool((weight_S >= 0).all())
    # Written with `not`, so that NaN, for which every comparison is false, is refused too.
    if not are_at_least_0 or not 0 < total < inf:
        raise MathError(
            "prior",
            expected="finite weights of at least 0, not all 0",
            got="other weights",
        )
    weights: list[float] = weight_S.tolist()
    return weights
