"""The metrics of one set of samples against a reference, and of the reference against itself, from features alone."""

# Shape legend: N samples, M reference features, D values of one feature.
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm.errors import MathError, NumericalError, ShapeError
from ddm.evaluation.frechet import Moments, extrapolated, frechet_terms, transport
from ddm.evaluation.intervals import Estimate, proportion, resampled
from ddm.evaluation.neighbours import Between, Tick, Within, between, kernel_distance, within

LEAST = 8  # images, below which no metric says anything
_DOUBLE_BYTES, _FLOAT_BYTES = 8, 4
_MATRICES, _BLOCKS_BYTES = 12, 1 << 28  # of D x D values alive together; of blocks of products


@dataclass(frozen=True)
class Side:
    """One set of features, with all that does not depend on what it is compared with.

    Attributes:
        features_ND: float32.
        moments: for the Fréchet distance.
        within: neighbours and kernel sums.
    """

    features_ND: Tensor
    moments: Moments
    within: Within

    @classmethod
    def of(cls, features_ND: Tensor, k: int, tick: Tick | None = None) -> "Side":
        """Compute them.

        Raises:
            ShapeError: no matrix.
            MathError: too few features, or k out of range.
            NumericalError: features that are not finite.
        """
        if features_ND.ndim != 2:
            raise ShapeError("features", expected="shape (N, D)", got=str(tuple(features_ND.shape)))
        if k < 1 or len(features_ND) < max(LEAST, k + 1):
            expected = f"at least {max(LEAST, k + 1)} images for {k} neighbours"
            remedy = "Evaluate more images, or ask for fewer neighbours."
            raise MathError("features", expected=expected, got=str(len(features_ND)), remedy=remedy)
        if not bool(features_ND.isfinite().all()):
            raise NumericalError("features", expected="finite numbers", got="NaN or infinity")
        return cls(features_ND, Moments.of(features_ND), within(features_ND, k, tick))


def measure(
    samples: Side, reference: Side, *, seed: int = 0, tick: Tick | None = None
) -> tuple[dict[str, Estimate], Between]:
    """Compute every metric of samples against a reference.

    Args:
        samples: of the samples.
        reference: of the reference, with the same k.
        seed: of intervals and halves.
        tick: called after each block of samples.

    Returns:
        `fid`, `fid_infinity` (where both sets have more than twice as many images as features), `kid`, `precision`,
        `recall`, `density` and `coverage`, and how samples and reference lie to each other.

    Raises:
        ShapeError: features of two lengths.
    """
    dims = samples.features_ND.shape[1], reference.features_ND.shape[1]
    if dims[0] != dims[1]:
        raise ShapeError(
            "features", expected=f"{dims[1]} values, as of the reference", got=str(dims[0])
        )
    a, b = samples.moments, reference.moments
    maps = transport(a, b)
    terms = [
        frechet_terms(samples.features_ND, a, b, maps.there_DD),
        frechet_terms(reference.features_ND, b, a, maps.back_DD),
    ]
    around = resampled(maps.distance, terms, seed=seed)
    found = {"fid": replace(around, low=max(around.low, 0.0))}
    limit = extrapolated(maps.distance, samples.features_ND, reference.features_ND, seed=seed)
    if limit is not None:  # to first order it moves with an image as the distance does
        moved = limit - around.value
        found["fid_infinity"] = Estimate(limit, around.low + moved, around.high + moved)
    both = between(
        samples.features_ND, reference.features_ND, samples.within, reference.within, tick
    )
    kid, kid_terms = kernel_distance(samples.within, reference.within, both)
    found["kid"] = resampled(kid, kid_terms, seed=seed)
    found["precision"], found["recall"] = proportion(both.inside_N), proportion(both.recalled_M)
    density_N = both.balls_N.double() / reference.within.k
    density = resampled(float(density_N.mean()), [density_N], seed=seed)
    found["density"] = replace(density, low=max(density.low, 0.0))
    found["coverage"] = proportion(both.covered_M)
    return found, both


def floor(
    reference: Side, num: int, *, seed: int = 0
) -> tuple[dict[str, Estimate], int, int] | None:
    """Measure one half of the reference against the other: what perfect samples would score.

    Args:
        reference: the reference.
        num: most images of the half that takes the samples' place, as many as there are samples.
        seed: of the halves.

    Returns:
        The metrics and the number of images of either half; None where a half has no more images than features.
    """
    order_M = torch.randperm(
        len(reference.features_ND), generator=torch.Generator().manual_seed(seed)
    )
    half = len(order_M) // 2
    first_M, second_M = order_M[:half][:num], order_M[half:]
    k = reference.within.k
    if min(len(first_M), len(second_M)) <= max(reference.features_ND.shape[1], k, LEAST):
        return None
    sides = (Side.of(reference.features_ND[part], k) for part in (first_M, second_M))
    return measure(*sides, seed=seed)[0], len(first_M), len(second_M)


def metrics_bytes(num: int, num_reference: int, dim: int, pixels: int) -> int:
    """Return the bytes that an evaluation takes beside the samples, by its numbers alone.

    Args:
        num: samples.
        num_reference: reference images.
        dim: values of one feature.
        pixels: values of one image as copies are looked for.
    """
    # all, the halves, and one silo's
    rows = 3 * (num + num_reference) * (dim + pixels) * _FLOAT_BYTES
    return rows + _MATRICES * _DOUBLE_BYTES * dim**2 + _BLOCKS_BYTES


def as_json(metrics: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Return metrics as JSON prints them."""
    return {
        name: {"value": each.value, "low": each.low, "high": each.high}
        for name, each in metrics.items()
    }
